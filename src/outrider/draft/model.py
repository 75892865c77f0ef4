"""Drafting with another model of the same vocabulary.

    draft cache   [ length: tokens it has read, all emitted | ahead: its own drafts, not yet judged ]

After a round the drafts that were not emitted are rewound, so the cache is always a prefix of the job's tokens, and
the next proposal reads only what is new: at most the accepted tokens plus one. With run-ahead it may go on behind its
own drafts, as if they were emitted already; when they are, nothing is rewound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, cast

from outrider.backends.base import Backend, Chains, Rolled, Rolling, Spans
from outrider.draft.base import Drafter, DrafterInfo
from outrider.draft.growth import Sprout, grow
from outrider.draft.join import Part, join
from outrider.draft.rolling import fill, roll
from outrider.sampling.ops import Drawing
from outrider.types import Array, Batch, Drafts, Job, Scores, Slot, Verdicts

MOST_WEIGHED = 64 * 2**20  # numbers of rows that may wait for a verdict while the next are drawn
FEW = 16  # tokens that a job may have unread at any time: what a round emitted


@dataclass(slots=True)
class Seat:
    """A job's place in the draft model."""

    slot: Slot
    length: int = 0
    ahead: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # of those ahead, when they are a tree: places among them, or -1


class Queue(NamedTuple):
    """What the device drafts while the host finds out how the round before ended."""

    lengths: dict[int, int]  # of jobs' tokens, by id: those it goes on behind
    drawing: Drawing
    rolled: Rolled


class Rolls(NamedTuple):
    """Chains that a model drafted by itself: all but the last token of each was read by it, unless others had more."""

    ids: list[int]  # of jobs, in the order of the drafts
    steps: dict[int, int]  # tokens drawn for each of those that took part, by id
    drafts: Drafts


class ModelDrafter(Drafter):
    """`chunk` is the most tokens of prompts it reads in one step, of all jobs together.

    A draft that `shares_slots` keeps its state under the target's page ids: what the target remembers of earlier
    sequences, the draft remembers too.
    """

    method = "model"

    def __init__(self, backend: Backend, *, chunk: int = 512, shares_slots: bool = False) -> None:
        self.info = DrafterInfo(name=self.method, run_ahead=backend.info.max_rewind is None)
        self.backend = backend
        self.chunk = chunk
        self.shares_slots = shares_slots
        self.seats: dict[int, Seat] = {}
        self._unseated: set[int] = set()  # jobs it had no room for, so far
        self._budget = chunk  # tokens of prompts it may still read in this step
        self._rolled: list[Rolls] = []  # what it drafted by itself in this round
        self._queue: Queue | None = None
        self._assumed: dict[int, int] = {}  # drafts it took for emitted while it ran ahead in this round, by job id

    @property
    def profile_name(self) -> str:
        return f"{self.name}:{self.backend.info.name}"

    def lag(self, job: Job) -> int:
        if len(job.tokens) > self.backend.info.context or job.id in self._unseated:
            return 0  # it will not read on; `propose` says why
        seat = self.seats.get(job.id)
        if seat is not None:
            known = seat.length
        else:
            known = self.backend.length(job.slot) if self.shares_slots and job.slot is not None else 0
        return max(0, len(job.tokens) - known - self.chunk)  # `propose` reads the last chunk itself

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        """One draft pass per level of the proposals, for all jobs that still want a token there."""
        drafts = Drafts(counts=[], tokens=None)
        self._budget = self.chunk
        for job in jobs:
            self._drop_ahead(job)
        rooms = [self._room(job, width, drafts) for job, width in zip(jobs, widths, strict=True)]
        branching = [tree and self.backend.info.trees for tree in trees]
        if not any(branching) and hasattr(self.backend, "roll"):
            chains = self._propose_chains(jobs, rooms)
            if chains is not None:
                chains.fallbacks = drafts.fallbacks
                return chains
        grow(self.backend.ops, jobs, rooms, branching, self._read, drafts)
        return drafts

    def _propose_chains(self, jobs: Sequence[Job], rooms: Sequence[int]) -> Drafts | None:
        """Chains of a model that goes on by itself: what it began behind the last verdict, and the others now. None
        where somebody must look."""
        parts: list[Part] = []
        queue, self._queue = self._queue, None
        members = [] if queue is None else self._still_good(queue, jobs, rooms)
        if queue is not None and members:
            wanted = {jobs[index].id: rooms[index] for index in members}
            taken = Drafts(counts=[], tokens=None)
            counts = [wanted.get(one, 0) for one in queue.lengths]
            fill(taken, [rooms[index] for index in members], counts, queue.rolled.steps, queue.drawing, self.backend)
            parts.append(Part(members, taken))
        rest = [index for index, room in enumerate(rooms) if room and index not in members]
        if rest:
            some, widths, fresh = [jobs[index] for index in rest], [rooms[index] for index in rest], Drafts([], None)
            if not self._roll(some, widths, fresh):
                if not members:
                    return None
                grow(self.backend.ops, some, widths, [False] * len(rest), self._read, fresh)
            parts.append(Part(rest, fresh))
        whole = join(self.backend.ops, len(jobs), parts)
        drawn = [part for part in parts if part.drafts.device.drawn_from]
        if len(drawn) == len(parts):
            whole.device.drawn_from = self.backend.info.vocab_size
        steps = {jobs[index].id: part.drafts.steps for part in drawn for index in part.members}
        self._note_rolled(jobs, steps, whole)
        return whole

    def _roll(self, jobs: Sequence[Job], rooms: Sequence[int], drafts: Drafts) -> bool:
        """What it drafts is known after the round."""
        active = [job for job, room in zip(jobs, rooms, strict=True) if room]
        seats = [self.seats[job.id] for job in active]
        starts = [seat.length + len(seat.ahead) for seat in seats]
        fed = [job.tokens[start:] for job, start in zip(active, starts, strict=True)]
        return roll(self.backend, jobs, rooms, self._spans(seats, starts, fed, [1] * len(seats)), drafts)

    def _note_rolled(self, jobs: Sequence[Job], steps: dict[int, int], drafts: Drafts) -> None:
        """What was drafted is known after the round; and where the device can, it goes on before that."""
        if not steps:
            return
        for job in jobs:
            if job.id in steps:
                self.seats[job.id].length = len(job.tokens)
        self._rolled.append(Rolls([job.id for job in jobs], steps, drafts))
        is_small = drafts.probs is None or math.prod(drafts.probs.shape) <= MOST_WEIGHED
        if len(steps) == len(jobs) and is_small:
            drafts.device.follow, drafts.device.may_be_queued = partial(self._follow, list(jobs), drafts), True

    def _follow(
        self, jobs: Sequence[Job], drafts: Drafts, accepted: Array, following: Array, _: Mapping[int, Array]
    ) -> Array | None:
        """The verdict is known to the device: it drafts what will most likely be wanted next."""
        steps, seats = max(drafts.counts), [self.seats[job.id] for job in jobs]
        chains = Chains(
            [seat.slot for seat in seats],
            [len(job.tokens) for job in jobs],
            [job.tokens[-1] for job in jobs],
            drafts.counts,
            drafts.tokens,
            accepted,
            following,
        )
        drawing = self.backend.ops.drawing(jobs, steps, accepted + 1)
        rolled = None if drawing is None else cast(Rolling, self.backend).roll_on(chains, steps, drawing)
        if drawing is None or rolled is None:
            return None
        self._queue = Queue({job.id: len(job.tokens) for job in jobs}, drawing, rolled)
        return drawing.drawn

    def _still_good(self, queue: Queue, jobs: Sequence[Job], rooms: Sequence[int]) -> list[int]:
        """For whom what was drafted before the host had looked is what is wanted now."""
        members = [
            index
            for index, (job, room) in enumerate(zip(jobs, rooms, strict=True))
            if 0 < room <= queue.rolled.steps and queue.lengths.get(job.id) == len(job.tokens)
        ]
        ids = [jobs[index].id for index in members]
        if not members or [one for one in queue.lengths if one in ids] != ids:
            self._drop(queue)
            return []
        lengths = {self.seats[jobs[index].id].slot: len(jobs[index].tokens) for index in members}
        return members if cast(Rolling, self.backend).arrive(queue.rolled, lengths) else []

    def reserve_ahead(self, job: Job, length: int) -> bool:
        """While both threads work no pages are taken, so they are taken before. Only shared ones can be short."""
        return not self.shares_slots or job.slot is None or self.backend.reserve(job.slot, length)

    def propose_ahead(self, jobs: Sequence[Job], assumed: Sequence[int], widths: Sequence[int]) -> Drafts:
        """What would follow. The jobs are copies, whose last `assumed[b]` tokens are drafts that are not judged yet."""
        drafts = Drafts(counts=[], tokens=None)
        self._look_at_rolled()
        self._assumed, self._budget = {job.id: count for job, count in zip(jobs, assumed, strict=True)}, self.chunk
        rooms = [
            self._room(job, width, drafts) if job.id in self.seats else 0
            for job, width in zip(jobs, widths, strict=True)
        ]
        if not hasattr(self.backend, "roll") or not self._roll(jobs, rooms, drafts):
            grow(self.backend.ops, jobs, rooms, [False] * len(jobs), self._read, drafts)
            return drafts
        for job, proposal in zip(jobs, drafts.proposals(), strict=True):
            if proposal:
                seat = self.seats[job.id]
                self._note_read(job, seat)
                self._put_ahead(seat, proposal[:-1])
        return drafts

    def _drop(self, queue: Queue) -> None:
        self._queue = None
        cast(Rolling, self.backend).drop(queue.rolled)

    def observe(self, batch: Batch, scores: Scores, verdicts: Verdicts) -> int:
        if self._queue is not None:
            self._check_queue(self._queue, batch, verdicts)
        self._look_at_rolled()
        behind = []
        for job in batch.jobs:
            if self.name not in job.drafters:
                continue
            seat = self.seats.get(job.id)
            if seat is not None:
                if seat.ahead:
                    self._settle(job, seat)
                if len(job.tokens) - seat.length <= self.chunk:
                    continue
            if (job.width or self.name in job.wanted) and not job.done and self.lag(job) > 0:
                behind.append(job)
        self._assumed = {}
        seated = [job for job in behind if self._seat(job) is not None]
        if seated:
            self._catch_up(seated)
        return 1 if seated else 0

    def forget(self, job: Job) -> None:
        self._unseated.discard(job.id)
        seat = self.seats.pop(job.id, None)
        if seat:
            self.backend.close(seat.slot)

    def _room(self, job: Job, width: int, drafts: Drafts) -> int:
        """How much of `width` this draft can serve."""
        if width == 0:
            return 0
        # The last drafted token is never fed: a proposal of n tokens puts n - 1 of them into the draft's cache.
        info = self.backend.info
        room = info.context - len(job.tokens) + 1
        if room <= 0:
            self.forget(job)  # it cannot come back: others may use its place
            drafts.fallbacks.append((job, f"the answer is past the draft's context of {info.context} tokens"))
            return 0
        seat = self._seat(job)
        if seat is None:
            drafts.fallbacks.append((job, "the draft has no room for another sequence"))
            return 0
        unread = len(job.tokens) - seat.length - len(seat.ahead)
        if unread > max(FEW, self._budget):  # its turn comes; or it got its seat only now, with the answer under way
            drafts.fallbacks.append((job, "the draft is still reading the prompt"))
            return 0
        self._budget -= unread if unread > FEW else 0
        if room < width:
            drafts.fallbacks.append(
                (job, f"the answer comes to the end of the draft's context of {info.context} tokens")
            )
        if info.max_rewind is not None and info.max_rewind + 1 < width:
            drafts.fallbacks.append((job, f"the draft can rewind only {info.max_rewind} tokens"))
            room = min(room, info.max_rewind + 1)
        return min(width, room)

    def _seat(self, job: Job) -> Seat | None:
        seat = self.seats.get(job.id)
        if seat is None:
            slot = job.slot if self.shares_slots else self._open(job)
            if slot is None:
                self._unseated.add(job.id)
                return None
            self._unseated.discard(job.id)
            seat = self.seats[job.id] = Seat(slot, self.backend.length(slot))
        return seat

    def _open(self, job: Job) -> Slot | None:
        return self.backend.open(job.tokens, min(job.limit, self.backend.info.context), job.request.tenant)

    def _read(self, sprouts: Sequence[Sprout]) -> Array:
        """Feed each job what its seat has not seen, and return one row per tip. [tips, V]"""
        seats = [self.seats[sprout.job.id] for sprout in sprouts]
        starts = [seat.length + len(seat.ahead) for seat in seats]
        fed: list[Sequence[int]] = []
        rows = [len(sprout.tips) for sprout in sprouts]
        parents: dict[int, list[int]] = {}
        for index, (sprout, seat) in enumerate(zip(sprouts, seats, strict=True)):
            if not sprout.tokens:
                fed.append(sprout.job.tokens[starts[index] :])
                self._note_read(sprout.job, seat)
                continue
            if sprout.is_tree:
                fed.append(sprout.feed())
                parents[index] = seat.parents = sprout.fed_parents
            else:
                fed.append(sprout.tokens[-1:])
            seat.ahead += fed[-1]
        scores = self.backend.score(self._spans(seats, starts, fed, rows, parents))
        return scores.logits[:, : self.backend.info.vocab_size]

    def _check_queue(self, queue: Queue, batch: Batch, verdicts: Verdicts) -> None:
        """The host knows the verdict now, which the device went on behind. It is good for the next proposal only."""
        if not self._rolled or {job.id for job in batch.decode} != queue.lengths.keys():
            self._drop(queue)
            return
        for job, accepted in zip(batch.decode, verdicts.accepted.tolist(), strict=True):
            queue.lengths[job.id] += accepted + 1

    def _note_read(self, job: Job, seat: Seat) -> None:
        """All of the job's tokens are read; the last of them may be assumed."""
        start, emitted = seat.length + len(seat.ahead), len(job.tokens) - self._assumed.get(job.id, 0)
        if not seat.ahead:
            seat.length = emitted
        seat.ahead += job.tokens[max(start, emitted) :]

    def _put_ahead(self, seat: Seat, drafted: Sequence[int]) -> None:
        """These were drafted and read; who goes as far as the widest has read more. The last of a proposal is never one
        of them: who runs ahead begins with its row."""
        seat.ahead += drafted
        held = seat.length + len(seat.ahead)
        if self.backend.length(seat.slot) > held:
            self.backend.rewind(seat.slot, held)

    def _look_at_rolled(self) -> None:
        """By now the host can know what a model drafted that went on by itself: all but the last one it has read."""
        rolled, self._rolled = self._rolled, []
        for ids, steps, drafts in rolled:
            for job_id, proposal in zip(ids, drafts.proposals(), strict=True):
                seat = self.seats.get(job_id)
                if seat is not None and job_id in steps:
                    self._put_ahead(seat, proposal[:-1])

    def _settle(self, job: Job, seat: Seat) -> None:
        """Keep the drafts that were emitted, drop the others. The last token stays unread: its row comes next."""
        emitted = job.tokens[seat.length :]
        if job.id in self._assumed and emitted == seat.ahead[: len(emitted)]:  # what it drafted ahead comes next
            seat.length += len(emitted)
            del seat.ahead[: len(emitted)]
            return
        kept = _path(seat, emitted[:-1])
        start = seat.length
        seat.length += len(kept)
        if seat.parents and kept != list(range(len(kept))):
            places = {seat.slot: [start + node for node in kept]}
            self.backend.keep([seat.slot], [seat.length], places)
        elif len(kept) < len(seat.ahead):
            self.backend.rewind(seat.slot, seat.length)
        seat.ahead.clear()
        seat.parents = []

    def _drop_ahead(self, job: Job) -> None:
        """What was drafted ahead is not used: the job's last token must be read again."""
        seat = self.seats.get(job.id)
        if seat is not None and (seat.ahead or seat.length >= len(job.tokens)):
            seat.length = min(seat.length, len(job.tokens) - 1)
            self.backend.rewind(seat.slot, seat.length)
            seat.ahead.clear()

    def _catch_up(self, jobs: Sequence[Job]) -> None:
        """Read one more chunk of the tokens the draft lags behind, the first job's first, without asking for rows."""
        seats = [self.seats[job.id] for job in jobs]
        starts = [seat.length for seat in seats]
        fed, left = [], self.chunk
        for job, seat in zip(jobs, seats, strict=True):
            fed.append(job.tokens[seat.length : seat.length + left])
            left -= len(fed[-1])
        reading = [index for index, tokens in enumerate(fed) if tokens]
        seats, starts, fed = [seats[at] for at in reading], [starts[at] for at in reading], [fed[at] for at in reading]
        for seat, tokens in zip(seats, fed, strict=True):
            seat.length += len(tokens)
        self.backend.score(self._spans(seats, starts, fed, [0] * len(seats)))

    def _spans(
        self,
        seats: Sequence[Seat],
        starts: list[int],
        fed: Sequence[Sequence[int]],
        rows: list[int],
        parents: Mapping[int, Sequence[int]] | None = None,
    ) -> Spans:
        return Spans(
            slots=[seat.slot for seat in seats],
            starts=starts,
            counts=[len(tokens) for tokens in fed],
            rows=rows,
            tokens=self.backend.ops.fed([token for tokens in fed for token in tokens]),
            parents=parents or {},
        )


def _path(seat: Seat, emitted: Sequence[int]) -> list[int]:
    """Which of the tokens it read ahead were emitted, in order."""
    if not seat.parents:
        count = 0
        for token, read in zip(emitted, seat.ahead, strict=False):
            if token != read:
                break
            count += 1
        return list(range(count))
    path: list[int] = []
    for token in emitted:
        last = path[-1] if path else -1
        for place in range(last + 1, len(seat.ahead)):
            if seat.parents[place] == last and seat.ahead[place] == token:
                path.append(place)
                break
        else:
            break
    return path
