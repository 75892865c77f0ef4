"""What a pass must look like before a model computes anything. Shared by backends that own real weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.backends.base import ModelInfo, Paths, Spans
from outrider.errors import BackendError
from outrider.types import Slot


def check_spans(spans: Spans, hidden: Sequence[int], info: ModelInfo, length: Callable[[Slot], int]) -> None:
    """Refuses what `info` does not offer and tokens at the wrong place. `length` refuses unknown slots itself."""
    if not spans.slots:
        raise BackendError(f"{info.name} was given a pass without spans")
    if spans.parents and not info.trees:
        raise BackendError(f"{info.name} reads chains only; spans {sorted(spans.parents)} are trees")
    for layer in hidden:
        if not 0 <= layer < info.num_hidden:
            raise BackendError(f"{info.name} offers {info.num_hidden} hidden states; {layer} was asked for")
    if len(set(spans.slots)) != len(spans.slots):
        raise BackendError(f"a slot is named twice in one pass: {list(spans.slots)}")
    if sum(spans.counts) != len(spans.tokens):
        raise BackendError(f"spans name {sum(spans.counts)} tokens, {len(spans.tokens)} were given")
    for slot, start, count, rows in zip(spans.slots, spans.starts, spans.counts, spans.rows, strict=True):
        held = length(slot)
        if start != held:
            raise BackendError(f"slot {slot} holds {held} tokens but was fed position {start}")
        if count < 1:
            raise BackendError(f"slot {slot} takes part with {count} tokens; one is the least")
        if not 0 <= rows <= count:
            raise BackendError(f"slot {slot} is fed {count} tokens, but {rows} rows are wanted")
        if start + count > info.context:
            raise BackendError(f"slot {slot} would hold {start + count} tokens in a context of {info.context}")
    tokens = spans.tokens.tolist()  # of a few numbers, Python finds the least sooner than numpy
    least, most = min(tokens), max(tokens)
    if least < 0 or most >= info.vocab_size:
        raise BackendError(f"token {least if least < 0 else most} is not in a vocabulary of {info.vocab_size}")


def check_chains(paths: Paths | None, info: ModelInfo) -> None:
    """For `keep` of a model that reads no trees: there is no path to choose."""
    if paths:
        raise BackendError(f"{info.name} reads chains only; paths were given for slots {sorted(paths)}")


def check_rewind(slot: Slot, held: int, length: int, oldest: int) -> None:
    """`oldest` is the shortest length the slot can still go back to."""
    if not 0 <= length <= held:
        raise BackendError(f"slot {slot} holds {held} tokens and cannot go to {length}")
    if length < oldest:
        raise BackendError(f"slot {slot} cannot rewind {held - length} tokens to {length}; it goes back to {oldest}")
