"""The mock backend keeps its promises: it is what the proofs stand on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.backends.base import Spans
from outrider.backends.mock import MockBackend, mock_tokenizer
from outrider.clock import SystemClock, VirtualClock
from outrider.config import MockConfig
from outrider.errors import BackendError
from outrider.types import Slot

CONFIG = MockConfig(vocab_size=7, seed=2, context=64)


def feed(mock: MockBackend, slot: Slot, start: int, tokens: Sequence[int], rows: int = 1) -> np.ndarray:
    return mock.score(Spans([slot], [start], [len(tokens)], [rows], mock.ops.integers(tokens))).logits


class Slots(RuleBasedStateMachine):
    """Random lives of slots against a plain list of tokens each; rows against the definition."""

    def __init__(self) -> None:
        super().__init__()
        self.mock = MockBackend(replace(CONFIG, order=2))
        self.model: dict[Slot, list[int]] = {}

    @rule()
    def open(self) -> None:
        self.model[self.mock.open()] = []

    @precondition(lambda self: self.model)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 6), min_size=1, max_size=4))
    def score(self, data: st.DataObject, tokens: list[int]) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        if len(self.model[slot]) + len(tokens) > CONFIG.context:
            return
        rows = data.draw(st.integers(0, len(tokens)))
        logits = feed(self.mock, slot, len(self.model[slot]), tokens, rows)
        self.model[slot] += tokens
        held = self.model[slot]
        expected = [self.mock.logits_after(held[: len(held) - rows + 1 + row]) for row in range(rows)]
        assert logits.shape == (rows, 7) and (not rows or (logits == np.stack(expected)).all())

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        length = data.draw(st.integers(0, len(self.model[slot])))
        if data.draw(st.booleans()):
            self.mock.rewind(slot, length)
        else:
            self.mock.keep([slot], [length])
        del self.model[slot][length:]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), how=st.sampled_from(["fork", "save"]))
    def copy(self, data: st.DataObject, how: str) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        other = self.mock.fork(slot) if how == "fork" else self.mock.load(self.mock.save(slot))
        self.model[other] = list(self.model[slot])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        self.mock.close(slot)
        del self.model[slot]

    @invariant()
    def contents_agree(self) -> None:
        assert self.mock.num_slots == len(self.model)
        for slot, tokens in self.model.items():
            assert self.mock.cached(slot) == tokens and self.mock.length(slot) == len(tokens)


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40)


def test_it_screams_at_a_wrong_position() -> None:
    mock = MockBackend(CONFIG)
    slot = mock.open()
    feed(mock, slot, 0, [1, 2])
    for start in (0, 1, 3):
        with pytest.raises(BackendError, match=f"holds 2 tokens but was fed position {start}"):
            feed(mock, slot, start, [3])


@pytest.mark.parametrize("token", [-1, 7])
def test_it_screams_at_a_wrong_token(token: int) -> None:
    mock = MockBackend(CONFIG)
    with pytest.raises(BackendError, match=f"token {token} is not in a vocabulary of 7"):
        feed(mock, mock.open(), 0, [token])


def test_it_screams_past_its_context_and_beyond_its_length() -> None:
    mock = MockBackend(CONFIG)
    slot = mock.open()
    with pytest.raises(BackendError, match="65 tokens in a context of 64"):
        feed(mock, slot, 0, [1] * 65)
    with pytest.raises(BackendError, match="cannot go to 99"):
        mock.rewind(slot, 99)


def test_it_cannot_rewind_when_told_so() -> None:
    mock = MockBackend(replace(CONFIG, max_rewind=1))
    slot = mock.open()
    feed(mock, slot, 0, [1, 2, 3])
    mock.rewind(slot, 2)
    with pytest.raises(BackendError, match="cannot rewind 2 tokens, only 1"):
        mock.rewind(slot, 0)


def test_shortage_is_a_value() -> None:
    mock = MockBackend(replace(CONFIG, max_slots=1))
    slot = mock.open()
    assert mock.open() is None and mock.fork(slot) is None and mock.load({"tokens": []}) is None
    mock.close(slot)
    assert mock.open() is not None


def test_a_state_that_does_not_fit_leaves_no_slot_behind() -> None:
    mock = MockBackend(CONFIG)
    with pytest.raises(BackendError):
        mock.load({"tokens": [99]})
    assert mock.num_slots == 0


def test_order_limits_the_dependence() -> None:
    whole, last = MockBackend(CONFIG), MockBackend(replace(CONFIG, order=1))
    assert not (whole.logits_after([1, 2, 3]) == whole.logits_after([0, 2, 3])).all()
    assert (last.logits_after([1, 2, 3]) == last.logits_after([0, 5, 3])).all()
    assert not (last.logits_after([1, 2, 3]) == last.logits_after([1, 2, 4])).all()


def test_costs_are_spent_on_its_clock() -> None:
    clock = VirtualClock()
    mock = MockBackend(replace(CONFIG, seconds_per_pass=2.0, seconds_per_token=0.5), clock=clock)
    feed(mock, mock.open(), 0, [1, 2, 3])
    assert clock.now() == 3.5


def test_the_system_clock_sleeps_as_long_as_told() -> None:
    clock = SystemClock()
    for seconds in (0.0002, 0.003):
        started = clock.now()
        clock.sleep(seconds)
        assert clock.now() - started >= seconds


def test_torch_arrays_hold_the_same_rows() -> None:
    ours, theirs = MockBackend(CONFIG), MockBackend(CONFIG, arrays="torch")
    assert feed(theirs, theirs.open(), 0, [1, 2], 2).tolist() == feed(ours, ours.open(), 0, [1, 2], 2).tolist()


def test_pieces_are_distinct_for_any_vocabulary() -> None:
    for size in (1, 8, 12, 33, 500):
        tokenizer = mock_tokenizer(size)
        assert len({tokenizer.token_bytes(token) for token in range(size)}) == size
