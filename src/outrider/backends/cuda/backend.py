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
from outrider.backends.cuda.measuring import MeasuredPasses
from outrider.backends.cuda.passes import STRICT_ROWS, Scored, Staged, whole
from outrider.backends.cuda.sampling import DeviceSampling, Verdict
from outrider.backends.eagle_head import EagleHead
from outrider.backends.paged import SequencesAhead
from outrider.backends.torch_common import on
from outrider.kv.pages import Page, Pages
from outrider.models.base import ModelFile
from outrider.types import Scores


class Queued(NamedTuple):
    """A pass that runs before anybody asked: of the token that follows in each slot, and of what was drawn to come
    after it."""

    staged: Staged  # starts are those that nothing was kept for
    rows: tuple[int, ...]  # of the verdict that it was fed, one for each of its slots
    verdict: Verdict

    @property
    def width(self) -> int:
        """Tokens of each slot."""
        return 1 if self.verdict.drawn is None else 1 + self.verdict.drawn.shape[1]


class Standing(NamedTuple):
    """A queued pass with drafts, which the next one may be moved on from: nothing need be written down, then."""

    queued: Queued
    num_staged: int  # by then
    pages: list[list[Page]]  # as far as it may be moved


class GpuBackend(MeasuredPasses):
    """A model and its sequences. A draft may share the target's `pages`: its slots are the target's, then.

    What most likely comes next, it writes down while the device is busy; and it queues that before anybody has asked,
    where it is told that a request goes on as before.
    """

    def __init__(self, file: ModelFile, pages: Pages, **options: Any) -> None:
        super().__init__(file, pages, **options)
        self._expected: tuple[int, ...] = ()  # spans of the last pass after which more may run unasked
        self._judged: tuple[Spans, tuple[int, ...]] | None = None  # that pass, where it had drafts
        self._queued: Queued | None = None
        self._done: Queued | None = None  # that was queued and is asked for now
        self._standing: Standing | None = None
        if isinstance(self.ops, DeviceSampling):
            self.ops.foresee = self.foresee
            self.ops.may_defer = not self.strict
            self.info = replace(self.info, prelaunch=True)

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        self._expected, self._judged = (), None
        return super().score(spans, hidden)

    def _score_and_look(self, spans: Spans, hidden: tuple[int, ...]) -> Scored:
        was_queued = self._queued is not None
        done = self._take_queued(spans, hidden)
        if len(done) < len(spans.slots):
            self._standing = None  # some are elsewhere
        if isinstance(self.ops, DeviceSampling):
            self.ops.follows, self.ops.waits = len(done) == len(spans.slots), was_queued and not done
        scored = self._score_rest(spans, hidden, done) if done else self._score(spans, hidden)
        self._look_ahead(spans, hidden)
        return scored

    def _forget(self) -> None:
        super()._forget()
        self._queued = None

    def _look_ahead(self, spans: Spans, hidden: tuple[int, ...]) -> None:
        """After single tokens mostly the next ones follow: their pass is written down while the device is busy. Drafts
        mostly follow drafts; when those are drawn, their pass will be written down."""
        count = len(spans.slots)
        if spans.parents or sum(spans.counts) != sum(spans.rows):
            return
        if spans.later is not None:
            if len(spans.goes_on) == count:
                self._judged = spans, hidden
            return
        if sum(spans.counts) != count:
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

    def foresee(self, verdict: Verdict) -> None:
        """What the device knows by now: where requests go on as before, the pass that feeds it is queued at once, and
        the host's work for a round costs nothing. If something else is fed after all, what this wrote lies beyond its
        sequence's length, and is written over.
        """
        with torch.inference_mode(), on(self.device):
            if verdict.accepted is not None and verdict.drawn is not None:
                self._queue_drafts(verdict, verdict.accepted, verdict.drawn)
            else:
                self._queue_single(verdict)

    def _queue_single(self, verdict: Verdict) -> None:
        staged, expected, self._expected = self._staged, self._expected, ()
        chosen = verdict.following
        if staged is None or not expected or expected[-1] >= len(chosen):
            return
        if staged.program.is_recorded or not self._has_graphs:
            tokens = chosen if len(expected) == len(chosen) else chosen[self._index(expected)]
            staged.program.run(tokens.clamp(min=0))  # -1 is a row without a token: nobody will go on there
            self._queued, self._staged = Queued(staged, expected, verdict), None

    def _queue_drafts(self, verdict: Verdict, accepted: torch.Tensor, drawn: torch.Tensor) -> None:
        judged, self._judged = self._judged, None
        if judged is None or drawn.device != self.weights.embedding.device:
            return
        (spans, hidden), width = judged, 1 + drawn.shape[1]
        most = max(spans.counts)
        ends = [start + most + width for start in spans.starts]  # if all drafts stay
        if len(ends) * width > GRAPH_ROWS[-1] or max(ends) > self.info.context:
            return
        if not all(self.pages.make_room(slot, end) for slot, end in zip(spans.slots, ends, strict=True)):
            return
        tokens = torch.cat([verdict.following[:, None].int(), drawn.int()], dim=1).flatten().clamp(min=0)
        starts, widths = [start + 1 for start in spans.starts], [width] * len(ends)
        fed = Spans(spans.slots, starts, widths, widths, None)
        standing, held = self._still_stands(fed, ends, hidden), [self.pages.leases[slot].pages for slot in fed.slots]
        if standing is not None:
            known = standing.pages
            staged = standing.queued.staged._replace(starts=starts, pages=[list(ids) for ids in held])
            staged.program.run_on(tokens, accepted + 1)  # it stands where the verdict before this one put it
        else:
            size = self.pages.page_size
            spare = min(len(ids) * size - end for ids, end in zip(held, ends, strict=True))
            known = [ids[: (end + spare) // size] for ids, end in zip(held, ends, strict=True)]
            staged = self._stage(fed, whole(widths), hidden, ahead=most - 1 + spare)
            staged.program.run(tokens, by=accepted)
            self._record(staged.program)
        for slot, end in zip(spans.slots, ends, strict=True):
            self.pages.leases[slot].written = max(end, self.pages.leases[slot].written)
        self._queued = Queued(staged, tuple(range(len(ends))), verdict)
        self._standing = Standing(self._queued, staged.program.num_staged, known)

    def _still_stands(self, spans: Spans, ends: Sequence[int], hidden: tuple[int, ...]) -> Standing | None:
        """What was queued last, if it is the pass that is judged now, and `spans` come behind it on pages it knows."""
        standing, size = self._standing, self.pages.page_size
        if standing is None or standing.queued is not self._done:
            return None
        staged = standing.queued.staged
        if staged.program.num_staged != standing.num_staged or staged.hidden != hidden:
            return None
        if staged.slots != spans.slots or [piece.size for piece in staged.pieces] != spans.counts:
            return None
        for slot, pages, end in zip(spans.slots, standing.pages, ends, strict=True):
            used = -(-end // size)
            if len(pages) < used or self.pages.leases[slot].pages[:used] != pages[:used]:
                return None
        return standing

    def _take_queued(self, spans: Spans, hidden: tuple[int, ...]) -> dict[int, int]:
        """Which spans of a pass were computed before anybody asked: their places there. The host knows by now what was
        decided, and so what was fed."""
        queued, self._queued, self._done = self._queued, None, None
        known = self.ops.known if isinstance(self.ops, DeviceSampling) else None
        if queued is None:
            return {}
        staged, width, size = queued.staged, queued.width, self.pages.page_size
        if width > 1:
            for slot in staged.slots:
                if slot in self.pages.leases:
                    self.pages.leases[slot].written = 0
        if known is None or known.key is not queued.verdict.following:
            return {}
        if staged.hidden != hidden or staged.program.work.holder is not staged.program:
            return {}
        if width > 1 and spans.source is not queued.verdict.drawn:  # something else is to be judged
            return {}
        following, accepted = known.following.tolist(), known.accepted.tolist()
        tokens, done = spans.tokens.tolist(), {}
        places, ends = {slot: place for place, slot in enumerate(staged.slots)}, accumulate(spans.counts)
        for index, (slot, end) in enumerate(zip(spans.slots, ends, strict=True)):
            place, count = places.get(slot), spans.counts[index]
            if place is None or not 1 <= count <= width or spans.rows[index] != count or index in spans.parents:
                continue
            row = queued.rows[place]
            start = staged.starts[place] + accepted[row]
            if spans.starts[index] != start or tokens[end - count] != following[row]:
                continue
            used = -(-(start + count) // size)
            if self.pages.leases[slot].pages[:used] == staged.pages[place][:used]:
                done[index] = place
        self._done = queued
        return done

    def _score_rest(self, spans: Spans, hidden: Sequence[int], done: Mapping[int, int]) -> Scored:
        """A pass of which some spans are done: those that are not, and all of it together."""
        queued = self._done
        assert queued is not None, "something is done, so it was queued"
        program, width = queued.staged.program, queued.width
        places = self._index(
            tuple(place * width + row for index, place in done.items() for row in range(spans.counts[index]))
        )
        ours = program.logits[places], program.copied(places) if hidden else {}
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
            later=self._part(spans.later, fed),
        )
        logits, states = self._score(some, hidden)
        order = [*done, *rest]
        rows = torch.cat([ours[0], logits])[self._index(_back(order, spans.rows))]
        at = self._index(_back(order, spans.counts))
        return rows, {layer: torch.cat([ours[1][layer], states[layer]])[at] for layer in hidden}

    def _part(self, later: tuple[Sequence[int], Any] | None, fed: Sequence[int]) -> tuple[list[int], Any] | None:
        """Of tokens that only the device knows, those which are still to be fed."""
        at = {place: new for new, place in enumerate(fed)}
        if later is None or not any(place in at for place in later[0]):
            return None
        stay = tuple(number for number, place in enumerate(later[0]) if place in at)
        return [at[later[0][number]] for number in stay], later[1][self._index(stay)]

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
