"""Which texts an update learns from: texts of about one length together, so that little is filled up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

TOGETHER = 32  # updates whose texts are sorted by length among themselves: across all of them order stays random


def plan(lengths: Sequence[int], tokens: int, seed: int, begin: int, end: int) -> Iterator[list[int]]:
    """Texts of the updates from `begin` to `end`, of about so many tokens each. They depend on the seed and the
    update's number alone, and all texts come once before one comes again."""
    done, number = 0, 0
    while done < end:
        batches = _epoch(lengths, tokens, np.random.default_rng((seed, number)))
        yield from batches[max(0, begin - done) : end - done]
        done += len(batches)
        number += 1


def _epoch(lengths: Sequence[int], tokens: int, random: np.random.Generator) -> list[list[int]]:
    order = random.permutation(len(lengths)).tolist()
    window = max(1, round(TOGETHER * tokens / max(1.0, float(np.mean(lengths)))))
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        batch: list[int] = []
        for text in sorted(order[start : start + window], key=lambda text: lengths[text]):
            if batch and (len(batch) + 1) * lengths[text] > tokens:  # as long as the longest, all of them
                batches.append(batch)
                batch = []
            batch.append(text)
        batches.append(batch)
    return [batches[place] for place in random.permutation(len(batches))]
