"""The mock on real pages: what it was fed lies in a store, place by place, and rows are computed from there.

For schedulers and their tests: room runs out, beginnings are shared, pages are swapped, and a page that holds something
else than the account says changes every later distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from outrider.backends.base import Paths, Spans, State
from outrider.backends.mock import MockBackend
from outrider.clock import Clock
from outrider.config import MockConfig
from outrider.errors import BackendError
from outrider.kv.pages import Page, Pages
from outrider.types import Scores, Slot


class TokenStore:
    """One token per place."""

    def __init__(self, pages: Pages) -> None:
        self._size = pages.page_size
        self._tokens = np.full(pages.num_pages * pages.page_size, -1, dtype=np.int64)

    def copy_page(self, source: Page, target: Page) -> None:
        size = self._size
        self._tokens[target * size : (target + 1) * size] = self._tokens[source * size : (source + 1) * size]

    def move_places(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._tokens[list(targets)] = self._tokens[list(sources)]

    def save_places(self, places: Sequence[int]) -> Any:
        return self._tokens[list(places)][:, None]

    def restore_places(self, places: Sequence[int], contents: Any) -> None:
        self._tokens[list(places)] = contents[:, 0]

    def read(self, places: Sequence[int]) -> list[int]:
        tokens: list[int] = self._tokens[list(places)].tolist()
        return tokens

    def write(self, places: Sequence[int], tokens: Sequence[int]) -> None:
        self._tokens[list(places)] = tokens


class PagedMock(MockBackend):
    """A mock whose sequences share `pages`. The target comes first; drafts on the same pages are given its slots."""

    pages: Pages

    def __init__(
        self,
        config: MockConfig | None = None,
        pages: Pages | None = None,
        *,
        clock: Clock | None = None,
        arrays: Literal["numpy", "torch"] = "numpy",
        device: str | None = None,
    ) -> None:
        super().__init__(config, clock=clock, arrays=arrays, device=device)
        self.pages = pages or Pages(64, 16)
        self.store = TokenStore(self.pages)
        self.number = self.pages.add_store(self.store)
        room = self.pages.num_pages * self.pages.page_size
        self.info = replace(self.info, context=min(self.info.context, room), pages=True)

    def cached(self, slot: Slot) -> list[int]:
        """From the pages themselves."""
        return self.store.read(self.pages.places(slot, range(self.pages.length(slot, self.number))))

    def open(self, tokens: Sequence[int] = (), limit: int | None = None, tenant: str = "") -> Slot | None:
        slot = self.pages.open(tokens, limit, tenant)
        return None if slot is None else self._adopt(slot)

    def _adopt(self, slot: Slot) -> Slot:
        """Take over what the pages hold."""
        tokens = self.cached(slot)
        self._tokens[slot], self._states[slot] = tokens, self._hashes(tokens)
        return slot

    def length(self, slot: Slot) -> int:
        return self.pages.length(slot, self.number)

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        for slot, start, count in zip(spans.slots, spans.starts, spans.counts, strict=True):
            if slot not in self._tokens and self.number:
                self._adopt(slot)  # a draft that is given the target's slot
            if not self.pages.make_room(slot, start + count):
                raise BackendError(f"no page is left for slot {slot} ({self.pages.usage})")
        scores = super().score(spans, hidden)
        for slot, start, count in zip(spans.slots, spans.starts, spans.counts, strict=True):
            self.store.write(self.pages.places(slot, range(start, start + count)), self._tokens[slot][start:])
            self.pages.advance(slot, self.number, start + count)
        return scores

    def keep(self, slots: Sequence[Slot], lengths: Sequence[int], paths: Paths | None = None) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            path = list(paths[slot]) if paths and slot in paths else []
            if path:
                self.pages.move(slot, self.number, path, length - len(path))
        super().keep(slots, lengths, paths)

    def publish(self, slot: Slot, tokens: Sequence[int]) -> None:
        self.pages.publish(slot, tokens)

    def rewind(self, slot: Slot, length: int) -> None:
        super().rewind(slot, length)
        if length < self.pages.length(slot, self.number):
            self.pages.rewind(slot, self.number, length)

    def fork(self, slot: Slot) -> Slot | None:
        twin = self.pages.fork(slot)
        return None if twin is None else self._adopt(twin)

    def close(self, slot: Slot) -> None:
        if self.number == 0:
            super().close(slot)
            self.pages.close(slot)
            return
        if slot in self._tokens:  # else it has not read anything yet
            super().close(slot)
        self.pages.rewind(slot, self.number, 0)

    def save(self, slot: Slot) -> State:
        return self.pages.save(slot)

    def load(self, state: State) -> Slot | None:
        slot = self.pages.load(state)
        return None if slot is None else self._adopt(slot)

    def reserve(self, slot: Slot, length: int) -> bool:
        return self.pages.make_room(slot, length)

    def trim(self, slot: Slot) -> bool:
        return self.pages.trim(slot)

    def would_free(self, slot: Slot) -> int:
        return self.pages.would_free(slot)

    def swap_out(self, slot: Slot) -> State:
        return self.pages.save(slot, shared=False)

    def swap_in(self, state: State, tokens: Sequence[int], limit: int, tenant: str = "") -> Slot | None:
        slot = self.pages.load(state, tokens, limit, tenant)
        return None if slot is None else self._adopt(slot)
