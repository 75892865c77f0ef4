"""The passes that a fixed width makes, counted without an engine: they depend on no cost, only on what is accepted.

`tests/test_width.py` compares them with those of an engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

# (rows, whether the draft made it) -> how many such passes, and the tokens in their caches
Passes = Mapping[tuple[int, bool], tuple[int, int]]


def count_passes(right_ahead: Sequence[Sequence[int]], num_prompt: int, width: int) -> Passes:
    """right_ahead: for each request and each length of its text, how many drafted tokens in a row would be right."""
    ends = [len(right) for right in right_ahead]
    lengths = [num_prompt] * len(ends)  # of the texts
    read, read_by_draft = [0] * len(ends), [0] * len(ends)
    passes, contexts = Counter[tuple[int, bool]](), Counter[tuple[int, bool]]()

    def count(rows: int, context: int, is_draft: bool) -> None:
        passes[rows, is_draft] += 1
        contexts[rows, is_draft] += context

    active = list(range(len(ends)))
    while active:
        drafted = {at: max(0, min(width, ends[at] - lengths[at] - 1)) for at in active}
        for step in range(1, max(drafted.values()) + 1):
            drafting = [at for at in active if drafted[at] >= step]
            if step == 1:
                starts = [read_by_draft[at] for at in drafting]
                rows = sum([lengths[at] for at in drafting]) - sum(starts)
            else:
                starts = [lengths[at] + step - 2 for at in drafting]
                rows = len(drafting)
            count(rows, sum(starts), True)
        count(sum([lengths[at] - read[at] + drafted[at] for at in active]), sum([read[at] for at in active]), False)
        for at in active:
            accepted = min(right_ahead[at][lengths[at]], drafted[at])
            if drafted[at]:  # the last drafted token is not read
                read_by_draft[at] = lengths[at] + min(accepted, drafted[at] - 1)
            lengths[at] += accepted + 1
            read[at] = lengths[at] - 1
        active = [at for at in active if lengths[at] < ends[at]]
    return {key: (times, contexts[key]) for key, times in passes.items()}
