"""The account of cache pages: who holds which, what may be shared, what an earlier sequence left behind. No torch.

A sequence holds a list of pages; place p of it lies in its page p // page_size. Keys and values live in *stores*, one
per model: the target's is store 0, drafts of the same vocabulary add theirs under the same page ids, so that prefix
hits, forks and rewinds hold for them too.

    pages    free ............. nobody's, contents meaningless
             held ............. by one or more sequences (its count of holders)
             idle ............. by none, but published: found again by hash until somebody needs the page

    sequence [ shared or own ........ | own, writable .......... | not yet taken, promised to it ]
             0                        length of store 0          room                    limit

Places below the target's length never change while they are shared: a draft that reads them later writes the same
values for everybody. Whoever writes from there on does it into pages of its own; `make_room` copies shared ones first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple, NewType, Protocol

from outrider.types import Slot

Page = NewType("Page", int)
Hash = bytes


class Store(Protocol):
    """Where one model keeps the contents of pages."""

    def copy_page(self, source: Page, target: Page) -> None: ...

    def move_places(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy single places, numbered over all pages; all are read before any is written."""

    def save_places(self, places: Sequence[int]) -> Any:
        """Their contents as an array of the host, [..., places, values]."""

    def restore_places(self, places: Sequence[int], contents: Any) -> None:
        """Write what `save_places` returned."""


@dataclass(slots=True)
class Lease:
    """What one sequence holds.

    Always: lengths[s] <= len(pages) * page_size, marked[s] <= lengths[s] // page_size, len(hashes) <= lengths[0] //
    page_size. `promised` is limit - len(pages) (0 at least) unless the pool was too small when it was last asked.
    """

    pages: list[Page]
    lengths: list[int]  # tokens each store holds of it
    limit: int  # pages it may come to need
    tenant: str
    hashes: list[Hash]  # of its published pages, from the first on
    marked: list[int]  # published pages each store is known to fill
    promised: int = 0  # pages kept for it
    written: int = 0  # places that a device may be writing, ahead of what is known: their pages stay


class Usage(NamedTuple):
    """How many pages are in which state. Promised ones are among the free and the idle."""

    free: int
    held: int
    idle: int
    promised: int


class Pages:
    """Page ids, counts and hashes of one engine. Every operation costs what it changes, never what is there."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.leases: dict[Slot, Lease] = {}
        self._stores: list[Store] = []
        self._free = [Page(page) for page in range(num_pages - 1, -1, -1)]  # low ids first: neighbours stay neighbours
        self._holders = [0] * num_pages
        self._promised = 0
        self._page_of: dict[Hash, Page] = {}
        self._hash_of: dict[Page, Hash] = {}
        self._filled: dict[Page, int] = {}  # published page -> stores that hold it, as bits
        self._idle: OrderedDict[Page, None] = OrderedDict()  # least recently used first
        self._next_slot = 0

    def add_store(self, store: Store) -> int:
        """A further model under these page ids; returns its number. Store 0 is the target's."""
        assert not self.leases, f"{len(self.leases)} sequences are open; stores are added before"
        self._stores.append(store)
        return len(self._stores) - 1

    @property
    def usage(self) -> Usage:
        idle, free = len(self._idle), len(self._free)
        return Usage(free, self.num_pages - free - idle, idle, self._promised)

    def match(self, tokens: Sequence[int], tenant: str = "") -> int:
        """Tokens of the longest known beginning. At least one of `tokens` is left to score. No side effect."""
        return len(self._known(tokens, tenant)) * self.page_size

    def open(self, tokens: Sequence[int] = (), limit: int | None = None, tenant: str = "") -> Slot | None:
        """A sequence that starts with what is known of `tokens` and may grow to `limit` places.

        Pages up to the limit are promised to it; None when there are not that many.
        """
        known = self._known(tokens, tenant)
        pages = [self._page_of[key] for key in known]
        wanted = self._count(limit or 0)
        if wanted - len(pages) > self._available() - sum(self._holders[page] == 0 for page in pages):
            return None
        filled = [self._num_filled(pages, store) for store in range(len(self._stores))]
        lengths = [count * self.page_size for count in filled]
        return self._new(Lease(pages, lengths, wanted, tenant, known, filled))

    def length(self, slot: Slot, store: int) -> int:
        return self.leases[slot].lengths[store]

    def make_room(self, slot: Slot, length: int) -> bool:
        """Pages for `length` places, those beyond the target's length writable. False is shortage: nothing changed."""
        lease = self.leases[slot]
        held, wanted = len(lease.pages), self._count(length)
        first, pages, holders, hashed = lease.lengths[0] // self.page_size, lease.pages, self._holders, self._hash_of
        # as `is_own` says; asked several times a round for every sequence
        if wanted <= held:
            for page in pages[first:wanted]:
                if holders[page] != 1 or page in hashed:
                    break
            else:
                return True
        shared = [at for at in range(first, min(held, wanted)) if holders[pages[at]] != 1 or pages[at] in hashed]
        if max(0, wanted - held) + len(shared) > self._available() + lease.promised:
            return False
        for index in shared:
            self._replace(lease, index)
        for _ in range(wanted - held):
            lease.pages.append(self._take(lease))
        self._promise(lease)
        return True

    def spare(self, slot: Slot) -> int:
        """Places that a sequence may take before it needs them: of pages that were promised to it, and of some of those
        that nobody needs yet."""
        return (self.leases[slot].promised + self._available() // (8 * len(self.leases))) * self.page_size

    def advance(self, slot: Slot, store: int, length: int) -> None:
        """The store has written up to here."""
        lease = self.leases[slot]
        room = len(lease.pages) * self.page_size
        assert lease.lengths[store] <= length <= room, f"slot {slot}: {lease.lengths} to {length} in a room of {room}"
        lease.lengths[store] = length

    def rewind(self, slot: Slot, store: int, length: int) -> None:
        """The store forgets what it holds from `length` on. Where the target goes back, the others do too.

        Only then are pages given back: a draft goes back while room is reserved for the pass to come.
        """
        lease = self.leases[slot]
        lengths = lease.lengths
        assert 0 <= length <= lengths[store], f"slot {slot} holds {lengths} tokens, store {store} cannot go to {length}"
        lengths[store] = length
        if store == 0:
            lengths[:] = [min(other, length) for other in lengths]
            del lease.hashes[length // self.page_size :]
        lease.marked = [min(pages, held // self.page_size) for pages, held in zip(lease.marked, lengths, strict=True)]
        keep = self._count(max(*lengths, lease.written))
        if store == 0 and len(lease.pages) > keep:
            while len(lease.pages) > keep:
                self._drop(lease.pages.pop())
            self._promise(lease)

    def trim(self, slot: Slot) -> bool:
        """Give back pages beyond what any store holds of the sequence. Whether there were any."""
        lease = self.leases[slot]
        before, keep = len(lease.pages), self._count(max(*lease.lengths, lease.written))
        while len(lease.pages) > keep:
            self._drop(lease.pages.pop())
        if len(lease.pages) < before:
            self._promise(lease)
        return len(lease.pages) < before

    def move(self, slot: Slot, store: int, sources: Sequence[int], start: int) -> None:
        """Contents of these places of the sequence become its places from `start` on (the kept path of a tree)."""
        self._stores[store].move_places(
            self.places(slot, sources), self.places(slot, range(start, start + len(sources)))
        )

    def places(self, slot: Slot, indices: Sequence[int]) -> list[int]:
        """Where these tokens of the sequence lie, numbered over all pages."""
        pages, size = self.leases[slot].pages, self.page_size
        return [pages[index // size] * size + index % size for index in indices]

    def publish(self, slot: Slot, tokens: Sequence[int]) -> None:
        """The sequence begins with these tokens, for good: full pages can be found by what they hold.

        Only after the pass that wrote them was committed: else a hit would find what was never kept.
        """
        lease = self.leases[slot]
        for index in range(len(lease.hashes), min(len(tokens), lease.lengths[0]) // self.page_size):
            page, key = lease.pages[index], self._hash(lease, tokens, index)
            lease.hashes.append(key)
            if key not in self._page_of:  # else another sequence was first, and this page stays private
                self._page_of[key], self._hash_of[page], self._filled[page] = page, key, 0
        for store, length in enumerate(lease.lengths):
            end = min(length // self.page_size, len(lease.hashes))
            for page in lease.pages[lease.marked[store] : end]:
                if page in self._filled:
                    self._filled[page] |= 1 << store
            lease.marked[store] = max(lease.marked[store], end)

    def fork(self, slot: Slot) -> Slot | None:
        """Another sequence with the same contents: shares every page, copies the last one when either writes."""
        lease = self.leases[slot]
        pages = lease.pages[: self._count(max(lease.lengths))]
        # Whoever writes first copies a last page that is not full: both get a page more, since either may be the one.
        spare = int(max(lease.lengths) % self.page_size > 0)
        limit = max(lease.limit, len(pages)) + spare
        if limit - len(pages) + spare > self._available():
            return None
        lease.limit = max(lease.limit, len(lease.pages)) + spare
        self._promise(lease)
        return self._new(Lease(pages, list(lease.lengths), limit, lease.tenant, list(lease.hashes), list(lease.marked)))

    def close(self, slot: Slot) -> None:
        """Give everything back. Published pages stay findable while nobody needs them."""
        lease = self.leases.pop(slot)
        self._promised -= lease.promised
        for page in reversed(lease.pages):  # the end of a sequence is the first to be forgotten
            self._drop(page)

    def would_free(self, slot: Slot) -> int:
        """Pages that nobody else holds, or that are kept for it."""
        lease = self.leases[slot]
        return lease.promised + sum([self._holders[page] == 1 for page in lease.pages])

    def save(self, slot: Slot, *, shared: bool = True) -> dict[str, Any]:
        """What every store holds of the sequence; without `shared`, from the first page on that nobody else holds."""
        lease, first = self.leases[slot], 0
        if not shared:
            while first < len(lease.pages) and self._holders[lease.pages[first]] > 1:
                first += 1
        start = min(first * self.page_size, lease.lengths[0])
        stores = [
            store.save_places(self.places(slot, range(start, max(start, length))))
            for store, length in zip(self._stores, lease.lengths, strict=True)
        ]
        return {"start": start, "lengths": list(lease.lengths), "stores": stores}

    def load(
        self, state: Mapping[str, Any], tokens: Sequence[int] = (), limit: int = 0, tenant: str = ""
    ) -> Slot | None:
        """A sequence with saved contents, beginning with what is known of `tokens`; None when there is no room.

        Where something is missing between the two, it holds the beginning only.
        """
        start, saved = state["start"], state["lengths"]
        slot = self.open(tokens[: saved[0] + 1], max(limit, saved[0]), tenant)
        if slot is None:
            return None
        lengths = self.leases[slot].lengths
        if lengths[0] < start or not self.make_room(slot, saved[0]):
            return slot
        for number, (length, contents) in enumerate(zip(saved, state["stores"], strict=True)):
            end = min(length, saved[0])
            if number < len(self._stores) and start <= lengths[number] < end:
                places = self.places(slot, range(lengths[number], end))
                self._stores[number].restore_places(places, contents[..., lengths[number] - start : end - start, :])
                self.advance(slot, number, end)
        return slot

    def check(self) -> None:
        """Assert that every page is accounted for exactly once."""
        holders = [0] * self.num_pages
        for slot, lease in self.leases.items():
            assert len(set(lease.pages)) == len(lease.pages), f"slot {slot} holds a page twice: {lease.pages}"
            assert max(lease.lengths, default=0) <= len(lease.pages) * self.page_size, f"slot {slot}: {lease}"
            full = [length // self.page_size for length in lease.lengths]
            assert all(marked <= pages for marked, pages in zip(lease.marked, full, strict=True)), (
                f"slot {slot}: {lease}"
            )
            assert not full or len(lease.hashes) <= full[0], f"slot {slot}: {lease}"
            wanted = max(0, lease.limit - len(lease.pages))
            assert lease.promised == wanted or lease.promised < wanted, f"slot {slot}: {lease}"
            for page in lease.pages:
                holders[page] += 1
        assert holders == self._holders, f"counted {holders}, held {self._holders}"
        free = set(self._free)
        assert len(free) == len(self._free), f"a page is free twice: {self._free}"
        for page in map(Page, range(self.num_pages)):
            states = (page in free, holders[page] > 0, page in self._idle)
            assert sum(states) == 1, f"page {page} is (free, held, idle) = {states}"
        assert set(self._idle) <= self._hash_of.keys() == self._filled.keys(), "an idle page nobody can find"
        assert {page: key for key, page in self._page_of.items()} == self._hash_of, "hashes and pages disagree"
        promised = sum(lease.promised for lease in self.leases.values())
        assert promised == self._promised, f"promised {promised}, counted {self._promised}"
        assert self._available() >= 0, f"{self.usage}: more is promised than there is"

    def _count(self, length: int) -> int:
        """Pages that `length` places need."""
        return -(-length // self.page_size)

    def _available(self) -> int:
        """Pages that can be taken by somebody they are not promised to."""
        return len(self._free) + len(self._idle) - self._promised

    def _known(self, tokens: Sequence[int], tenant: str) -> list[Hash]:
        """Hashes of the full pages of `tokens` that are published, from the first on, one token left over."""
        known: list[Hash] = []
        if not self._page_of:
            return known
        for start, end in pairwise(range(0, len(tokens), self.page_size)):  # an exact multiple leaves its last page out
            key = _chain(known[-1] if known else _root(tenant), tokens[start:end])
            if key not in self._page_of:
                break
            known.append(key)
        return known

    def _hash(self, lease: Lease, tokens: Sequence[int], index: int) -> Hash:
        before = lease.hashes[index - 1] if index else _root(lease.tenant)
        return _chain(before, tokens[index * self.page_size : (index + 1) * self.page_size])

    def _num_filled(self, pages: Sequence[Page], store: int) -> int:
        """How many of these found pages a store holds: a draft that never read them has to."""
        bits = [self._filled[page] >> store & 1 for page in pages]
        return bits.index(0) if 0 in bits else len(bits)

    def is_own(self, page: Page) -> bool:
        return self._holders[page] == 1 and page not in self._hash_of

    def _new(self, lease: Lease) -> Slot:
        for page in lease.pages:
            self._hold(page)
        self._promise(lease)
        slot = Slot(self._next_slot)
        self._next_slot += 1
        self.leases[slot] = lease
        return slot

    def _promise(self, lease: Lease) -> None:
        """Keep as many pages for the lease as it may still need, as far as there are any."""
        change = min(max(0, lease.limit - len(lease.pages)) - lease.promised, self._available())
        lease.promised += change
        self._promised += change

    def _hold(self, page: Page) -> None:
        self._holders[page] += 1
        self._idle.pop(page, None)

    def _drop(self, page: Page) -> None:
        self._holders[page] -= 1
        assert self._holders[page] >= 0, f"page {page} is given back twice"
        if self._holders[page] == 0:
            if page in self._hash_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def _take(self, lease: Lease) -> Page:
        """A page for the lease, whose content means nothing yet. Its promise is used up first."""
        if lease.promised:
            lease.promised -= 1
            self._promised -= 1
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._hash_of.pop(page)], self._filled[page]
        self._holders[page] = 1
        return page

    def _replace(self, lease: Lease, index: int) -> None:
        """Copy on write: the lease gets a page of its own with the same contents, in every store."""
        old = lease.pages[index]
        new = self._take(lease)  # the old one is still held, so it cannot be the one taken
        for store in self._stores:
            store.copy_page(old, new)
        lease.pages[index] = new
        self._drop(old)


def _root(tenant: str) -> Hash:
    return blake2b(tenant.encode(), digest_size=16, person=b"outrider-tenant").digest()


def _chain(before: Hash, tokens: Sequence[int]) -> Hash:
    """The hash of a page: of its tokens and of everything before them. Strong, since a collision would leak text."""
    return blake2b(before + array("I", tokens).tobytes(), digest_size=16).digest()
