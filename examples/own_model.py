"""Plug in your own model: the five methods a backend must have, on a bigram model small enough to read.

Run it with `.venv/bin/python examples/own_model.py`. A real model replaces `self.table` and keeps keys and values
instead of token lists. The other methods of `Backend` have working defaults.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider import Engine
from outrider.backends.base import Backend, ModelInfo, Spans
from outrider.native.sampling import cpu_sampling
from outrider.types import Scores, Slot


class Bigram(Backend):
    """The next token depends on the last one: row t of `table` holds the logits after token t."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = table.astype(np.float32)
        size = len(table)
        self.info = ModelInfo(name="bigram", vocab_size=size, num_columns=size, context=1000)
        self.ops = cpu_sampling()  # for rows in numpy arrays; SamplingOps(xp) takes any other array library
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

    def rewind(self, slot: Slot, length: int) -> None:
        del self.slots[slot][length:]

    def close(self, slot: Slot) -> None:
        del self.slots[slot]


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
