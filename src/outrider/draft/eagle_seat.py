"""What an EAGLE drafter remembers of a job between rounds, and of a round that the device goes on with by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.kv.pages import Page
from outrider.sampling.ops import Drawing
from outrider.types import Array, Slot

MOST_WAITING = 2**22  # numbers of hidden states that may wait until somebody wants drafts


class Given(NamedTuple):
    """Rows of the hidden states of a pass, as they were given: picked when somebody wants them."""

    states: Mapping[int, Array]
    rows: Sequence[int]


@dataclass(slots=True)
class Seat:
    """A job's place in the head. Entries `first` to `read` are in its cache, `pending` come next."""

    slot: Slot
    first: int
    read: int
    pending: Array  # [n, width] fused hidden states of entries that were not read yet
    gap: bool = False  # the target remembered more of the beginning than the head: it sees only what came after
    guesses: Array | None = None  # [1 + fed, width] what entries after the last true one and its own are made of
    waiting: list[Given] = field(default_factory=list)  # hidden states that come after those
    num_waiting: int = 0  # tokens of them

    @property
    def num_pending(self) -> int:
        return len(self.pending) + self.num_waiting

    @property
    def is_full(self) -> bool:
        """Whether no more should wait."""
        width: int = sum([one.shape[1] for one in self.waiting[0].states.values()])
        return self.num_waiting * width > MOST_WAITING

    @property
    def seen(self) -> int:
        """Tokens whose hidden states it was given."""
        return self.read + self.num_pending


@dataclass(slots=True)
class Queue:
    """What the device drafts while the host finds out how the round before ended. Of the entries that stay it has read
    all, then."""

    slots: list[Slot]
    lengths: dict[int, int]  # of jobs' tokens, by id: those it goes on behind
    pages: list[list[Page]]
    steps: int
    drawing: Drawing
    fused: Array  # hidden states of the rows that were judged
    is_known: bool = False  # to the host, how the round ended
