"""Transformers of the llama kind on a GPU, which begin with what comes next before anybody has asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from outrider.backends.base import Spans
from outrider.backends.cuda.eagle import HeadRoller
from outrider.backends.cuda.layout import GRAPH_ROWS
from outrider.backends.cuda.passes import STRICT_ROWS, Scored, Staged, whole
from outrider.backends.cuda.program import Program
from outrider.backends.cuda.rolling import RollingPasses
from outrider.backends.cuda.sampling import DeviceSampling
from outrider.backends.eagle_head import EagleHead
from outrider.backends.paged import SequencesAhead
from outrider.backends.torch_common import on
from outrider.kv.pages import Pages
from outrider.models.base import ModelFile
from outrider.types import Scores


class Queued(NamedTuple):
    """A pass of single tokens that runs before anybody asked."""

    staged: Staged
    rows: tuple[int, ...]  # of the verdict that it was fed, one for each of its slots
    chosen: torch.Tensor  # that verdict


class GpuBackend(RollingPasses):
    """A model and its sequences. A draft may share the target's `pages`: its slots are the target's, then.

    What most likely comes next, it writes down while the device is busy; and it queues that before anybody has asked,
    where it is told that plain decoding goes on.
    """

    def __init__(self, file: ModelFile, pages: Pages, **options: Any) -> None:
        super().__init__(file, pages, **options)
        self._expected: tuple[int, ...] = ()  # rows whose tokens the staged pass is fed, if it may run unasked
        self._queued: Queued | None = None  # then it does
        self._done: Program | None = None  # that was queued and is asked for now
        if isinstance(self.ops, DeviceSampling):
            self.ops.foresee = self.foresee
            self.ops.may_defer = not self.strict

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        self._expected = ()
        return super().score(spans, hidden)

    def _score_and_look(self, spans: Spans, hidden: tuple[int, ...]) -> Scored:
        done = self._take_queued(spans, hidden)
        if isinstance(self.ops, DeviceSampling):
            self.ops.follows = len(done) == len(spans.slots)
        scored = self._score_rest(spans, hidden, done) if done else self._score(spans, hidden)
        self._look_ahead(spans, hidden)
        return scored

    def _forget(self) -> None:
        super()._forget()
        self._queued = None

    def _look_ahead(self, spans: Spans, hidden: tuple[int, ...]) -> None:
        """After single tokens mostly the next ones follow: their pass is written down while the device is busy."""
        count = len(spans.slots)
        if spans.parents or not sum(spans.counts) == sum(spans.rows) == count:
            return
        expected = tuple(
            place for place in spans.goes_on if self.pages.make_room(spans.slots[place], spans.starts[place] + 2)
        )
        places = expected or range(count)
        slots, starts = [spans.slots[place] for place in places], [spans.starts[place] + 1 for place in places]
        held = [len(self.pages.leases[slot].pages) * self.pages.page_size for slot in slots]
        if len(slots) > (STRICT_ROWS if self.strict else GRAPH_ROWS[-1]) or not all(map(int.__lt__, starts, held)):
            return
        once = [1] * len(slots)
        self._staged = self._stage(Spans(slots, starts, once, once, None), whole(once), hidden)
        self._expected = expected

    def foresee(self, chosen: torch.Tensor) -> None:
        """The tokens that were just chosen, on the device: where plain decoding goes on, the pass that feeds them is
        queued at once, and the host's work for a round costs nothing. If something else is fed after all, what this
        wrote lies beyond its sequence's length, and is written over.
        """
        staged, expected, self._expected = self._staged, self._expected, ()
        if staged is None or not expected or expected[-1] >= len(chosen):
            return
        if staged.program.is_recorded or not self._has_graphs:
            with torch.inference_mode(), on(self.device):
                tokens = chosen if len(expected) == len(chosen) else chosen[self._index(expected)]
                staged.program.run(tokens.clamp(min=0))  # -1 is a row without a token: nobody will go on there
            self._queued, self._staged = Queued(staged, expected, chosen), None

    def _take_queued(self, spans: Spans, hidden: tuple[int, ...]) -> dict[int, int]:
        """Which spans of a pass were computed before anybody asked: their places there. The host knows by now what was
        chosen, and so what was fed."""
        queued, self._queued = self._queued, None
        known = self.ops.known if isinstance(self.ops, DeviceSampling) else None
        if queued is None or known is None or known[0] is not queued.chosen:
            return {}
        staged = queued.staged
        if staged.hidden != hidden or staged.program.work.holder is not staged.program:
            return {}
        fed, tokens, done = known[1].tolist(), spans.tokens.tolist(), {}
        places, ends = {slot: place for place, slot in enumerate(staged.slots)}, accumulate(spans.counts)
        for index, (slot, end) in enumerate(zip(spans.slots, ends, strict=True)):
            place = places.get(slot)
            if place is None or spans.counts[index] != 1 or spans.starts[index] != staged.starts[place]:
                continue
            pages = staged.pages[place]
            if tokens[end - 1] == fed[queued.rows[place]] and self.pages.leases[slot].pages[: len(pages)] == pages:
                done[index] = place
        self._done = staged.program
        return done

    def _score_rest(self, spans: Spans, hidden: Sequence[int], done: Mapping[int, int]) -> Scored:
        """A pass of which some spans are done: those that are not, and all of it together."""
        program, places = self._done, self._index(tuple(done.values()))
        assert program is not None, "something is done, so there is a program that did it"
        ours = program.logits[places], {layer: program.states[layer][places] for layer in hidden}
        rest = [index for index in range(len(spans.slots)) if index not in done]
        if not rest:
            return ours
        firsts = [end - count for end, count in zip(accumulate(spans.counts), spans.counts, strict=True)]
        fed = [firsts[index] + at for index in rest for at in range(spans.counts[index])]
        some = Spans(
            [spans.slots[index] for index in rest],
            [spans.starts[index] for index in rest],
            [spans.counts[index] for index in rest],
            [spans.rows[index] for index in rest],
            spans.tokens[np.asarray(fed)],
            {at: spans.parents[index] for at, index in enumerate(rest) if index in spans.parents},
            later=None if spans.later is None else ([fed.index(place) for place in spans.later[0]], spans.later[1]),
        )
        logits, states = self._score(some, hidden)
        order = [*done, *rest]
        rows = torch.cat([ours[0], logits])[self._index(_back(order, spans.rows))]
        at = self._index(_back(order, spans.counts))
        return rows, {layer: torch.cat([ours[1][layer], states[layer]])[at] for layer in hidden}

    def roller(self, head: EagleHead) -> HeadRoller | None:
        """Lets an EAGLE head that sits on this model guess on by itself."""
        if self.strict:
            return None
        return HeadRoller(head, self._model, graphs=self._has_graphs)

    def view(self, layers: int) -> GpuBackend:
        return FirstLayers(self, layers)


class FirstLayers(SequencesAhead, GpuBackend):
    """A model's first layers as a model of their own, for layer skip: the same weights, cache and slots."""

    def __init__(self, whole: GpuBackend, layers: int) -> None:
        self.__dict__.update(whole.__dict__)  # all of it is shared
        SequencesAhead.__init__(self, whole)
        self.weights = whole.weights._replace(layers=whole.weights.layers[:layers])
        self.info = replace(whole.info, name=f"{whole.info.name}, {layers} layers", num_hidden=0, heads=False)


def _back(order: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Blocks lie in this order: where the entries of block 0 are, of block 1, and so on."""
    first, at = {}, 0
    for block in order:
        first[block] = at
        at += sizes[block]
    return tuple(first[block] + entry for block, size in enumerate(sizes) for entry in range(size))
