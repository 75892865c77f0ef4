"""How many rows a looked-up proposal gets: what the length of the match taught, what rows cost, and never a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from outrider.backends.mock import MockBackend
from outrider.clock import VirtualClock
from outrider.config import MockConfig
from outrider.draft.base import DrafterInfo
from outrider.draft.lookup import ScriptedDrafter
from outrider.draft.ngram import NgramDrafter
from outrider.draft.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.errors import DraftError
from outrider.metrics import Outcome, RoundTimes
from outrider.spec.controller import WidthController
from outrider.spec.cost_model import CostModel
from outrider.spec.router import Router
from outrider.types import Ask, Batch, Drafts, Job
from rounds import job

GREEDY = {"temperature": 0.0}
LOOKUPS = [NgramDrafter, SuffixDrafter]


class Counting(NgramDrafter):
    """Knows for how many tokens it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        self.widths += widths
        return super().propose(jobs, widths, trees)


def engine(*drafters: object, per_token: float, order: int | None = None) -> Engine:
    """Lookups take no time; a pass takes a second, and so many more for every token in it."""
    clock = VirtualClock()
    config = MockConfig(vocab_size=8, seed=3, order=order, seconds_per_pass=1.0, seconds_per_token=per_token)
    return Engine(MockBackend(config, clock=clock), drafters, clock=clock, threaded=False)


def seconds(ours: Engine, **settings: object) -> float:
    started = ours.clock.now()
    ours.generate([1, 2, 3], max_tokens=400, **settings)
    return ours.clock.now() - started


def looking_up(row_s: float, *found: tuple[int, int], rests: bool = True, emitted: int = 1) -> list[int]:
    """How much is verified of proposals of eight tokens, after `found` (kept, matched) taught about lookups.

    A pass takes a second, and `row_s` more for each further row. rests: whether no other drafter is at work. emitted:
    tokens that each of the last rounds brought.
    """
    infos = [NgramDrafter.info, DrafterInfo(name="model", prior=(0.99,) * 8)]
    costs = CostModel({1: 1.0, 101: 1.0 + 100 * row_s}, {"model": 1e-6})
    controller = WidthController(infos, costs=costs)
    one = replace(job(8), width=None, drafters=("ngram",) if rests else ("ngram", "model"), limit=500)
    one.cached = len(one.tokens) - 1
    for kept, matched in found:
        controller.acceptance.add(None, "ngram", [(kept, 8)], matched)
    batch = Batch([], [], [one], [8])
    controller.choose(batch)
    if emitted > 1:
        times = RoundTimes(0.0, 1.0, 0.0, 0, num_fed=1, steady=True)
        controller.observe(batch, Drafts([0], np.arange(0)), times, [(one, Outcome.of_chain(0, 0, emitted))])
    counts = []
    for matched in (1, 20):
        drafts = Drafts([8], np.arange(8), matched=[matched])
        counts += controller.trim("ngram", [one], drafts)
    return counts


def test_rows_are_verified_while_they_promise_more_than_they_cost() -> None:
    assert looking_up(0.0) == [8, 8], "rows for nothing"
    short, long = looking_up(0.3)
    assert short == 0 and 0 < long <= 8
    assert looking_up(2.0) == [0, 0], "no row is worth two passes"


def test_the_faster_the_text_goes_the_less_a_row_is_worth() -> None:
    """Two of three tokens are right. At the price of plain decoding each would be worth its row."""
    taught = [(8, 20), (8, 20), (0, 20)] * 40
    wide, narrow = looking_up(0.3, *taught)[1], looking_up(0.3, *taught, emitted=3)[1]
    assert wide == 8
    assert 0 <= narrow < wide


def test_what_is_missed_is_trusted_less() -> None:
    assert looking_up(0.3, *[(0, 20)] * 50)[1] == 0
    assert looking_up(0.3, *[(8, 1)] * 50)[0] == 8, "by the length of the match: short ones are right here"
    assert looking_up(0.3, *[(8, 1)] * 50)[1] == looking_up(0.3)[1], "and say nothing of long ones"


def test_what_is_found_must_gain_more_than_the_next_drafter() -> None:
    """A draft model that is nearly always right, and costs nothing."""
    assert looking_up(0.05)[1] > 0
    assert looking_up(0.05, *[(1, 20)] * 50, rests=False)[1] == 0
    assert looking_up(0.05, *[(1, 20)] * 50)[1] > 0, "where there is none, a little is taken"


def test_what_was_cut_off_teaches_as_far_as_the_answer_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proposals of which no token is verified: the target's own token says whether the first was right."""
    monkeypatch.setattr(WidthController, "_worth", lambda *_: 0)
    ours = engine(NgramDrafter(), per_token=0.3, order=2)
    assert ours.generate([1, 2, 3], max_tokens=200, **GREEDY).statistics.drafted == 0
    acceptance = ours.loop.controller.acceptance
    assert acceptance.reach(-1, "ngram", 1, alone=True, matched=20)[0] > 0.95


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("per_token", [0.02, 0.2, 0.5, 1.0])
def test_text_without_repetition_costs_nothing(lookup: type, per_token: float) -> None:
    """Short matches are everywhere in random text, and prove nothing. That is found out within the first answer."""
    for seed in range(4):
        ours = engine(lookup(), per_token=per_token)
        assert seconds(ours, width=0, seed=seed) / seconds(ours, seed=seed) > 0.97


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_text_that_repeats_itself_is_found(lookup: type) -> None:
    """Greedy answers of the mock run in circles. Rows at a third of a pass: what is sure is worth all of them."""
    ours = engine(lookup(), per_token=0.3, order=2)
    plain = seconds(ours, width=0, **GREEDY)
    assert plain / seconds(ours, **GREEDY) > 2.0


def test_a_width_that_was_asked_for_is_not_cut() -> None:
    drafter = Counting()
    ours = engine(drafter, per_token=1.0)
    counts = ours.generate([1, 2, 3], max_tokens=60, width=3, seed=1).statistics
    assert set(drafter.widths) >= {3}
    assert counts.drafted > 2 * (counts.rounds - 10), "short matches are proposed all the same"


def test_a_job_that_failed_while_drafts_were_kept_does_not_end_the_others() -> None:
    """Its account is gone when the round is learned from."""
    ours = engine(NgramDrafter(), per_token=0.01, order=2)
    streams = ours.open_streams([[1, 2, 3], [3, 2, 1]], max_tokens=400, **GREEDY)
    for _ in range(12):
        ours.step()
    observe = ours.loop.router.observe

    def fail_one(*given: object) -> tuple[int, dict[str, DraftError]]:
        ours.loop.router.observe = observe
        told = observe(*given)
        ours.loop._fail(next(iter(ours.loop.jobs.values())), DraftError("it broke"))
        return told

    ours.loop.router.observe = fail_one
    ours.step()
    with pytest.raises(DraftError, match="it broke"):
        list(streams[0])
    assert list(streams[1]) and len(streams[1].result.token_ids) == 400


def test_where_a_lookup_is_not_worth_it_the_next_drafter_is_asked() -> None:
    asked: list[int] = []

    def script(tokens: Sequence[int], width: int) -> Sequence[int]:
        asked.append(width)
        return [0] * width

    ours = engine(NgramDrafter(), ScriptedDrafter(script), per_token=0.02)
    ours.generate([1, 2, 3], max_tokens=120, seed=1)
    assert asked, "matches of one token are everywhere, but worth nothing"


def test_answers_are_plain_ones() -> None:
    ours = engine(NgramDrafter(), SuffixDrafter(), per_token=0.1)
    for seed in range(3):
        plain = ours.generate([1, 2, 3], max_tokens=200, width=0, seed=seed, accept="coupled")
        assert ours.generate([1, 2, 3], max_tokens=200, seed=seed, accept="coupled").token_ids == plain.token_ids


class Sampling(NgramDrafter):
    """A lookup that draws its tokens by chance and says from which rows."""

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        tokens = np.arange(sum(widths)) % 8
        return Drafts(list(widths), tokens, np.full((len(tokens), 8), 0.125, dtype=np.float32), matched=list(widths))


@pytest.mark.parametrize(("lookup", "judged"), [(Sampling, 3), (NgramDrafter, 0)])
def test_what_was_drawn_by_chance_is_judged_and_never_cut(lookup: type, judged: int) -> None:
    """Leaving a sampled token out because of what it is would break the law; a certain one may be left out."""
    target = MockBackend(MockConfig(vocab_size=8))
    router = Router([lookup()], target.info, VirtualClock())
    batch = Batch([], [], [job(8, prompt=[1, 2, 1, 2, 1])], [3])
    assert router.propose(target, batch, [(Ask("ngram", 3),)], lambda *_: [0]).counts == [judged]
