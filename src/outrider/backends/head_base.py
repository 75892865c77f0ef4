"""EAGLE heads, whatever computes them: the contract, one pass of entries, and whether a head fits a model.

    tokens    t0  t1  t2  t3          the target holds t0 t1 t2, t3 is its answer
    entries   (h0,t1) (h1,t2) (h2,t3) the last one's output guesses t4
    places     1       2       3      entry i lies where token i + 1 does

So what lies in a page is a function of the tokens up to its end, as it is for the target, and prefix hits hold. The
entry after a hit needs the hidden state of the hit's last token: that one is kept beside each page (`edge`).

Drafting goes on with entries of the head's own output, behind the true ones; nobody is told of them, and they are
written over. A tree of them is read level by level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from outrider.backends.base import HeadHost
from outrider.errors import BackendError, ModelFileError
from outrider.kv.pages import Pages
from outrider.models.head_spec import IDS, OFFSETS
from outrider.models.heads import HeadFile, Host, check_fit
from outrider.sampling.ops import Drawing
from outrider.types import Array, Slot


@dataclass(slots=True)
class Entries:
    """One pass: each slot reads `counts` entries from `starts` on, which see those from `firsts` on.

    `parents` as in `backends.base.Spans`: entries of a tree, those of earlier passes included.
    """

    slots: list[Slot]
    firsts: list[int]
    starts: list[int]
    counts: list[int]
    tokens: list[int]  # [N]
    hidden: Array  # [N, width]
    parents: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Judged:
    """Chains of `count` drafts each that were judged, and what the device knows of it. B slots, as many rows of hidden
    states as tokens were fed: the last one that the host knows, and the drafts."""

    slots: list[Slot]
    firsts: list[int]
    starts: list[int]  # of the first entry that is to be read
    count: int
    drafted: Array  # [B * count]
    accepted: Array  # [B]
    following: Array  # [B]
    states: Mapping[int, Array]  # [B * (count + 1), width] each


class Roller(Protocol):
    """Lets a head guess on by itself."""

    def roll(self, entries: Entries, steps: int, drawing: Drawing) -> bool:
        """Read entries, whose last outputs are drawn from; then guess on until `steps` tokens are drawn for each slot.

        False: it cannot, and nothing changed.
        """


class DeviceRoller(Roller, Protocol):
    """One on a device that works while the host does something else (`backends.cuda.eagle`)."""

    def read(self, entries: Entries) -> bool:
        """As `Head.fill_cache`. False: it cannot, and nothing changed."""

    def grow(
        self, entries: Entries, levels: int, per: int, warps: Sequence[tuple[float, float]]
    ) -> tuple[Any, Any, Any] | None:
        """Read entries and grow a tree behind each: level by level the `per` likeliest children of `per` tips, of which
        the likeliest are the next tips. Tokens, parents (-1 is the last token before the tree) and logarithms of how
        likely nodes are, their ancestors included; on the host, [B, nodes]. None: it cannot, and nothing changed.

        warps: temperature and the logarithm of min_p of each.
        """

    def may_follow(self, jobs: int, count: int) -> bool:
        """Whether chains of so many drafts for so many jobs are small enough for `roll_on`."""

    def roll_on(self, judged: Judged, steps: int, drawing: Drawing) -> Array | None:
        """Go on behind a verdict that the host does not know yet: read the entries of all that stays, and draw `steps`
        tokens for each slot. Nobody's length changes. Returns fused hidden states of the rows, which are good until the
        next such call, or None where it cannot."""

    def roll_s(self, jobs: int, steps: int) -> float | None:
        """Seconds of the device for that, of work that is queued; None where so many have no room."""

    def read_s(self) -> float | None:
        """The same, of one of many entries that are read."""


class Head(Protocol):
    """The network and what it holds of the target's sequences, under their page ids. Arrays are of its own library."""

    @property
    def target(self) -> HeadHost: ...

    @property
    def pages(self) -> Pages: ...

    @property
    def number(self) -> int:
        """Of its store among the pages'."""

    @property
    def hidden(self) -> tuple[int, ...]:
        """Hidden states of the target that it reads."""

    @property
    def context(self) -> int: ...

    def roller(self) -> Roller | None: ...

    def join(self, parts: Sequence[Array]) -> Array:
        """Rows one after the other, in memory of their own. [n, width]"""

    def nothing(self) -> Array:
        """[0, width]"""

    def pick(self, states: Mapping[int, Array], rows: Sequence[int]) -> list[Array]:
        """These rows of the hidden states that a pass of the target gave, as `fuse` takes them."""

    def fuse(self, features: Sequence[Array]) -> Array:
        """Hidden states of the target, one array for each of `hidden`, as entries take them. [n, width]"""

    def read(self, entries: Entries) -> Array:
        """Outputs of the entries: what follows their tokens. [N, width]"""

    def fill_cache(self, entries: Entries) -> None:
        """Read entries whose outputs nobody wants: those of prompts. Their keys and values stay."""

    def again(self, outputs: Array) -> Array:
        """Outputs as the hidden states of entries that guess on."""

    def logits(self, outputs: Array) -> Array:
        """Rows over the target's tokens, as its sampling takes them. [n, width] -> [n, V]"""

    @property
    def own_rows(self) -> Callable[[Array], tuple[Array, Array | None]] | None:
        """Outputs -> rows over its own tokens, in numpy, and the target's id of each of those, where they are not the
        same. None: nobody is the better for it. [n, width] -> [n, own], [own]"""

    def edge(self, slot: Slot, position: int) -> Array:
        """The fused hidden state of the last token of a page that was read before. [1, width]"""

    def keep_edges(self, slot: Slot, start: int, hidden: Array) -> None:
        """Of these fused hidden states, which stand from `start` on, those at the ends of pages are put aside."""


class Edges:
    """What heads keep beside pages, in arrays of any library."""

    pages: Pages
    store: Any  # whose `edges` are [pages, width]

    def edge(self, slot: Slot, position: int) -> Any:
        page = self.pages.leases[slot].pages[position // self.pages.page_size]
        return self.store.edges[page : page + 1]

    def keep_edges(self, slot: Slot, start: int, hidden: Any) -> None:
        size, pages = self.pages.page_size, self.pages.leases[slot].pages
        for position in range(start + (-start - 1) % size, start + len(hidden), size):
            self.store.edges[pages[position // size]] = hidden[position - start]

    def _make_room(self, entries: Entries) -> None:
        for slot, start, count in zip(entries.slots, entries.starts, entries.counts, strict=True):
            if not self.pages.make_room(slot, start + count + 1):
                raise BackendError(f"no page is left for slot {slot} ({self.pages.usage}); give the cache more tokens")


def settle_on(file: HeadFile, target: HeadHost) -> None:
    """A ModelFileError if the head was not made for a model like this."""
    spec, info = target.spec, target.info
    check_fit(file, Host(info.name, spec.width, spec.num_layers, info.vocab_size, info.num_columns))
    own = getattr(target, "fingerprint", None)
    if file.made_for is not None and own is not None and file.made_for != own:
        raise ModelFileError(
            f"{file.path}: the head was trained on other weights ({file.made_for[:12]}) than those of {info.name} "
            f"({own[:12]}); take one made for it, or train one: outrider train eagle",
            param="draft",
        )


def draft_ids(file: HeadFile, target: HeadHost) -> np.ndarray[Any, Any] | None:
    """The target's id of each token that a head chooses among; None: those are all of the target's."""
    if IDS in file.shapes:
        ids = file.numbers(IDS)
    elif OFFSETS in file.shapes:
        ids = file.numbers(OFFSETS)
        ids = ids + np.arange(len(ids))
    else:
        return None
    size, num_columns = target.info.vocab_size, target.info.num_columns
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= num_columns:
        raise ModelFileError(f"{file.path}: its tokens are not all among the target's {num_columns}")
    if len(np.unique(ids)) < len(ids):
        raise ModelFileError(f"{file.path}: two of its tokens are the same token of the target")
    if not (ids < size).any():
        raise ModelFileError(f"{file.path}: none of its tokens is one of the target's {size}")
    return ids
