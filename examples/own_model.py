"""Plug in your own model: everything a backend needs, on a bigram model small enough to read.

Run it with `.venv/bin/python examples/own_model.py`. A real model replaces `self.table` and keeps keys and values
instead of token lists.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider import Engine
from outrider.backends.base import ModelInfo, Paths, Spans, State
from outrider.sampling.ops import SamplingOps
from outrider.types import Scores, Slot


class Bigram:
    """The next token depends on the last one: row t of `table` holds the logits after token t."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = table.astype(np.float32)
        size = len(table)
        self.info = ModelInfo(name="bigram", vocab_size=size, num_columns=size, context=1000)
        self.ops = SamplingOps(np)  # sampling in the array library the model computes with
        self.slots: dict[Slot, list[int]] = {}
        self.opened = 0

    def open(self, tokens: Sequence[int] = (), limit: int | None = None, tenant: str = "") -> Slot:
        slot = Slot(self.opened)
        self.opened += 1
        self.slots[slot] = []
        return slot

    def length(self, slot: Slot) -> int:
        return len(self.slots[slot])

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        """One pass: append each slot's tokens, return the rows of the last ones wanted."""
        tokens, rows, at = spans.tokens.tolist(), [], 0
        for slot, count, wanted in zip(spans.slots, spans.counts, spans.rows, strict=True):
            self.slots[slot] += tokens[at : at + count]
            at += count
            rows += self.slots[slot][len(self.slots[slot]) - wanted :]
        return Scores(spans.rows, self.table[rows])

    def keep(self, slots: Sequence[Slot], lengths: Sequence[int], paths: Paths | None = None) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            self.rewind(slot, length)

    def publish(self, slot: Slot, tokens: Sequence[int]) -> None:
        """Nothing is shared between sequences."""

    def rewind(self, slot: Slot, length: int) -> None:
        del self.slots[slot][length:]

    def fork(self, slot: Slot) -> Slot:
        other = self.open()
        self.slots[other] = list(self.slots[slot])
        return other

    def close(self, slot: Slot) -> None:
        del self.slots[slot]

    def save(self, slot: Slot) -> State:
        return {"tokens": list(self.slots[slot])}

    def load(self, state: State) -> Slot:
        slot = self.open()
        self.slots[slot] = list(state["tokens"])
        return slot


def main() -> None:
    rng = np.random.default_rng(0)
    table = 2.0 * rng.standard_normal((50, 50))
    target, draft = Bigram(table), Bigram(table + 0.5 * rng.standard_normal((50, 50)))
    engine = Engine.load(target, draft=draft, width=4)
    fast = engine.generate([1, 2, 3], max_tokens=40, seed=7)
    plain = engine.generate([1, 2, 3], max_tokens=40, seed=7, width=0)
    assert fast.token_ids == plain.token_ids
    counts = fast.statistics
    print(f"{counts.tokens} tokens in {counts.rounds} passes instead of {plain.statistics.rounds}: {fast.token_ids}")


if __name__ == "__main__":
    main()
