"""The width the engine chooses: never slower on the mock, caps and fixed widths kept, decisions told (R11)."""

from __future__ import annotations

import pytest

from outrider.backends.mock import MockBackend
from outrider.bench.never_slower import Cell, measure
from outrider.clock import VirtualClock
from outrider.config import MockConfig
from outrider.engine.engine import Engine
from outrider.types import Event

CONFIG = MockConfig(vocab_size=32, seed=3, sharpness=2.0)
CELLS = [
    Cell((0.0,), 0.7, "linear", 1),
    Cell((0.9,), 0.02, "flat", 1),
    Cell((0.98,), 0.0, "cpu", 1),
    Cell((0.5,), 0.1, "compute", 4),
    Cell((0.9, 0.05), 0.1, "flat", 1),
    Cell((0.05, 0.9), 0.02, "linear", 4),
]


def engine(**settings: object) -> Engine:
    """Passes cost 1 s, whatever they are fed; a draft step 0.05 s: drafting pays, by virtual time."""
    clock = VirtualClock()
    target = MockBackend(MockConfig(vocab_size=32, seed=3, sharpness=2.0, seconds_per_pass=1.0), clock=clock)
    draft = MockConfig(vocab_size=32, seed=3, sharpness=2.0, drift=0.2, seconds_per_pass=0.05)
    return Engine.load(target, draft=MockBackend(draft, clock=clock), clock=clock, **settings)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_auto_is_never_slower(cell: Cell) -> None:
    reading = measure(cell)
    assert reading.of_plain >= 0.97 and reading.of_best >= 0.95, reading


def test_it_drafts_where_that_pays_and_says_so() -> None:
    ours = engine()
    plain = ours.generate([1, 2], seed=1, max_tokens=200, width=0)
    auto = ours.generate([1, 2], seed=1, max_tokens=200)
    assert auto.token_ids == plain.token_ids
    assert auto.statistics.tokens_per_round > 2.0
    report = auto.statistics.report()
    chosen = sum(report["widths"].values())
    assert auto.statistics.rounds - 2 <= chosen <= auto.statistics.rounds, "but where there was nothing to choose"
    assert any("drafting pays" in reason for reason in report["reasons"])
    assert sum(ours.statistics.widths.values()) == chosen, "fixed widths are no choices"


def test_it_stops_where_that_does_not_pay_and_says_so() -> None:
    clock = VirtualClock()
    target = MockBackend(MockConfig(vocab_size=32, seed=3, seconds_per_token=1.0), clock=clock)
    draft = MockBackend(MockConfig(vocab_size=32, seed=9, seconds_per_pass=0.5), clock=clock)
    counts = Engine.load(target, draft=draft, clock=clock).generate([1, 2], seed=1, max_tokens=300).statistics
    assert counts.widths[0] > 280
    assert any(reason.startswith("plain: drafting would give") for reason in counts.reasons)
    assert counts.advice is not None and "does not pay" in counts.advice


def test_caps_and_fixed_widths_are_kept() -> None:
    ours, widest = engine(), {}
    for name, settings in {"cap": {"max_width": 2}, "none": {"max_width": 0}, "fixed": {"width": 5}}.items():
        events: list[Event] = list(ours.stream([1, 2], seed=1, max_tokens=60, **settings))
        widest[name] = max(len(event.drafts) for event in events)
    assert widest == {"cap": 2, "none": 0, "fixed": 5}
    capped = engine(max_width=3).generate([1, 2], seed=1, max_tokens=100).statistics
    assert max(capped.widths) == 3


def test_a_batch_of_fixed_and_free_widths() -> None:
    ours = engine()
    wanted = [ours.generate([b], seed=b, max_tokens=60, width=0).token_ids for b in range(6)]
    streams = [ours.stream([b], seed=b, max_tokens=60, width=None if b % 2 else b) for b in range(6)]
    assert [list(stream)[-1].result.token_ids for stream in streams] == wanted
