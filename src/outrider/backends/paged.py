"""Sequences in pages: what every transformer of ours does with its slots, whatever computes it."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.backends.base import Backend, ModelInfo, Paths, Spans, State
from outrider.backends.checks import check_rewind
from outrider.errors import BackendError
from outrider.kv.pages import Pages
from outrider.models.base import ModelFile, TransformerSpec
from outrider.types import Slot


def info_of(
    file: ModelFile, spec: TransformerSpec, pages: Pages, vocab_size: int | None, context: int | None
) -> ModelInfo:
    """What the engine must know of a transformer of ours. vocab_size, context: where they are less than the file's."""
    return ModelInfo(
        name=file.name,
        vocab_size=vocab_size or spec.num_columns,
        num_columns=spec.num_columns,
        context=min(context or spec.context, spec.context, pages.num_pages * pages.page_size),
        eos_ids=file.eos_ids,
        trees=True,
        num_layers=spec.num_layers,
        num_hidden=spec.num_layers + 2,
        heads=True,
        pages=True,
    )


class PagedSequences(Backend):
    """The part of a backend that keeps account of its sequences. The class above it computes (`score`)."""

    info: ModelInfo
    pages: Pages
    number: int  # of its store among the pages'. 0: the target, who opens and closes sequences

    def open(self, tokens: Sequence[int] = (), limit: int | None = None, tenant: str = "") -> Slot | None:
        assert self.number == 0, "a draft that shares pages is given the target's slots"
        return self.pages.open(tokens, limit, tenant)

    def length(self, slot: Slot) -> int:
        if slot not in self.pages.leases:
            raise BackendError(f"there is no slot {slot}")
        return self.pages.length(slot, self.number)

    def keep(self, slots: Sequence[Slot], lengths: Sequence[int], paths: Paths | None = None) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            if paths and slot in paths:
                path, held = list(paths[slot]), self.length(slot)
                start = length - len(path)
                if start < 0 or sorted(set(path)) != path or not all(start <= place < held for place in path):
                    raise BackendError(f"slot {slot} holds {held} tokens and cannot keep places {path} as its last")
                self.pages.move(slot, self.number, path, start)
            self.rewind(slot, length)

    def publish(self, slot: Slot, tokens: Sequence[int]) -> None:
        self.pages.publish(slot, tokens)

    def rewind(self, slot: Slot, length: int) -> None:
        held = self.length(slot)
        check_rewind(slot, held, length, oldest=0)
        if length < held:
            self.pages.rewind(slot, self.number, length)

    def fork(self, slot: Slot) -> Slot | None:
        self.length(slot)  # says so when there is no such slot
        return self.pages.fork(slot)

    def close(self, slot: Slot) -> None:
        self.length(slot)
        if self.number == 0:
            self.pages.close(slot)
        else:  # the target still holds the sequence, or is about to close it
            self.pages.rewind(slot, self.number, 0)

    def save(self, slot: Slot) -> State:
        self.length(slot)
        return self.pages.save(slot)

    def load(self, state: State) -> Slot | None:
        return self.pages.load(state)

    def reserve(self, slot: Slot, length: int) -> bool:
        return self.pages.make_room(slot, length)

    def trim(self, slot: Slot) -> bool:
        return self.pages.trim(slot)

    def would_free(self, slot: Slot) -> int:
        return self.pages.would_free(slot)

    def swap_out(self, slot: Slot) -> State:
        return self.pages.save(slot, shared=False)

    def swap_in(self, state: State, tokens: Sequence[int], limit: int, tenant: str = "") -> Slot | None:
        return self.pages.load(state, tokens, limit, tenant)

    def _make_room(self, spans: Spans) -> None:
        """Pages for everything that is fed."""
        for slot, start, count in zip(spans.slots, spans.starts, spans.counts, strict=True):
            if not self.pages.make_room(slot, start + count):
                raise BackendError(f"no page is left for slot {slot} ({self.pages.usage}); give the cache more tokens")

    def _advance(self, slot: Slot, length: int) -> None:
        self.pages.advance(slot, self.number, length)


class SequencesAhead(PagedSequences):
    """The account of a model's first layers, which are a model of their own for layer skip.

    Keys and values of these layers are the whole model's, so there is nothing to read before it can draft. It writes
    from the whole model's length on; how far is known here alone, and the whole model's next pass writes over it.
    """

    def __init__(self, whole: PagedSequences) -> None:
        self._whole = whole
        self._ahead: dict[Slot, int] = {}

    def open(self, tokens: Sequence[int] = (), limit: int | None = None, tenant: str = "") -> Slot | None:
        raise BackendError("the first layers of a model use its slots")

    def length(self, slot: Slot) -> int:
        return self._ahead.get(slot) or self._whole.length(slot)

    def rewind(self, slot: Slot, length: int) -> None:
        check_rewind(slot, self.length(slot), length, oldest=self._whole.length(slot))
        self._ahead[slot] = length

    def fork(self, slot: Slot) -> Slot | None:
        raise BackendError("the first layers of a model use its slots")

    def close(self, slot: Slot) -> None:
        """Forget what is ahead of the whole model."""
        self._ahead.pop(slot, None)

    def _advance(self, slot: Slot, length: int) -> None:
        self._ahead[slot] = length
