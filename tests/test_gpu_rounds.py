"""Rounds on the device, on a CPU: kernels in Triton's interpreter, passes by the kernels' twins."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from outrider.backends.cuda import kernels, novelty, twins
from outrider.backends.cuda.backend import GpuBackend
from outrider.backends.cuda.layout import Shape, arrange, fill, size_of, view
from outrider.backends.cuda.measuring import MeasuredPasses
from outrider.backends.cuda.sampling import DeviceSampling
from outrider.bench import gpu_peers, gpu_rounds
from outrider.config import ModelConfig
from outrider.draft.layerskip import LayerSkipDrafter
from outrider.draft.model import ModelDrafter
from outrider.draft.ngram import NgramDrafter
from outrider.draft.run_ahead import Cores, RunAheadDrafter
from outrider.draft.synthetic import Spoiling, SyntheticDrafter
from outrider.engine.engine import Engine
from outrider.engine.runner import second_gpu
from outrider.errors import OutriderError
from outrider.kv.pages import Pages
from outrider.models.random_file import SHAPES, RandomFile, build_shape
from outrider.spec.controller import WidthController
from outrider.types import Batch, Drafts, Request, Scores
from rounds import REFERENCE, SETTINGS, Round, job
from sampling_twins import by_twins  # noqa: F401 - a fixture

from cases import Case, measure
from conftest import drafter_of

PAGE = 4
TENSORS: dict[str, Any] = {"arrays": "torch", "draft_arrays": "torch"}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ops() -> DeviceSampling:
    return DeviceSampling(CPU)


def judged(ops: DeviceSampling, batch: Round) -> Any:
    probs = None if batch.probs is None else torch.tensor(batch.probs)
    drafts = Drafts(batch.counts, torch.tensor(batch.tokens), probs, batch.parents)
    return ops.judge(batch.jobs, drafts, Scores(batch.rows, torch.as_tensor(batch.logits)))


@pytest.mark.parametrize("size", [5, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 129, 1000))])
def test_verdicts_are_the_reference_s(ops: DeviceSampling, size: int) -> None:
    """Both rules, chains, trees, certain and sampled drafts, every control, rows that cannot be used."""
    settings = SETTINGS if size > 2 else SETTINGS[:-1]
    for seed in range(25):
        batch = Round(seed * 100 + size, size, settings)
        assert batch.told(judged(ops, batch)) == batch.told(batch.judge(REFERENCE)), (seed, size)


def test_verdicts_over_several_blocks(ops: DeviceSampling) -> None:
    """A row longer than one program takes."""
    for seed in range(4):
        batch = Round(seed, 9001, SETTINGS[:4])
        assert batch.told(judged(ops, batch)) == batch.told(batch.judge(REFERENCE)), seed


@pytest.mark.parametrize(
    "case",
    [
        Case("chain", "model", 3, "rejection", **TENSORS),
        Case("coupled", "model", 2, "coupled", {"temperature": 0.8}, **TENSORS),
        Case("mixed tree", "mixed", 8, "rejection", tree=True, **TENSORS),
        Case("tree", "model", 6, "coupled", tree=True, **TENSORS),
    ],
    ids=lambda case: case.name,
)
@pytest.mark.slow
def test_the_law_holds(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.backends.mock.SamplingOps", lambda xp, device: DeviceSampling(CPU))
    assert measure(case, 250) > 1e-4


def test_draws_without_a_look(ops: DeviceSampling) -> None:
    """Step after step the tokens and rows that `draft` gives; greedy, coupled and weighed requests in one batch."""
    size, steps = 700, 3
    asked = [{"temperature": 0.0}, {"accept": "coupled"}, {"accept": "rejection", "min_p": 0.02, "temperature": 0.8}]
    jobs = [job(size, [1, 2, 3][: index + 1], seed=index, **settings) for index, settings in enumerate(asked)]
    rows = torch.from_numpy(np.random.default_rng(0).standard_normal((steps, 3, size)).astype(np.float32) * 3)
    drawing = ops.drawing(jobs, steps)
    assert drawing is not None
    drafted: list[list[int]] = [[], [], []]
    probs = []
    for step in range(steps):
        drawn = REFERENCE.draft(jobs, drafted, rows[step].numpy())
        assert drawing.step(rows[step]).tolist() == drawn.tokens.tolist()
        for line, token in zip(drafted, drawn.tokens.tolist(), strict=True):
            line.append(token)
        probs.append(drawn.probs)
    tokens, given = drawing.result([3, 1, 2])
    assert tokens.tolist() == [*drafted[0], drafted[1][0], *drafted[2][:2]] and given is not None
    wanted = np.stack([probs[step][owner] for owner, step in [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]])
    np.testing.assert_allclose(given.numpy(), wanted, rtol=2e-5, atol=1e-30)
    assert ops.drawing([job(size, top_k=3)], 2) is None, "the whole row decides: the reference draws"


@pytest.mark.parametrize("per", [1, 2])
def test_rows_move_on(per: int) -> None:
    """Where rows stand after a move is where a pass of its own would put them."""
    starts, moved, ahead = [3, 130, 4094], [2, 0, 5], 6
    free = np.random.default_rng(0).permutation(4000).tolist()
    pages = [[free.pop() for _ in range(-(-(start + per + ahead) // PAGE))] for start in starts]

    def layout(begin: list[int], ahead: int) -> Any:
        rows = arrange(begin, [per] * 3, pages, PAGE, {}, tile=4, max_splits=32, by_path=False, ahead=ahead)
        shape = Shape(3 * per + 2, 4, 4, "")
        numbers = torch.zeros(size_of(shape) + len(rows.table), dtype=torch.int32)
        fill(rows, shape, 16_000, numbers.numpy())
        return view(numbers, shape, 32)

    fed, by = torch.arange(3 * per, dtype=torch.int32) + 7, torch.tensor(moved, dtype=torch.int32)
    wanted = layout([start + more for start, more in zip(starts, moved, strict=True)], 0)
    for how in (kernels, twins):
        ours = layout(starts, ahead)
        how.advance(ours, fed, by, page_size=PAGE, max_splits=32)
        assert ours["tokens"].tolist() == [*fed.tolist(), 0, 0]
        for name in ("positions", "places", "lasts", "groups", "firsts", "lengths", "splits"):
            assert ours[name].tolist() == wanted[name].tolist(), (how.__name__, name)


@pytest.fixture(scope="module")
def model() -> RandomFile:
    SHAPES["tiny"] = build_shape("llama", 2, 32, (4, 2, 8), 48, 60, context=512, tied=True)
    return RandomFile("tiny")


def noise(like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(0)) * like.std()


def on_device(model: RandomFile, pages: Pages) -> GpuBackend:
    """On a CPU, but drawn and judged as on a GPU."""
    backend = GpuBackend(model, pages, device="cpu", dtype=torch.float32)
    backend.ops = DeviceSampling(CPU)
    backend.ops.foresee, backend.ops.may_defer = backend.foresee, True
    backend.info = replace(backend.info, prelaunch=True)
    return backend


def engines(model: RandomFile, method: str) -> tuple[Engine, Any]:
    pages = Pages(128, PAGE)
    target = on_device(model, pages)
    if method == "layerskip":
        drafter: Any = LayerSkipDrafter(target.view(1))
    else:
        drafter = ModelDrafter(on_device(model, pages), shares_slots=True)
        weights = drafter.backend.weights  # another model, which often agrees
        drafter.backend.weights = weights._replace(output=weights.output + 0.5 * noise(weights.output))
    return Engine(target, [drafter], threaded=False), drafter


def running_ahead(target: GpuBackend, drafter: Any, run_ahead: Any) -> Engine:
    """As `Engine.load` would build it."""
    if run_ahead:
        drafter = RunAheadDrafter(drafter, target.ops, always=run_ahead == "always", cores=Cores(None))
    return Engine(target, [drafter], threaded=False)


def check_draft(engine: Engine, drafter: Any) -> None:
    """After every round the draft's cache holds emitted tokens only."""
    for running in engine.loop.scheduler.running if isinstance(drafter, ModelDrafter) else ():
        seat = drafter.seats.get(running.id)
        if seat is not None:
            assert not seat.ahead and seat.length == drafter.backend.length(seat.slot) < len(running.tokens)


RULES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3, "accept": "coupled"},
    {"temperature": 0.9, "seed": 3, "accept": "coupled", "top_p": 0.9},
]


@pytest.mark.usefixtures("by_twins")
@pytest.mark.parametrize("method", ["model", "layerskip"])
@pytest.mark.parametrize("settings", [RULES[0], *(pytest.param(rule, marks=pytest.mark.slow) for rule in RULES[1:])])
def test_a_draft_that_goes_on_by_itself_changes_no_text(
    model: RandomFile, method: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, drafter = engines(model, method)
    rolled: list[int] = []
    backend = drafter.view if method == "layerskip" else drafter.backend
    roll = backend.roll
    monkeypatch.setattr(
        type(backend), "roll", lambda self, spans, steps, drawing: rolled.append(steps) or roll(spans, steps, drawing)
    )
    taken: list[bool] = []
    scored: list[int] = []  # of spans that were drafted for: how many had run before anybody asked
    target: Any = engine.loop.target
    take = target._take_queued

    def count(spans: Any, hidden: Any) -> Any:
        done = take(spans, hidden)
        scored.extend(len(done) for _ in range(spans.later is not None))
        return done

    monkeypatch.setattr(target, "_take_queued", count)
    if method == "model":
        good = drafter._still_good
        monkeypatch.setattr(drafter, "_still_good", lambda *args: (taken.append(bool(found := good(*args))), found)[1])
    prompts = [[1, 2, 3] * 6, [9, 8, 7, 6, 5], [4] * 11]
    given = {"max_tokens": 30, "ignore_eos": True, **settings}
    wanted = [one.token_ids for one in engine.generate(prompts, width=0, **given)]
    for widths in ([4, 4, 4], [1, 5, 2]):
        requests = [
            Request.of(prompt, {"width": width, **given}) for prompt, width in zip(prompts, widths, strict=True)
        ]
        streams = engine.open_streams(requests)
        while engine.num_requests:
            engine.step()
            engine.loop.check()
            check_draft(engine, drafter)
        ended = [[token for event in stream for token in event.tokens] for stream in streams]  # raises what went wrong
        assert ended == wanted
    assert engine.statistics.accepted > 20, "some drafts were kept"
    if method == "model" and rolled:
        assert taken.count(True) > 15 and taken.count(False) < 4, "most were drafted before the host had looked"
        assert sum(map(bool, scored)) > 15 and scored.count(0) < 6, "and fed to the target, too"
    assert ("top_p" in settings) == (not rolled), "where a row must be looked at as a whole, the reference draws"


@pytest.mark.usefixtures("by_twins")
def test_a_round_that_built_something_says_so(model: RandomFile, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engines(model, "model")
    target, seen = engine.loop.target, list[bool]()
    judge = target.ops.judge
    monkeypatch.setattr(
        target.ops, "judge", lambda *given: (verdicts := judge(*given), seen.append(verdicts.is_first))[0]
    )
    stream = engine.open_streams([Request.of([1, 2, 3], {"width": 2, "max_tokens": 40, **GREEDY})])
    for built in (False, True, False, True, True, False):
        for _ in range(built):
            novelty.note()
        engine.step()
        assert seen.pop() is built
    queue = target._queue_drafts  # type: ignore[attr-defined]
    monkeypatch.setattr(target, "_queue_drafts", lambda *given: (novelty.note(), queue(*given)))
    engine.step()
    monkeypatch.setattr(target, "_queue_drafts", queue)
    assert seen.pop() is True, "what is built for the next round delays this one"
    engine.step()
    assert seen.pop() is True, "and the next"
    learned = engine.loop.controller.costs.num_rounds
    assert stream and learned == 2, "the others teach what passes cost, but for the prompt's"


@pytest.mark.usefixtures("by_twins")
def test_weighed_drafts_are_those_of_the_reference(model: RandomFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under rejection an answer depends on what was drafted, and from which rows: with and without a look of the host
    it is the same."""
    given = {"max_tokens": 24, "ignore_eos": True, "temperature": 1.1, "seed": 5, "accept": "rejection"}
    prompts = [[1, 2, 3] * 6, [9, 8, 7, 6, 5], [4] * 11]
    answers = []
    for looks in (False, True):
        engine, drafter = engines(model, "model")
        if looks:
            monkeypatch.setattr(drafter.backend, "roll", lambda spans, steps, drawing: False)
        requests = [Request.of(prompt, {"width": 1 + number, **given}) for number, prompt in enumerate(prompts)]
        answers.append([result.token_ids for result in engine.generate(requests)])
        assert 10 < engine.statistics.accepted < engine.statistics.drafted
    assert answers[0] == answers[1]


def plainly(engine: Engine, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    return [result.token_ids for result in engine.generate(prompts, width=0, **settings)]


GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.mark.usefixtures("by_twins")
def test_a_draft_that_is_asked_twice_in_a_round(model: RandomFile) -> None:
    """By one request first, by another after a lookup that found nothing."""
    engine, drafter = engines(model, "model")
    engine = Engine(engine.loop.target, [drafter, NgramDrafter()], threaded=False)
    prompts = [[1, 2, 3, 4], [9, 8, 7]]
    wanted = plainly(engine, prompts, max_tokens=24, **GREEDY)
    requests = [
        Request.of(prompt, {"method": method, "width": 3, "max_tokens": 24, **GREEDY})
        for prompt, method in zip(prompts, ("model", "ngram,model"), strict=True)
    ]
    assert [result.token_ids for result in engine.generate(requests)] == wanted
    assert engine.statistics.accepted > 5


@pytest.mark.usefixtures("by_twins")
def test_who_joins_does_not_spoil_what_was_begun(model: RandomFile, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, drafter = engines(model, "model")
    members: list[int] = []
    good = drafter._still_good
    monkeypatch.setattr(drafter, "_still_good", lambda *args: (members.append(len(found := good(*args))), found)[1])
    prompts = [[1, 2, 3] * 6, [9, 8, 7, 6, 5], [4] * 11]
    wanted = plainly(engine, prompts, max_tokens=40, **GREEDY)
    given = {"width": 3, "max_tokens": 40, **GREEDY}
    streams = engine.open_streams(prompts[:2], **given)
    for _ in range(4):
        engine.step()
    streams += engine.open_streams(prompts[2:], **given)
    assert [[token for event in stream for token in event.tokens] for stream in streams] == wanted
    assert 0 not in members and 2 in members[3:] and 3 in members, "two go on while the third begins"


@pytest.mark.usefixtures("by_twins")
def test_what_cannot_be_queued_harms_nobody(
    model: RandomFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, drafter = engines(model, "model")
    wanted = plainly(engine, [[1, 2, 3]], max_tokens=20, **GREEDY)

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(drafter.backend, "roll_on", fail)
    result = engine.generate([1, 2, 3], width=3, max_tokens=20, **GREEDY)
    assert [result.token_ids] == wanted and "no memory is left" in caplog.text


@pytest.mark.usefixtures("by_twins")
def test_no_page_is_taken_on_the_draft_s_thread(model: RandomFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow request goes as far as the widest: its room is taken before."""
    engine, drafter = engines(model, "model")
    ahead = running_ahead(engine.loop.target, drafter, "always")
    take, threads = Pages._take, set()
    monkeypatch.setattr(Pages, "_take", lambda *args: (threads.add(threading.current_thread().name), take(*args))[1])
    requests = [
        Request.of(prompt, {"width": 8, "max_tokens": length, **GREEDY})
        for prompt, length in (([1, 2, 3] * 6, 13), ([9, 8, 7, 6, 5], 60))
    ]
    ahead.generate(requests)
    assert len(threads) == 1


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_a_synthetic_draft_is_right_as_often_as_it_is_told(model: RandomFile, share: float) -> None:
    SHAPES["tiny-untied"] = build_shape("llama", 2, 32, (4, 2, 8), 48, 60, context=512)
    engine = Engine.load("random:tiny-untied:counting", draft=f"synthetic:tiny@{share}", device="cpu")
    result = engine.generate([3, 4, 5], width=4, max_tokens=200, temperature=0.0, ignore_eos=True)
    assert result.token_ids == [(6 + place) % 60 for place in range(200)], "the target counts, whatever was drafted"
    seen = result.statistics
    judged = seen.accepted + seen.rejected
    assert abs(seen.accepted / judged - share) < 0.1


@pytest.mark.usefixtures("by_twins")
@pytest.mark.parametrize("settings", [RULES[0], RULES[1], {"temperature": 1.1, "seed": 5, "accept": "rejection"}])
def test_running_ahead_of_the_verdict_changes_no_text(
    model: RandomFile, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's thread lets its model go on by itself, too."""
    prompts = [[1, 2, 3] * 6, [9, 8, 7, 6, 5]]
    given = {"max_tokens": 24, "ignore_eos": True, "width": 3, **settings}
    engine, drafter = engines(model, "model")
    wanted = [result.token_ids for result in engine.generate(prompts, **given)]
    ahead = running_ahead(engine.loop.target, drafter, "always")
    assert [result.token_ids for result in ahead.generate(prompts, **given)] == wanted
    assert drafter_of(ahead).overlap.fresh > 0


def test_a_synthetic_draft_hands_over_no_rows_that_its_tokens_were_not_drawn_from() -> None:
    sampled = job(60, seed=1, accept="rejection")
    rows = np.random.default_rng(0).standard_normal((1, 60)).astype(np.float32)
    assert REFERENCE.draft([sampled], [[]], rows).probs is not None
    drawn = Spoiling(REFERENCE, 0.5, 60).draft([sampled], [[]], rows)
    assert drawn.probs is None and drawn.tokens.shape == (1,)


@pytest.mark.usefixtures("by_twins")
def test_a_synthetic_draft_rolls(model: RandomFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device, and behind a verdict that the host does not know: the same text, the same share."""
    SHAPES["tiny-untied"] = build_shape("llama", 2, 32, (4, 2, 8), 48, 60, context=512)
    pages = Pages(256, PAGE)
    target, draft = on_device(RandomFile("tiny-untied:counting"), pages), on_device(model, pages)
    drafter = SyntheticDrafter(draft, 0.8, shares_slots=True)
    engine = Engine(target, [drafter], threaded=False)
    prompts = [[3, 4, 5], [50, 51]]
    results = engine.generate(prompts, width=3, max_tokens=120, temperature=0.0, ignore_eos=True)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == [(prompt[-1] + 1 + place) % 60 for place in range(120)]
    seen = engine.statistics
    assert abs(seen.accepted / (seen.accepted + seen.rejected) - 0.8) < 0.1


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        ("random:tiny", "synthetic:tiny@0.5", "a target whose words are known, not tiny"),
        ("random:tiny:counting", "none", "cannot count; choose one of llama-3.1-8b"),
        ("random:tiny:singing", "none", "write random:tiny or random:tiny:counting"),
        ("random:tiny", "synthetic:tiny", "write synthetic:llama-3.2-1b@0.8"),
        ("random:tiny", "synthetic:tiny@1.5", "write synthetic:llama-3.2-1b@0.8"),
    ],
)
def test_what_is_measured_must_fit(model: RandomFile, target: str, draft: str, message: str) -> None:
    with pytest.raises(OutriderError, match=message):
        Engine.load(target, draft=draft, device="cpu")


@pytest.mark.usefixtures("by_twins")
def test_passes_and_steps_are_measured(model: RandomFile, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(40, PAGE)
    target, other = on_device(model, pages), on_device(model, pages)
    assert target.pass_s(1, 1) is None and other.roll_s(1, 2) is None, "on a CPU there is nothing to learn"
    monkeypatch.setattr(MeasuredPasses, "measures_cpu", True)
    assert all(target.pass_s(jobs, rows) > 0.0 for jobs, rows in ((1, 1), (1, 4), (4, 4)))
    assert all(other.roll_s(jobs, steps) > 0.0 for jobs, steps in ((1, 1), (1, 3), (4, 3)))
    assert target.pass_s(200, 1) is None and other.roll_s(200, 1) is None
    assert not pages.leases, "nothing is left open, not even where there is no room"


@pytest.mark.slow
@pytest.mark.usefixtures("by_twins")
def test_the_bench_of_rounds_runs(model: RandomFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where its numbers mean nothing: every line is there."""
    SHAPES["tiny-untied"] = build_shape("llama", 2, 32, (4, 2, 8), 48, 60, context=512)

    def load(shape: str, draft: str, device: str, batch: int, length: int) -> Engine:
        pages = Pages(600, PAGE)
        target, other = on_device(RandomFile(f"{shape}:counting"), pages), on_device(RandomFile(draft), pages)
        return running_ahead(target, SyntheticDrafter(other, 0.8, shares_slots=True), False)

    monkeypatch.setattr(gpu_rounds, "load", load)
    monkeypatch.setattr(gpu_rounds, "MOST", 3)
    monkeypatch.setattr(gpu_rounds, "CONTEXT", 8)
    monkeypatch.setattr(gpu_rounds, "SHARES", (0.5, 0.9))
    monkeypatch.setattr(MeasuredPasses, "measures_cpu", True)
    monkeypatch.setattr(gpu_rounds, "REQUESTS", {True: (24, 1), False: (24, 1)})
    monkeypatch.setattr(gpu_rounds, "BATCHED", 64)
    monkeypatch.setattr(gpu_rounds, "BEGINNING", 8)
    lines = list(gpu_rounds.rounds("tiny-untied", "tiny", "cpu", quick=True))
    names = [line.name for line in lines]
    assert names[2] == "plain" and len(names) == 3 + 2 * 2
    assert [name[:9] for name in names[3:]] == ["50% right"] * 2 + ["90% right"] * 2
    lines = list(gpu_rounds.batches("tiny-untied", "tiny", "cpu", quick=True, sizes=(1, 3)))
    assert [line.name for line in lines] == [
        "1 at once, plain", "1 at once, 90% right", "3 at once, plain", "3 at once, 90% right"
    ]  # fmt: skip
    assert all(line.value > 0 for line in lines)


@pytest.mark.usefixtures("by_twins")
@pytest.mark.parametrize("run_ahead", [False, pytest.param(True, marks=pytest.mark.slow), "always"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_widths_that_change_all_the_time(
    model: RandomFile, monkeypatch: pytest.MonkeyPatch, seed: int, run_ahead: Any
) -> None:
    """Of each request another: who was drafted for less goes on with the others all the same."""
    SHAPES["tiny-untied"] = build_shape("llama", 2, 32, (4, 2, 8), 48, 60, context=512)
    random = np.random.default_rng(seed)

    def decide(self: Any, batch: Batch, free: Any) -> None:
        self._widths = {batch.decode[index].id: int(random.choice((0, 0, 1, 2, 3, 5))) for index in free}
        self._left, self._is_drafting = int(random.choice((0, 0, 1, 2, 4))), bool(random.random() < 0.5)

    monkeypatch.setattr(WidthController, "_decide", decide)
    pages = Pages(600, PAGE)
    target, other = on_device(RandomFile("tiny-untied:counting"), pages), on_device(RandomFile("tiny"), pages)
    engine = running_ahead(target, SyntheticDrafter(other, 0.8, shares_slots=True), run_ahead)
    for batch in (1, 3, 2):
        prompts = [random.integers(0, 60, random.choice((1, 8, 20))).tolist() for _ in range(batch)]
        results = engine.generate(prompts, max_tokens=40, temperature=0.0, ignore_eos=True)
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == [(prompt[-1] + 1 + place) % 60 for place in range(40)]


@pytest.mark.slow
def test_the_peer_of_batches_runs(model: RandomFile) -> None:
    SHAPES["tiny-untied"] = build_shape("llama", 2, 32, (4, 2, 8), 48, 60, context=512)
    (line,) = gpu_peers.transformers_batches("tiny-untied", "cpu", [2], 5, 6)
    assert line.name.startswith("2 at once, transformers") and line.value > 0


def test_a_draft_may_have_a_device_of_its_own(model: RandomFile, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"max_tokens": 12, "width": 2, **GREEDY}
    engine = Engine.load("random:tiny", draft="random:tiny", device="cpu", draft_device="cpu", run_ahead=True)
    assert engine.generate([1, 2, 3], **given).token_ids == plainly(engine, [[1, 2, 3]], max_tokens=12, **GREEDY)[0]
    with pytest.raises(OutriderError, match="draft_device must be auto, cpu, cuda or cuda:N, got 'tpu'"):
        Engine.load("random:tiny", draft="random:tiny", draft_device="tpu")
    monkeypatch.setattr("outrider.engine.runner._torch_sees_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [second_gpu(ModelConfig(device=name)) for name in ("cuda", "cuda:1", "cpu")] == ["cuda:1", "cuda:0", None]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert second_gpu(ModelConfig(device="cuda")) is None
