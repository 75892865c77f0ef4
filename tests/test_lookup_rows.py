"""How many rows a looked-up proposal gets: what the length of the match taught, what rows cost, and never a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from outrider.backends.mock import MockBackend
from outrider.clock import VirtualClock
from outrider.config import MockConfig, NgramConfig
from outrider.draft.lookup import ScriptedDrafter
from outrider.draft.ngram import NgramDrafter
from outrider.draft.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.errors import DraftError
from outrider.spec.lookups import Lookups, Odds, Trust, hits_of, worthwhile
from outrider.spec.router import Router
from outrider.types import Ask, Drafts, Job, Batch
from test_sampling import job

GREEDY = {"temperature": 0.0}
LOOKUPS = [NgramDrafter, SuffixDrafter]


class Counting(NgramDrafter):
    """Knows how often it was asked, and for how much. Being asked may take time."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []
        self.clock, self.seconds = VirtualClock(), 0.0

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        self.widths += widths
        self.clock.sleep(self.seconds)
        return super().propose(jobs, widths, trees)


def engine(*drafters: object, per_token: float, order: int | None = None) -> Engine:
    """Lookups take no time; a pass takes a second, and so many more for every token in it."""
    clock = VirtualClock()
    config = MockConfig(vocab_size=8, seed=3, order=order, seconds_per_pass=1.0, seconds_per_token=per_token)
    return Engine(MockBackend(config, clock=clock), drafters, clock=clock)


def seconds(ours: Engine, **settings: object) -> float:
    started = ours.clock.now()
    ours.generate([1, 2, 3], max_tokens=400, **settings)
    return ours.clock.now() - started


def test_a_place_teaches_only_if_all_before_it_were_right() -> None:
    assert hits_of([5, 6], [7, 6]) == [False]
    assert hits_of([5, 6, 7], [5, 6, 8, 9]) == [True, True, False]
    assert hits_of([5, 6, 7], [5]) == [True], "what was cut off teaches as far as the target's own token goes"


def test_what_is_missed_is_trusted_less() -> None:
    trust = Trust()
    first, second = trust.shares(1, 2)
    for _ in range(50):
        trust.add(1, [False])
    missed, unjudged = trust.shares(1, 2)
    assert missed < 0.3 * first
    assert unjudged < second, "never judged, but thought of like the others"
    assert trust.shares(8, 1)[0] < 0.5 * Trust().shares(8, 1)[0]


def test_it_forgets() -> None:
    trust = Trust()
    for _ in range(1000):
        trust.add(4, [True])
    for _ in range(300):
        trust.add(4, [False])
    assert trust.shares(4, 1)[0] < 0.3


def test_a_request_of_its_own_kind_is_trusted_by_what_it_did() -> None:
    own = Odds()
    for _ in range(20):
        own.add(0, 1, 0.7)
    assert own.factor < 0.3
    assert Trust().shares(4, 1, own.factor)[0] < 0.5 * Trust().shares(4, 1)[0]


@pytest.mark.parametrize(
    ("shares", "pass_s", "wanted"),
    [
        ([0.9, 0.9, 0.1], lambda rows: 1.0, 3),  # rows for nothing
        ([0.9, 0.9, 0.1], lambda rows: 1.0 + 0.3 * (rows - 1), 2),
        ([0.2, 0.5], lambda rows: 1.0 + 0.3 * (rows - 1), 0),
        ([0.95] * 2, lambda rows: 1.0 if rows == 1 else 3.5, 0),  # a second row is dear,
        ([0.95] * 6, lambda rows: 1.0 if rows == 1 else 3.5, 6),  # but only that one
    ],
)
def test_rows_are_judged_while_they_promise_more_than_they_cost(
    shares: list[float], pass_s: object, wanted: int
) -> None:
    assert worthwhile(shares, 1, pass_s, rate=1.0)[0] == wanted


def test_a_fast_rate_makes_rows_dearer() -> None:
    assert worthwhile([0.5], 1, lambda rows: 1.0 + 0.3 * (rows - 1), rate=1.0)[0] == 1
    assert worthwhile([0.5], 1, lambda rows: 1.0 + 0.3 * (rows - 1), rate=2.0)[0] == 0


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


def test_a_request_that_finds_nothing_is_left_alone() -> None:
    drafter = Counting()
    ours = engine(drafter, per_token=2.0)
    drafter.clock, drafter.seconds = ours.clock, 0.1
    counts = ours.generate([1, 2, 3], max_tokens=400, seed=1).statistics
    assert 10 < len(drafter.widths) < 0.25 * counts.rounds


def test_a_request_that_never_matches_is_left_alone_too() -> None:
    drafter = Counting()
    drafter.config = NgramConfig(min_n=6, max_n=8)  # longer than what repeats itself in random text
    ours = engine(drafter, per_token=0.1)
    drafter.clock, drafter.seconds = ours.clock, 0.1
    counts = ours.generate([1, 2, 3], max_tokens=400, seed=1).statistics
    assert len(drafter.widths) < 0.25 * counts.rounds


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


def test_what_is_found_must_gain_more_than_a_rival() -> None:
    lookups, one = Lookups({"ngram"}, lambda rows: 1.0 + 0.05 * rows), replace(job(8), width=None)
    found = Drafts([2], np.asarray([4, 5]), matched=[8])
    lookups.choose([one], [(Ask("ngram", 4, False),)], 1)
    assert lookups.worth("ngram", [one], found) == [2]
    lookups.rivals = {one.id + 1: 3.0}
    assert lookups.worth("ngram", [one], found) == [2], "of another request"
    lookups.rivals = {one.id: 3.0}
    assert lookups.worth("ngram", [one], found) == [0], "then that one is asked"


def test_what_is_found_must_be_worth_the_turn() -> None:
    """A GPU that was told to go on plainly did so for nothing; who was told nothing loses less."""
    found, one = Drafts([2], np.asarray([4, 5]), matched=[8]), replace(job(8), width=None)
    judged = {}
    for turn_s in (0.0, 0.5, 5.0):
        lookups = Lookups({"ngram"}, lambda rows: 1.0 + 0.05 * rows, lambda num_jobs, turn_s=turn_s: turn_s)  # type: ignore[misc]
        lookups.choose([one], [(Ask("ngram", 4, False),)], 1)
        judged[turn_s] = lookups.worth("ngram", [one], found)[0]
    assert judged == {0.0: 2, 0.5: 2, 5.0: 0}


def test_a_device_may_go_on_while_text_is_looked_up_in_vain() -> None:
    lookups, one = Lookups({"ngram"}, lambda rows: 1.0), replace(job(8), width=None)
    assert not lookups.rests(one), "nothing is known of it"
    lookups.choose([one], [(Ask("ngram", 4, False),)], 1)
    assert lookups.rests(one), "most requests get nothing"
    for _ in range(3):
        lookups.worth("ngram", [one], Drafts([2], np.asarray([4, 5]), matched=[20]))
    assert not lookups.rests(one), "this one gets something again and again"


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
    plan = Batch([], [], [job(8, prompt=[1, 2, 1, 2, 1])], [(Ask("ngram", 3),)])
    assert router.propose(target, batch, (), lambda *_: [0]).counts == [judged]
