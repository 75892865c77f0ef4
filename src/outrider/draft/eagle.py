"""Drafting with an EAGLE head: it reads the target's true hidden states of what was kept, and guesses on from there.

    tokens    t0  t1  t2  t3  t4          the target holds t0 .. t3
    read      (h0,t1) (h1,t2)             entries in the head's cache, below the target's length
    pending                   (h2,t3) (h3,t4)   seen and not read: the next proposal begins with them

As long as nobody wants drafts for a job, its hidden states only wait: what is never read costs next to nothing.
What the head feeds itself lies behind the entries that were read, and counts for nobody: after a round it is as if it
had never been. So a round reads what was kept and one more, never the history.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import cast

from outrider.backends.base import Backend, HeadHost
from outrider.backends.head_base import DeviceRoller, Entries, Head, Judged
from outrider.draft.base import Drafter, DrafterInfo
from outrider.draft.eagle_seat import Given, Queue, Seat
from outrider.draft.growth import DEPTH, LEVEL, Sprout
from outrider.draft.kept_rows import Kept, kept_rows
from outrider.draft.ranked import best_nodes, grow_heads
from outrider.draft.rolling import fill
from outrider.errors import ConfigError, MissingPackageError
from outrider.models.head_spec import EagleSpec
from outrider.models.heads import HeadFile, open_head
from outrider.sampling.branch import OwnRows
from outrider.sampling.ops import Drawing
from outrider.sampling.warp import changes_logits
from outrider.types import Array, Batch, Drafts, Job, Scores, Verdicts

MOST_PENDING = 32  # entries that may wait for a proposal: more are read at once, as long prompts are


class EagleDrafter(Drafter):
    """Trees are ranked as in EAGLE-2 (`draft.ranked`); chains are drawn like those of a draft model."""

    def __init__(self, head: Head, prior: Sequence[float] = ()) -> None:
        """prior: the share of its chains that was kept up to each position, where that was measured."""
        self.head = head
        self.info = DrafterInfo(name="eagle", hidden_layers=tuple(head.hidden), prior=tuple(prior))
        self.seats: dict[int, Seat] = {}
        self._roller = head.roller()
        self._told: set[int] = set()  # jobs whose gap was reported
        self._queue: Queue | None = None

    @property
    def _device(self) -> DeviceRoller | None:
        return cast(DeviceRoller, self._roller) if hasattr(self._roller, "roll_on") else None

    @classmethod
    def load(cls, path: Path | str, target: Backend) -> EagleDrafter:
        assert target.info.heads, f"heads cannot sit on {target.info.name}"
        file = open_head(path)
        if not isinstance(file.spec, EagleSpec):
            raise ConfigError(f"{path} holds Medusa heads; write medusa:{path}", param="draft")
        head: Head | None = target.build_head(file)
        return cls(head or _torch_head(file, cast(HeadHost, target)), file.kept)

    def lag(self, job: Job) -> int:
        """What the target has not read yet: its hidden states are what the head reads."""
        if len(job.tokens) > self.head.context:
            return 0  # it will not read on; `propose` says why
        seat = self._seat(job)
        return max(0, len(job.tokens) - 1 - (0 if seat is None else seat.seen))

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        drafts = Drafts(counts=[], tokens=None)
        rooms = [self._room(job, width, drafts) for job, width in zip(jobs, widths, strict=True)]
        if self._take_queued(jobs, rooms, trees, drafts):
            return drafts
        feeds = [self._feed(job, room, tree, drafts) for job, room, tree in zip(jobs, rooms, trees, strict=True)]
        rooms = [min(room, feed) for room, feed in zip(rooms, feeds, strict=True)]
        self._take_in([job for job, room in zip(jobs, rooms, strict=True) if room])
        if not any(tree and room for tree, room in zip(trees, rooms, strict=True)) and self._roll(jobs, rooms, drafts):
            return drafts
        if self._grow(jobs, rooms, feeds, trees, drafts):
            return drafts
        look = None if self.head.own_rows is None or not all(map(_is_ranked_plainly, jobs)) else self._look
        drafts = grow_heads(self.head.target.ops, jobs, rooms, feeds, trees, self._read, drafts, look=look)
        for job in jobs:
            if job.id in self.seats:
                self.seats[job.id].guesses = None
        return drafts

    def _roll(self, jobs: Sequence[Job], rooms: Sequence[int], drafts: Drafts) -> bool:
        """Chains of a head that guesses on by itself. False: somebody must look, and nothing was read."""
        active, steps = [job for job, room in zip(jobs, rooms, strict=True) if room], max(rooms, default=0)
        drawing = self.head.target.ops.drawing(active, steps) if self._roller is not None and steps else None
        if self._roller is None or drawing is None:
            return False
        seats = [self.seats[job.id] for job in active]
        counts = [len(seat.pending) for seat in seats]
        if not self._roller.roll(self._pending(active, seats, counts), steps, drawing):
            return False
        for seat, count in zip(seats, counts, strict=True):
            self._has_read(seat, count)
        self._fill(jobs, rooms, steps, drawing, drafts)
        return True

    def _fill(self, jobs: Sequence[Job], rooms: Sequence[int], steps: int, drawing: Drawing, drafts: Drafts) -> None:
        """What was drawn as drafts, behind whose verdict the device may go on."""
        fill(drafts, rooms, [room for room in rooms if room], steps, drawing, self.head.target)
        if self._device is None or len(set(rooms)) > 1 or drafts.probs is not None:
            return
        drafts.device.may_be_queued = self._device.may_follow(len(jobs), rooms[0])
        # at the end of an answer what comes next, if something does, has another width, and would be built for that
        is_end = all(job.limit - len(job.tokens) - 1 <= room for job, room in zip(jobs, rooms, strict=True))
        if drafts.device.may_be_queued and not is_end:
            drafts.device.follow = partial(self._follow, list(jobs), drafts)

    def _follow(
        self, jobs: Sequence[Job], drafts: Drafts, accepted: Array, following: Array, states: Mapping[int, Array]
    ) -> Array | None:
        """The verdict is known to the device: it reads what stays, and drafts what will most likely be wanted next."""
        self._drop_queue()
        seats, count = [self.seats[job.id] for job in jobs], drafts.counts[0]
        is_read = all(seat.read == len(job.tokens) - 1 for job, seat in zip(jobs, seats, strict=True))
        num_rows = states[self.info.hidden_layers[0]].shape[0]  # of a pass that reads prompts, too, there are more
        if not is_read or set(drafts.counts) != {count} or num_rows != len(jobs) * (count + 1):
            return None
        drawing = self.head.target.ops.drawing(jobs, count, accepted + 1)
        if drawing is None:
            return None
        slots, firsts, starts = ([getattr(seat, name) for seat in seats] for name in ("slot", "first", "read"))
        judged = Judged(slots, firsts, starts, count, drafts.tokens, accepted, following, states)
        assert self._device is not None, "it is what goes on"
        fused = self._device.roll_on(judged, count, drawing)
        if fused is None:
            return None
        pages = [list(self.head.pages.leases[slot].pages) for slot in slots]
        self._queue = Queue(slots, {job.id: len(job.tokens) for job in jobs}, pages, count, drawing, fused)
        return drawing.drawn

    def _take_queued(self, jobs: Sequence[Job], rooms: Sequence[int], trees: Sequence[bool], drafts: Drafts) -> bool:
        """Whether what was drafted before the host had looked is what is wanted now, by all."""
        queue = self._drop_queue()
        active = [(job, tree) for job, room, tree in zip(jobs, rooms, trees, strict=True) if room]
        if queue is None or not queue.is_known or max(rooms) > queue.steps or any(tree for _, tree in active):
            return False
        if {job.id: len(job.tokens) for job, _ in active} != queue.lengths:
            return False
        leases, size = self.head.pages.leases, self.head.pages.page_size
        for (job, _), slot, pages in zip(active, queue.slots, queue.pages, strict=True):
            used = -(-len(job.tokens) // size)
            if job.slot != slot or leases[slot].pages[:used] != pages[:used]:
                return False
        for job, _ in active:
            seat = self.seats[job.id]
            seat.read, seat.waiting, seat.num_waiting = seat.read + 1, [], 0
            self._report(seat)
        self._fill(jobs, rooms, queue.steps, queue.drawing, drafts)
        return True

    def _drop_queue(self) -> Queue | None:
        """It is over, one way or the other: nothing is written any more that others need to know of."""
        queue, self._queue = self._queue, None
        for slot in [] if queue is None else queue.slots:
            if slot in self.head.pages.leases:
                self.head.pages.leases[slot].written = 0
        return queue

    def _grow(
        self, jobs: Sequence[Job], rooms: Sequence[int], feeds: Sequence[int], trees: Sequence[bool], drafts: Drafts
    ) -> bool:
        """Trees of a head that guesses on by itself, where the likeliest children are wanted. False: somebody must
        look, and nothing was read."""
        active = [index for index, room in enumerate(rooms) if room]
        some = [jobs[index] for index in active]
        if self._device is None or not active or not all(trees[index] for index in active):
            return False
        if any(job.rule == "coupled" and job.params.temperature > 0.0 for job in some):  # noise decides there
            return False
        if self.head.target.ops.drawing(some, 1) is None:
            return False
        levels = min(DEPTH, max(rooms[index] for index in active), 1 + min(feeds[index] for index in active) // LEVEL)
        seats = [self.seats[job.id] for job in some]
        counts = [len(seat.pending) for seat in seats]
        grown = self._device.grow(self._pending(some, seats, counts), levels, LEVEL, [_warp(job) for job in some])
        if grown is None:
            return False
        for seat, count in zip(seats, counts, strict=True):
            self._has_read(seat, count)
        drafts.counts, drafts.steps, tokens = [0] * len(jobs), levels, list[int]()
        for place, index in enumerate(active):
            line, parents = best_nodes(*(values[place].tolist() for values in grown), room=rooms[index])
            drafts.counts[index], drafts.parents[index] = len(line), parents
            tokens += line
        drafts.tokens = self.head.target.ops.integers(tokens)
        return True

    def observe(self, batch: Batch, scores: Scores, verdicts: Verdicts) -> int:
        ready: list[Job] = []
        if self._queue is not None and self._queue.is_known:
            self._drop_queue()  # nobody has asked for it
        for kept in kept_rows(batch, scores, verdicts):
            job = kept.job
            if self.name not in job.drafters or len(job.tokens) > self.head.context:
                continue
            if self._was_read(kept, scores) or not self._sit(kept):
                continue
            seat = self.seats[job.id]
            seat.waiting.append(Given(scores.hidden, kept.rows))
            seat.num_waiting += len(kept.rows)
            # Where drafts were asked for in this round, they most likely will be in the next.
            if self.name in job.wanted or job.width is not None or seat.is_full:
                ready.append(job)
        if self._queue is not None:
            self._queue.is_known = True
        return self._take_in(ready) if ready else 0

    def _was_read(self, kept: Kept, scores: Scores) -> bool:
        """Whether the device has read this already. The last entry counts as waiting until what was drawn behind it is
        taken: if something else is wanted, that begins with its row."""
        queue, job = self._queue, kept.job
        seat = self._seat(job)
        if queue is None or seat is None or seat.num_pending or queue.lengths.get(job.id) != kept.start + 1:
            return False
        first, count = kept.rows[0], len(kept.rows)
        self.head.keep_edges(seat.slot, kept.start, queue.fused[first : first + count])
        seat.read += count - 1
        seat.waiting, seat.num_waiting = [Given(scores.hidden, kept.rows[-1:])], 1
        self._report(seat)
        queue.lengths[job.id] = len(job.tokens)
        return True

    def _take_in(self, jobs: Sequence[Job]) -> int:
        """What waits is pending from here on, and all but the last of many is read. Returns the passes of that."""
        seats = [seat for job in jobs if (seat := self.seats[job.id]).waiting]
        if seats:
            parts = [self.head.pick(*given) for seat in seats for given in seat.waiting]
            features = [one[0] if len(one) == 1 else self.head.join(one) for one in zip(*parts, strict=True)]
            fused = self.head.fuse(features)
            for seat, fresh in zip(seats, _split(fused, [seat.num_waiting for seat in seats]), strict=True):
                start = seat.read + len(seat.pending)
                seat.pending = self.head.join([seat.pending, fresh]) if len(seat.pending) else fresh
                seat.waiting, seat.num_waiting = [], 0
                self.head.keep_edges(seat.slot, start, fresh)
                self._report(seat)
        long = [job for job in jobs if len(self.seats[job.id].pending) > MOST_PENDING]
        if long:
            # The last one waits: its entry lies past the target's length, where pages may be taken away.
            self._read_ahead(long)
        return int(bool(long))

    def _read_ahead(self, jobs: Sequence[Job]) -> None:
        """What is pending but for the last, whose output will be wanted."""
        seats = [self.seats[job.id] for job in jobs]
        counts = [len(seat.pending) - 1 for seat in seats]
        entries = self._pending(jobs, seats, counts)
        if self._device is None or not self._device.read(entries):
            self.head.fill_cache(entries)
        for seat, count in zip(seats, counts, strict=True):
            self._has_read(seat, count)

    def forget(self, job: Job) -> None:
        self.seats.pop(job.id, None)
        self._told.discard(job.id)

    def _room(self, job: Job, width: int, drafts: Drafts) -> int:
        """How much of `width` the head can serve."""
        context = self.head.context
        room = min(width, context - len(job.tokens))
        if width and room <= 0:
            self.seats.pop(job.id, None)  # it cannot come back
            drafts.fallbacks.append((job, f"the answer is past the head's context of {context} tokens"))
            return 0
        seat = self._seat(job)
        if width == 0 or seat is None or seat.seen != len(job.tokens) - 1 or not seat.num_pending:
            return 0
        if room < width:
            drafts.fallbacks.append((job, f"the answer comes to the end of the head's context of {context} tokens"))
        if seat.gap and job.id not in self._told:
            self._told.add(job.id)
            drafts.fallbacks.append((job, "the head has not read the beginning that the target remembered"))
        return room

    def _feed(self, job: Job, room: int, tree: bool, drafts: Drafts) -> int:
        """How many guesses it may feed itself: those there are pages for. A tree is grown beyond its size."""
        if room == 0 or job.slot is None:
            return 0
        for feed in (max(room, LEVEL * (DEPTH - 1)), room) if tree else (room,):
            if self.head.pages.make_room(job.slot, len(job.tokens) + feed):
                return feed
        drafts.fallbacks.append((job, "no page is left for what the head guesses"))
        return 0

    def _seat(self, job: Job) -> Seat | None:
        seat = self.seats.get(job.id)
        return seat if seat is not None and seat.slot == job.slot else None

    def _sit(self, kept: Kept) -> bool:
        """A seat for a job of which `kept` comes next; False where it has that already."""
        slot, start, pages = kept.job.slot, kept.start, self.head.pages
        assert slot is not None, f"job {kept.job.id} took part in a pass without a slot"
        seat = self._seat(kept.job)
        if seat is not None and start <= seat.seen:
            return start == seat.seen
        if start == 0:
            seat = Seat(slot, 0, 0, self.head.nothing())
        elif pages.length(slot, self.head.number) == start and start % pages.page_size == 0:
            seat = Seat(slot, 0, start - 1, self.head.join([self.head.edge(slot, start - 1)]))
        else:
            seat = Seat(slot, start, start, self.head.nothing(), gap=True)
        self.seats[kept.job.id] = seat
        return True

    def _report(self, seat: Seat) -> None:
        """Tell the account of pages what can be found again: entries below the hidden states that are known."""
        length = seat.read + min(1, len(seat.pending))
        pages = self.head.pages
        if not seat.gap and length > pages.length(seat.slot, self.head.number):
            pages.advance(seat.slot, self.head.number, length)

    def _read_pending(self, jobs: Sequence[Job]) -> list[Array]:
        """One pass over what is pending. Returns the outputs, job by job. [n, width] each"""
        seats = [self.seats[job.id] for job in jobs]
        counts = [len(seat.pending) for seat in seats]
        outputs = self.head.read(self._pending(jobs, seats, counts))
        for seat, count in zip(seats, counts, strict=True):
            self._has_read(seat, count)
        return _split(outputs, counts)

    def _pending(self, jobs: Sequence[Job], seats: Sequence[Seat], counts: list[int]) -> Entries:
        """The first so many entries of each that were not read yet."""
        tokens = [
            token
            for job, seat, count in zip(jobs, seats, counts, strict=True)
            for token in job.tokens[seat.read + 1 : seat.read + 1 + count]
        ]
        parts = [seat.pending[:count] for seat, count in zip(seats, counts, strict=True)]
        hidden = parts[0] if len(parts) == 1 else self.head.join(parts)
        firsts, starts = [seat.first for seat in seats], [seat.read for seat in seats]
        return Entries([seat.slot for seat in seats], firsts, starts, counts, tokens, hidden)

    def _has_read(self, seat: Seat, count: int) -> None:
        seat.read += count
        left = seat.pending[count:]
        seat.pending = self.head.join([left]) if len(left) else self.head.nothing()  # the rest need not stay
        self._report(seat)

    def _read(self, sprouts: Sequence[Sprout]) -> Array:
        """One row per tip: after what is pending, or after guesses. [tips, V]"""
        return self.head.logits(self._outputs(sprouts))

    def _look(self, sprouts: Sequence[Sprout]) -> OwnRows:
        """The same, where the likeliest children are all that is wanted."""
        assert self.head.own_rows is not None
        warps = [_warp(sprout.job) for sprout in sprouts for _ in sprout.tips]
        rows, ids = self.head.own_rows(self._outputs(sprouts))
        return OwnRows(rows, warps, ids)

    def _outputs(self, sprouts: Sequence[Sprout]) -> Array:
        """The head's outputs for each tip. [tips, width]"""
        begun = [sprout for sprout in sprouts if sprout.tips != [-1]]
        fresh = [sprout for sprout in sprouts if sprout.tips == [-1]]
        outputs: dict[int, Array] = {}
        if fresh:
            for sprout, output in zip(fresh, self._read_pending([one.job for one in fresh]), strict=True):
                outputs[id(sprout)] = output[-1:]
        if begun:
            outputs.update(self._guess(begun))
        for sprout in sprouts:
            seat, again = self.seats[sprout.job.id], self.head.again(outputs[id(sprout)])
            seat.guesses = again if seat.guesses is None else self.head.join([seat.guesses, again])
        return self.head.join([outputs[id(sprout)] for sprout in sprouts])

    def _guess(self, sprouts: Sequence[Sprout]) -> dict[int, Array]:
        """One pass over tips: each is a token and what its parent's output was."""
        entries = Entries([], [], [], [], [], self.head.nothing())
        hidden, parents = [], {}
        for index, sprout in enumerate(sprouts):
            seat = self.seats[sprout.job.id]
            assert seat.guesses is not None
            entries.slots.append(seat.slot)
            entries.firsts.append(seat.first)
            entries.starts.append(seat.read + len(sprout.fed))
            entries.counts.append(len(sprout.tips))
            entries.tokens += sprout.feed()
            places = [parent + 1 for parent in sprout.fed_parents[-len(sprout.tips) :]]
            hidden.append(seat.guesses[places])
            if sprout.is_tree:
                parents[index] = list(sprout.fed_parents)
        entries.hidden, entries.parents = self.head.join(hidden), parents
        outputs = _split(self.head.read(entries), entries.counts)
        return {id(sprout): output for sprout, output in zip(sprouts, outputs, strict=True)}


def _torch_head(file: HeadFile, target: HeadHost) -> Head:
    try:
        from outrider.backends.eagle_head import EagleHead
    except ImportError as error:
        raise MissingPackageError(
            f"{file.path}: this head needs torch, as all do that are older than EAGLE-3: pip install 'outrider[torch]'",
            param="draft",
        ) from error
    return EagleHead(file, target)


def _split(rows: Array, counts: Sequence[int]) -> list[Array]:
    """Rows in parts of so many."""
    ends = list(accumulate(counts))
    return [rows[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _is_ranked_plainly(job: Job) -> bool:
    """Whether the likeliest children of its rows are wanted, and temperature and min_p are all that shapes them."""
    params = job.params
    if changes_logits(job):
        return False
    if params.temperature == 0.0:
        return True
    is_whole = not params.top_k and params.top_p >= 1.0 and params.typical_p >= 1.0
    return job.rule != "coupled" and is_whole  # noise decides there


def _warp(job: Job) -> tuple[float, float]:
    """What shapes its rows: temperature, and the logarithm of min_p."""
    temperature, min_p = job.params.temperature, job.params.min_p
    if temperature == 0.0:
        return 1.0, -math.inf
    return max(temperature, 1e-30), math.log(min_p) if min_p > 0.0 else -math.inf
