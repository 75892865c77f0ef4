"""Drafting with heads: caches after every round against a fresh computation, prefix hits, trees, ends of contexts.

The target is a bigram model (its layers add next to nothing), and what the heads guess is made to agree with it most of
the time; what they hold is their own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.backends.base import Spans
from outrider.backends.eagle_head import EagleHead
from outrider.backends.forward import run_layers
from outrider.backends.head_base import Entries
from outrider.backends.medusa_head import MedusaHead
from outrider.backends.native import NativeBackend
from outrider.backends.native_head import NativeHead
from outrider.backends.transformer import TransformerBackend
from outrider.draft import eagle
from outrider.draft.eagle import EagleDrafter
from outrider.draft.growth import LEVEL, Sprout
from outrider.draft.medusa import MedusaDrafter
from outrider.draft.ranked import grow_heads
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.kv.pages import Pages
from outrider.models.gguf import GGUFFile
from outrider.models.heads import open_head
from outrider.models.opening import open_model
from outrider.native.library import why_not
from outrider.sampling.ops import SamplingOps
from outrider.types import Drafts, Request, Result, SamplingParams

import tiny
from test_heads import reference
from tiny_heads import save_head

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[5, 9, 77, 2, 40, 8, 19, 33, 61, 4, 90], [7, 7, 3], [50]]


@pytest.fixture(autouse=True)
def from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers run from Python: compiling them for every small engine takes longer than running it."""
    monkeypatch.setattr("outrider.backends.transformer.compiled", lambda: run_layers)


@pytest.fixture(scope="module")
def model() -> Any:
    made = tiny.tiny("llama", num_hidden_layers=7)
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.mul_(1e-3)  # not nothing, so that hidden states of layers differ
    return made


@pytest.fixture(scope="module")
def target_path(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_folder(model, tmp_path_factory.mktemp("target"))


def target_at(path: Path, num_pages: int = 64) -> Any:
    if path.suffix == ".gguf":
        return NativeBackend(GGUFFile(path), Pages(num_pages, 4), threads=1)
    return TransformerBackend(open_model(path), Pages(num_pages, 4))


@pytest.fixture(scope="module")
def native_path(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if why_not() is not None:
        pytest.skip(f"{why_not()}")
    return tiny.save_gguf(model, tmp_path_factory.mktemp("native") / "target.gguf")


@pytest.fixture(params=["torch", "native"])
def any_path(request: pytest.FixtureRequest) -> Path:
    """A target whose EAGLE-3 heads torch computes, or native code."""
    found: Path = request.getfixturevalue("target_path" if request.param == "torch" else "native_path")
    return found


def bigrams(model: Any, noise: float) -> torch.Tensor:
    """The target's row after each token, a little off. [V, V]"""
    with torch.inference_mode():
        table = model(torch.arange(101)[:, None]).logits[:, 0]
        return table + noise * torch.randn(table.shape, generator=torch.Generator().manual_seed(1))


class AgreeingEagle(EagleHead):
    """Reads as it should, and guesses with a table: the token of each output is kept in its first number."""

    def __init__(self, path: Path, target: TransformerBackend, table: torch.Tensor) -> None:
        super().__init__(open_head(path), target)
        self.table = table
        self.num_read: list[int] = []
        self.sizes: list[list[int]] = []

    def read(self, entries: Entries) -> torch.Tensor:
        self.sizes.append(entries.counts)
        outputs = super().read(entries).clone()
        outputs[:, 0] = torch.tensor(entries.tokens)
        return outputs

    def again(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.nan_to_num(0.0)

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        assert bool(outputs.isfinite().all()), "it attended to what nobody wrote"
        return self.table[outputs[:, 0].round().long()]


class AgreeingNative(NativeHead):
    """The same on the native backend, where it would roll if it could be heard."""

    def __init__(self, path: Path, target: NativeBackend, table: torch.Tensor) -> None:
        super().__init__(open_head(path), target)
        self.table = table.numpy()
        self.sizes: list[list[int]] = []

    def roller(self) -> None:  # type: ignore[override]
        return None

    def read(self, entries: Entries) -> np.ndarray:
        self.sizes.append(entries.counts)
        outputs = super().read(entries)
        outputs[:, 0] = entries.tokens
        return outputs

    def again(self, outputs: np.ndarray) -> np.ndarray:
        return np.nan_to_num(outputs)

    def own_rows(self, outputs: np.ndarray) -> tuple[np.ndarray, None]:
        assert np.isfinite(outputs).all(), "it attended to what nobody wrote"
        return self.table[np.rint(outputs[:, 0]).astype(int)], None


class AgreeingMedusa(MedusaHead):
    """Guesses with a table, from the token whose hidden state it is given."""

    def __init__(self, path: Path, target: TransformerBackend, table: torch.Tensor) -> None:
        super().__init__(open_head(path), target)
        self.table = table
        self.states: torch.Tensor | None = None

    def rows(self, hidden: torch.Tensor, count: int) -> torch.Tensor:
        assert super().rows(hidden, count).shape == (len(hidden), count, 101)
        token = (hidden @ self.states.T).argmax(-1)
        rows = []
        for _ in range(count):
            token = self.table[token].argmax(-1)
            rows.append(self.table[token])
        return torch.stack(rows, dim=1)


def pass_states(target: Any, tokens: Sequence[int], layers: Sequence[int]) -> Any:
    slot = target.open([], len(tokens) + 1)
    states = target.score(Spans([slot], [0], [len(tokens)], [1], np.array(tokens)), hidden=layers).hidden
    target.close(slot)
    return states


def hidden_states(target: TransformerBackend, tokens: Sequence[int], layers: Sequence[int]) -> list[torch.Tensor]:
    states = pass_states(target, tokens, layers)
    return [torch.as_tensor(states[layer]) for layer in layers]


def close(ours: Any, wanted: Any) -> bool:
    return torch.allclose(torch.as_tensor(ours), torch.as_tensor(wanted), atol=1e-4)


class Watch:
    """An engine with an EAGLE head whose caches are compared, after every step, with a head that reads all at once."""

    def __init__(
        self, model: Any, target_path: Path, path: Path, noise: float = 2.0, num_pages: int = 64, **settings: Any
    ) -> None:
        self.target, self.fresh_target = target_at(target_path, num_pages), target_at(target_path)
        is_native = isinstance(self.target, NativeBackend)
        self.head: Any = (AgreeingNative if is_native else AgreeingEagle)(path, self.target, bigrams(model, noise))
        self.fresh: Any = (NativeHead if is_native else EagleHead)(open_head(path), self.fresh_target)
        self.drafter = EagleDrafter(self.head)
        self.engine = Engine.load(self.target, draft=self.drafter, threaded=False, **settings)
        self.num_checked = 0
        step = self.engine.step

        def checked() -> Any:
            events = step()
            self.check()
            return events

        self.engine.step = checked  # type: ignore[method-assign]

    def check(self) -> None:
        running = {job.id: job for job in self.engine.loop.scheduler.running}
        assert self.drafter.seats.keys() <= running.keys()
        for job_id, seat in self.drafter.seats.items():
            self._check(running[job_id], seat)
            self.num_checked += 1

    def _check(self, job: Any, seat: Any) -> None:
        pages, number = self.target.pages, self.head.number
        assert seat.slot == job.slot and seat.guesses is None
        assert seat.seen == job.cached == pages.length(seat.slot, 0)
        reported = pages.length(seat.slot, number)
        assert reported == (0 if seat.gap else seat.read + min(1, len(seat.pending)))
        assert not seat.waiting or self.drafter.name not in job.wanted
        states = pass_states(self.fresh_target, job.tokens[: job.cached], self.head.hidden)
        fused = self.fresh.fuse(self.fresh.pick(states, range(job.cached)))
        assert close(seat.pending, fused[seat.read : seat.read + len(seat.pending)])
        if seat.waiting:
            parts = [self.head.pick(*given) for given in seat.waiting]
            waiting = self.head.fuse([self.head.join(one) for one in zip(*parts, strict=True)])
            assert close(waiting, fused[seat.read + len(seat.pending) :]) and len(waiting) == seat.num_waiting
        count = seat.read - seat.first
        slot = self.fresh_target.open([], job.cached + 2)
        if count:
            tokens = job.tokens[seat.first + 1 : seat.read + 1]
            entries = Entries([slot], [seat.first], [seat.first], [count], tokens, fused[seat.first : seat.read])
            self.fresh.read(entries)
            held = [
                head.store.read(head.pages.places(where, range(seat.first + 1, seat.read + 1)))
                for head, where in ((self.head, seat.slot), (self.fresh, slot))
            ]
            # Positions may differ by a shift when it did not begin at the beginning; keys then do, values never.
            size = held[0].shape[2] // 2
            assert close(held[0][..., size:], held[1][..., size:])
            assert close(held[0], held[1])
        self.fresh_target.close(slot)
        known = 0 if seat.gap else seat.read + len(seat.pending)  # what waits has no edges yet
        for position in range(pages.page_size - 1, known, pages.page_size):
            assert close(self.head.edge(seat.slot, position)[0], fused[position])


def plain(target_path: Path, prompts: Sequence[Sequence[int]], **settings: Any) -> list[list[int]]:
    engine = Engine.load(target_at(target_path), draft="none", threaded=False)
    return [result.token_ids for result in engine.generate(prompts, **settings)]


def ids(results: Sequence[Result]) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("eagle", {"width": 3}),
        ("eagle_deep", {"width": 9, "tree": True}),
        ("eagle3", {"width": 9, "tree": True}),
        ("eagle3_norms", {"width": 3}),
        ("native:eagle3_deep", {"width": 9, "tree": True}),
        ("native:eagle3_norms", {"width": 3}),
    ],
)
def test_entries_are_those_of_a_fresh_head(
    layout: str,
    shape: dict[str, Any],
    model: Any,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target_path = request.getfixturevalue("native_path" if layout.startswith("native:") else "target_path")
    monkeypatch.setattr(eagle, "MOST_PENDING", 4)
    save_head(tmp_path, layout.removeprefix("native:"), model)
    watch = Watch(model, target_path, tmp_path, prefill_chunk=6)
    results = watch.engine.generate(PROMPTS, max_tokens=16, temperature=0.0, **shape)
    assert ids(results) == plain(target_path, PROMPTS, max_tokens=16, temperature=0.0)
    accepted = sum(result.statistics.accepted for result in results)
    rejected = sum(result.statistics.rejected for result in results)
    assert accepted > 12 and rejected > 3 and watch.num_checked > 12
    assert watch.drafter.seats == {}


@pytest.mark.parametrize("layout", ["eagle", "eagle3", "eagle3_norms"])
@pytest.mark.parametrize("shape", [{"width": 4}, {"width": 10, "tree": True}])
def test_guesses_are_those_of_the_reference(
    layout: str, shape: dict[str, Any], model: Any, target_path: Path, tmp_path: Path
) -> None:
    """Every row that was drawn from is that of a head which computes the whole path to it anew."""
    weights, target = save_head(tmp_path, layout, model), target_at(target_path)
    theirs, drafter = reference(weights, tmp_path, model), EagleDrafter.load(tmp_path, target)
    read, seen = drafter._read, []

    def recorded(sprouts: Sequence[Sprout]) -> Any:
        lines = [(list(sprout.job.tokens), sprout.line(tip)) for sprout in sprouts for tip in sprout.tips]
        rows = read(sprouts)
        seen.extend(zip(lines, torch.as_tensor(rows).clone(), strict=True))
        return rows

    drafter._read = recorded  # type: ignore[method-assign]
    Engine.load(target, draft=drafter, threaded=False).generate(PROMPTS[:2], max_tokens=8, temperature=0.0, **shape)
    assert {len(line) for (_, line), _ in seen} >= {0, 1, 2} and len(seen) > 20
    for (tokens, line), row in seen[::2]:
        entries, hidden = (
            tokens[1:],
            theirs.fuse(hidden_states(target, tokens[:-1], drafter.info.hidden_layers)).detach(),
        )
        for token in line:
            hidden = torch.cat([hidden, theirs.again(theirs.run(entries, hidden)[-1:])])
            entries = [*entries, token]
        wanted = theirs.rows(theirs.run(entries, hidden)[-1:])[0]
        assert torch.allclose(row, wanted, atol=1e-3 * float(wanted.nan_to_num(neginf=0.0).abs().max()))


def test_a_round_reads_what_was_kept_and_one_more(model: Any, any_path: Path, tmp_path: Path) -> None:
    save_head(tmp_path, "eagle3", model)
    watch = Watch(model, any_path, tmp_path)
    rounds: list[tuple[int, int]] = []
    step = watch.engine.step

    def counted() -> Any:
        before = len(watch.head.sizes)
        events = step()
        read = watch.head.sizes[before : before + 1]  # the first pass of a round reads, the others guess
        rounds.append((read[0][0] if read else 0, events[0].accepted if events else 0))
        return events

    watch.engine.step = counted  # type: ignore[method-assign]
    watch.engine.generate(PROMPTS[0], max_tokens=24, temperature=0.0, width=4)
    assert rounds[0] == (0, 0) and rounds[1][0] == len(PROMPTS[0])
    drafting = [one for one in rounds[1:] if one[0]]  # at its end an answer has no room for drafts
    assert len(drafting) > 5 and any(accepted for _, accepted in drafting)
    assert all(read == accepted + 1 for (_, accepted), (read, _) in pairwise(drafting))


@pytest.mark.parametrize("sampling", [{"accept": "coupled"}, {"accept": "rejection"}])
@pytest.mark.parametrize("shape", [{"width": 4}, {"width": 8, "tree": True}])
def test_sampled_answers(
    sampling: dict[str, Any], shape: dict[str, Any], model: Any, any_path: Path, tmp_path: Path
) -> None:
    save_head(tmp_path, "eagle3", model)
    watch = Watch(model, any_path, tmp_path, noise=1.0)
    settings = {"max_tokens": 14, "temperature": 0.7, "seed": 3, **sampling}
    results = watch.engine.generate(PROMPTS, **settings, **shape)
    if sampling["accept"] == "coupled":
        assert ids(results) == plain(any_path, PROMPTS, **settings)
    assert sum(result.statistics.accepted for result in results) > 10


def test_a_prefix_hit_is_one_for_the_head(model: Any, any_path: Path, tmp_path: Path) -> None:
    """The second request begins where the first was read to, and the hidden state at that edge was kept."""
    save_head(tmp_path, "eagle3", model)
    watch = Watch(model, any_path, tmp_path)
    prompt = PROMPTS[0] + PROMPTS[0]
    settings = {"max_tokens": 12, "temperature": 0.0, "width": 4}
    first = watch.engine.generate(prompt, **settings)
    longer = [*prompt[:20], 1, 2, 3]  # 20 tokens are five pages
    watch.head.sizes.clear()
    second = watch.engine.generate(longer, **settings)
    assert watch.head.sizes[0] == [4], "the entry at the edge, and three of its own"
    assert not second.statistics.fallbacks
    assert [first.token_ids, second.token_ids] == plain(any_path, [prompt, longer], max_tokens=12, temperature=0.0)


def test_what_the_head_has_not_read_is_said(model: Any, any_path: Path, tmp_path: Path) -> None:
    save_head(tmp_path, "eagle3", model)
    watch = Watch(model, any_path, tmp_path)
    prompt = PROMPTS[0]
    settings = {"max_tokens": 16, "temperature": 0.0}
    watch.engine.generate(prompt, method="none", **settings)
    result = watch.engine.generate(prompt, width=4, **settings)
    assert result.statistics.fallbacks["the head has not read the beginning that the target remembered"] == 1
    assert result.statistics.accepted > 3 and watch.num_checked > 2
    assert [result.token_ids] == plain(any_path, [prompt], **settings)
    again = watch.engine.generate(prompt, width=4, **settings)  # nobody was told that the head held those pages
    assert again.statistics.fallbacks["the head has not read the beginning that the target remembered"] == 1


def shorten(path: Path, context: int) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))


def test_past_the_heads_context(model: Any, any_path: Path, tmp_path: Path) -> None:
    save_head(tmp_path, "eagle3", model)
    shorten(tmp_path, 20)
    watch = Watch(model, any_path, tmp_path)
    settings = {"max_tokens": 24, "temperature": 0.0}
    results = watch.engine.generate([PROMPTS[0], PROMPTS[0] * 2], width=4, **settings)
    assert ids(results) == plain(any_path, [PROMPTS[0], PROMPTS[0] * 2], **settings)
    first, second = (result.statistics.fallbacks for result in results)
    assert first["the answer comes to the end of the head's context of 20 tokens"] >= 1
    assert first["the answer is past the head's context of 20 tokens"] > 5
    assert second.keys() == {"the answer is past the head's context of 20 tokens"}


def test_a_pool_that_is_just_large_enough(model: Any, any_path: Path, tmp_path: Path) -> None:
    save_head(tmp_path, "eagle3", model)
    watch = Watch(model, any_path, tmp_path, num_pages=8)
    settings = {"max_tokens": 20, "temperature": 0.0}
    result = watch.engine.generate(PROMPTS[0], width=8, tree=True, **settings)
    assert [result.token_ids] == plain(any_path, [PROMPTS[0]], **settings)
    assert result.statistics.accepted > 5


def test_chains_and_trees_in_one_batch(model: Any, any_path: Path, tmp_path: Path) -> None:
    save_head(tmp_path, "eagle3", model)
    watch = Watch(model, any_path, tmp_path, noise=1.0)
    requests = [
        Request(
            prompt=prompt,
            max_tokens=16,
            width=6,
            tree=tree,
            sampling=SamplingParams(temperature=temperature, seed=4, accept=accept),
        )
        for prompt, tree, temperature, accept in (
            (PROMPTS[0], False, 0.8, "rejection"),
            (PROMPTS[1], True, 0.8, "rejection"),
            (PROMPTS[2], True, 0.8, "coupled"),
            ([4, 4], False, 0.0, "auto"),
        )
    ]
    results = watch.engine.generate(requests)
    assert all(result.statistics.accepted > 2 for result in results)
    assert results[3].token_ids == plain(any_path, [[4, 4]], max_tokens=16, temperature=0.0)[0]


@pytest.mark.parametrize("shape", [{"width": 6}, {"width": 9, "tree": True}])
def test_medusa(shape: dict[str, Any], model: Any, target_path: Path, tmp_path: Path) -> None:
    save_head(tmp_path, "medusa", model)
    target = target_at(target_path)
    head = AgreeingMedusa(tmp_path, target, bigrams(model, 1.0))
    head.states = model.model(torch.arange(101)[:, None]).last_hidden_state[:, 0].detach()
    drafter = MedusaDrafter(head)
    engine = Engine.load(target, draft=drafter, prefill_chunk=6)
    results = engine.generate(PROMPTS, max_tokens=20, temperature=0.0, **shape)
    assert ids(results) == plain(target_path, PROMPTS, max_tokens=20, temperature=0.0)
    for result in results:
        counted = result.statistics
        assert counted.accepted > 5 and counted.draft_steps <= counted.rounds
        assert max(counted.rounds_by_depth) <= 3, "there are three heads"
    assert drafter.states == {}
    coupled = {"max_tokens": 20, "temperature": 0.8, "seed": 2}
    assert ids(engine.generate(PROMPTS, **coupled, **shape)) == plain(target_path, PROMPTS, **coupled)
    engine.generate(PROMPTS, max_tokens=20, temperature=0.8, seed=2, accept="rejection", **shape)


def test_heads_of_the_other_kind(model: Any, target_path: Path, tmp_path: Path) -> None:
    target = target_at(target_path)
    save_head(tmp_path / "medusa", "medusa", model)
    save_head(tmp_path / "eagle", "eagle", model)
    with pytest.raises(ConfigError, match="holds Medusa heads; write medusa:"):
        EagleDrafter.load(tmp_path / "medusa", target)
    with pytest.raises(ConfigError, match="is an EAGLE head; write eagle:"):
        MedusaDrafter.load(tmp_path / "eagle", target)


def test_named_heads(model: Any, target_path: Path, tmp_path: Path) -> None:
    """As people write them, in a chain of drafters."""
    save_head(tmp_path / "medusa", "medusa", model)
    save_head(tmp_path / "eagle", "eagle3", model)
    draft = f"eagle:{tmp_path / 'eagle'},medusa:{tmp_path / 'medusa'}"
    engine = Engine.load(target_path, draft=draft, cache_tokens=256)
    settings = {"max_tokens": 8, "temperature": 0.0}
    answers = [
        ids(engine.generate(PROMPTS, width=3, method=method, **settings)) for method in ("eagle", "medusa", None)
    ]
    assert answers == [plain(target_path, PROMPTS, **settings)] * 3


# Ranked trees


class Law:
    """A draft whose rows depend on the last token alone, as a read function for `grow_heads`."""

    def __init__(self, seed: int, vocab: int = 4) -> None:
        self.rows = 2.0 * np.random.default_rng(seed).standard_normal((vocab, vocab)).astype(np.float32)
        self.num_fed = 0

    def read(self, sprouts: Sequence[Sprout]) -> np.ndarray:
        rows = []
        for sprout in sprouts:
            if sprout.tips == [-1]:
                rows.append(self.rows[sprout.job.tokens[-1]])
                continue
            tokens = sprout.feed()
            self.num_fed += len(tokens)
            rows += [self.rows[token] for token in tokens]
        return np.stack(rows)

    def best(self, last: int, room: int) -> list[tuple[int, ...]]:
        """The likeliest paths, found by looking at all up to length 5."""
        logs = self.rows - np.log(np.exp(self.rows).sum(-1, keepdims=True))
        paths: dict[tuple[int, ...], float] = {(): 0.0}
        for path in [()] if room else []:
            level = [path]
            for _ in range(5):
                level = [(*one, token) for one in level for token in range(len(logs))]
                for one in level:
                    before = one[-2] if len(one) > 1 else last
                    paths[one] = paths[one[:-1]] + float(logs[before, one[-1]])
        del paths[()]
        return sorted(paths, key=lambda path: -paths[path])[:room]


def job_for(tokens: list[int], **settings: Any) -> Any:
    engine = Engine.load("mock", draft="none", threaded=False)
    handle: list[Any] = []
    submit = engine.loop.submit
    engine.loop.submit = lambda job: (handle.append(job), submit(job))  # type: ignore[assignment]
    engine.generate(tokens, max_tokens=1, **settings)
    job = handle[0]
    job.tokens[:] = tokens
    return job


@pytest.mark.parametrize("seed", range(6))
def test_ranked_trees_hold_the_likeliest_nodes(seed: int) -> None:
    law, drafts = Law(seed), Drafts([], None)
    job = job_for([1, 2], temperature=1.0, accept="rejection")
    room = LEVEL  # a level has as many tips, so none of the best can be missed
    drafts = grow_heads(SamplingOps(np), [job], [room], [100], [True], law.read, drafts)
    tokens, parents = drafts.proposals()[0], drafts.parents[0]
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        assert -1 <= parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert set(paths) == set(law.best(2, room)) and drafts.probs is None
    rooms = Drafts([], None)
    law.num_fed = 0
    drafts = grow_heads(SamplingOps(np), [job], [12], [5], [True], law.read, rooms)
    assert rooms.counts == [12] and law.num_fed <= 5


def test_ranked_trees_of_certain_drafts_are_chains() -> None:
    law, drafts = Law(0), Drafts([], None)
    law.rows[:] = -100.0
    law.rows[[0, 1, 2, 3], [1, 2, 3, 0]] = 0.0
    jobs = [job_for([1, 2], temperature=0.0), job_for([1], temperature=0.0)]
    drafts = grow_heads(SamplingOps(np), jobs, [4, 2], [50, 50], [True, False], law.read, drafts)
    assert drafts.proposals() == [[3, 0, 1, 2], [2, 3]]
    assert drafts.parents == {0: [-1, 0, 1, 2]} and drafts.counts == [4, 2]
