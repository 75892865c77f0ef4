"""EAGLE heads that guess on by themselves, on a CPU: kernels by their twins, and by the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from outrider.backends.cuda.backend import GpuBackend
from outrider.backends.cuda.eagle import HeadRoller
from outrider.backends.cuda.head_chain import HeadChain
from outrider.backends.cuda.measuring import MeasuredPasses
from outrider.backends.cuda.sampling import DeviceSampling
from outrider.clock import SystemClock
from outrider.config import SchedulerConfig
from outrider.draft.eagle import EagleDrafter
from outrider.draft.suffix import SuffixDrafter
from outrider.engine import profile as profiles
from outrider.engine.engine import Engine
from outrider.engine.profile import profile
from outrider.kv.pages import Pages
from outrider.models.opening import open_model
from sampling_twins import by_twins  # noqa: F401 - a fixture

import tiny
from tiny_heads import EAGLE, EAGLE3, save_head

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[5, 9, 77, 2, 40, 8, 19, 33, 61, 4, 90], [7, 7, 3]]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.tiny("llama", num_hidden_layers=7)


@pytest.fixture(scope="module")
def path(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_folder(model, tmp_path_factory.mktemp("target"))


def as_on_a_gpu(path: Path) -> GpuBackend:
    """On a CPU, but drawn, judged and queued as on a GPU."""
    target = GpuBackend(open_model(path), Pages(64, 4), device="cpu", dtype=torch.float32)
    target.ops = DeviceSampling(torch.device("cpu"))
    target.ops.foresee, target.ops.may_defer = target.foresee, True
    target.info = replace(target.info, prelaunch=True)
    return target


def recorded(
    path: Path,
    head: Path,
    *,
    rolls: bool,
    known: bool = False,
    max_tokens: int = 12,
    silent: list[int] | None = None,
    prompts: Any = PROMPTS,
    **settings: Any,
) -> tuple[dict[tuple[int, ...], Any], Any]:
    """What was drafted behind which tokens, and the answers. known: the target has read the prompts before, without
    the head."""
    target = as_on_a_gpu(path)
    drafter = EagleDrafter.load(head, target)
    if not rolls:
        drafter._roller = None
    propose, seen, gaps = drafter.propose, {}, set[bool]()

    def watched(jobs: Any, widths: Any, trees: Any) -> Any:
        drafts = propose(jobs, widths, trees)
        gaps.update(seat.gap for seat in drafter.seats.values())
        assert trees[0] or (drafts.device.drawn_from > 0) == rolls or not any(drafts.counts)
        for index, (job, proposal) in enumerate(zip(jobs, drafts.proposals(), strict=True)):
            if not proposal and silent is not None:
                silent.append(len(job.tokens))
            if proposal:
                seen[tuple(job.tokens)] = (proposal, drafts.parents.get(index))
        drafts._proposals = None  # nobody has looked
        return drafts

    take, taken = drafter._take_queued, list[bool]()

    def watched_take(*arguments: Any) -> bool:
        taken.append(take(*arguments))
        return taken[-1]

    drafter._take_queued = watched_take  # type: ignore[method-assign]
    drafter.propose = watched  # type: ignore[method-assign]
    engine = Engine(target, [drafter], threaded=False)
    if known:
        engine.generate(prompts, max_tokens=2, width=0)
    answers = engine.generate(prompts, max_tokens=max_tokens, **settings)
    assert any(gaps) == known
    is_chain = not settings.get("tree") and rolls
    assert any(taken) == is_chain or "width" not in settings, "the device had gone on by itself"
    return seen, [answer.token_ids for answer in answers]


@pytest.mark.usefixtures("by_twins")
@pytest.mark.parametrize("layout", [*EAGLE[:1], *EAGLE[3:], *EAGLE3[:1], *EAGLE3[3:]])
def test_guesses_are_those_of_a_head_that_is_looked_at(layout: str, model: Any, path: Path, tmp_path: Path) -> None:
    save_head(tmp_path, layout, model)
    for settings in (
        {"temperature": 0.0, "width": 3},
        {"temperature": 0.0, "width": 3, "known": True},
        {"temperature": 0.8, "seed": 1, "accept": "coupled", "width": 2},
    ):
        ours, theirs = (recorded(path, tmp_path, rolls=rolls, **settings) for rolls in (True, False))
        assert ours == theirs and len(ours[0]) > 5


@pytest.mark.usefixtures("by_twins")
@pytest.mark.parametrize("layout", [EAGLE[0], EAGLE3[0]])
def test_long_prompts_are_read_by_the_same_kernels(
    layout: str, model: Any, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, and without the outputs that nobody asks for."""
    save_head(tmp_path, layout, model)
    monkeypatch.setattr("outrider.backends.cuda.eagle.GRAPH_ROWS", (1, 2, 4, 8, 16, 32))
    prompts = [[(5 * number + place * place) % 101 for place in range(count)] for number, count in enumerate((70, 41))]
    settings: Any = {"temperature": 0.0, "width": 3, "prompts": prompts}
    read, sizes = HeadRoller.read, list[int]()

    def watched(self: HeadRoller, entries: Any) -> bool:
        sizes.extend(entries.counts)
        return read(self, entries)

    monkeypatch.setattr(HeadRoller, "read", watched)
    ours, theirs = (recorded(path, tmp_path, rolls=rolls, **settings) for rolls in (True, False))
    assert ours == theirs and len(ours[0]) > 5 and sorted(sizes) == [40, 69]


@pytest.mark.usefixtures("by_twins")
def test_steps_of_a_head_are_measured(model: Any, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_head(tmp_path, "eagle3", model)
    target = as_on_a_gpu(path)
    roller: Any = EagleDrafter.load(tmp_path, target)._roller
    assert roller.roll_s(1, 2) is None, "on a CPU there is nothing to learn"
    monkeypatch.setattr(MeasuredPasses, "measures_cpu", True)
    assert all(roller.roll_s(jobs, steps) > 0.0 for jobs, steps in ((1, 1), (1, 3), (4, 2)))
    assert roller.read_s() > 0.0
    assert roller.roll_s(200, 1) is None, "so many have no room"
    assert not target.pages.leases


@pytest.mark.usefixtures("by_twins")
def test_a_profile_builds_what_a_first_answer_needs(
    model: Any, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is left of it."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    for name, few in (("WARM_PROMPTS", (9, 20)), ("WARM_WIDTHS", (1, 3)), ("WARM_BATCHES", (1, 4))):
        monkeypatch.setattr(profiles, name, few)
    save_head(tmp_path, "eagle3", model)
    target = as_on_a_gpu(path)
    drafter, suffix = EagleDrafter.load(tmp_path, target), SuffixDrafter()
    costs = profile(target, [drafter, suffix], SchedulerConfig(), SystemClock())
    assert costs.is_known and costs.steps["eagle"] > 0.0
    roller: Any = drafter._roller
    assert roller._chains and roller._programs and not target.pages.leases and not drafter.seats
    assert not any(suffix.past._texts), "a drafter that remembers answers does not see these"


@pytest.mark.usefixtures("by_twins")
def test_who_reads_hidden_states_is_not_asked_before_there_are_some(model: Any, path: Path, tmp_path: Path) -> None:
    """In the pass that reads the end of a prompt a head knows nothing: asked there, it would seem to have no answer."""
    save_head(tmp_path, "eagle3", model)
    silent: list[int] = []
    seen, _ = recorded(path, tmp_path, rolls=True, max_tokens=100, silent=silent)
    assert seen and not silent


@pytest.mark.usefixtures("by_twins")
@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.5, "seed": 4, "accept": "coupled"}, pytest.param({"temperature": 0.0}, marks=pytest.mark.slow)],
)
def test_guesses_behind_verdicts_that_keep_some(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some drafts stay and some do not, past ends of pages and of answers."""
    model = tiny.tiny("llama", num_hidden_layers=7)
    with torch.no_grad():  # it says little but three tokens, which the head, that has no output of its own, says too
        model.lm_head.weight[[3, 40, 77]] *= 4.0
    path, head = tiny.save_folder(model, tmp_path / "target"), tmp_path / "head"
    save_head(head, "eagle", model)
    settings = {"width": 4, "max_tokens": 60, **settings}
    begun: list[None] = []
    begin = HeadChain.begin
    monkeypatch.setattr(HeadChain, "begin", lambda *arguments: begun.append(begin(*arguments)))
    stood: list[Any] = []
    stands = GpuBackend._still_stands
    monkeypatch.setattr(GpuBackend, "_still_stands", lambda *arguments: stood.append(stands(*arguments)) or stood[-1])
    ours, theirs = (recorded(path, head, rolls=rolls, **settings) for rolls in (True, False))
    assert ours == theirs
    assert begun and len(begun) < 12, "places are written down now and then"
    assert sum(one is not None for one in stood) > 10, "and those of the target's passes, too"
    kept = np.diff([len(tokens) for tokens in ours[0] if tokens[:3] == (7, 7, 3)]) - 1
    assert {0, 1, 2} <= set(kept.tolist())


@pytest.mark.usefixtures("by_twins")
@pytest.mark.parametrize(
    "layout", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("eagle", "eagle3")), "eagle3_deep"]
)
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 0.7, "seed": 2, "accept": "rejection", "min_p": 0.01}]
)
def test_trees_are_those_of_a_head_that_is_looked_at(
    layout: str, settings: dict[str, Any], model: Any, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level by level on the device, one look at the end."""
    save_head(tmp_path, layout, model)
    grown: list[Any] = []
    grow = HeadRoller.grow
    monkeypatch.setattr(HeadRoller, "grow", lambda self, *args: grown.append(grow(self, *args)) or grown[-1])
    for width, known in ((3, False), (10, False), (3, True)):
        given = {"width": width, "tree": True, "known": known, **settings}
        ours, theirs = (recorded(path, tmp_path, rolls=rolls, **given) for rolls in (True, False))
        assert ours == theirs and len(ours[0]) > 5
    assert grown and None not in grown
