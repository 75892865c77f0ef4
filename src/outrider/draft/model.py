"""Drafting with another model of the same vocabulary.

    draft cache   [ length: tokens it has read, all emitted | ahead: its own drafts, not yet judged ]

After a round the drafts that were not emitted are rewound, so the cache is always a prefix of the job's tokens, and
the next proposal reads only what is new: at most the accepted tokens plus one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.backends.base import Backend, Spans
from outrider.errors import DraftError, RequestError
from outrider.types import Array, Drafts, Job, Plan, Scores, Slot, Verdicts


@dataclass(slots=True)
class Seat:
    """A job's place in the draft model."""

    slot: Slot
    length: int = 0
    ahead: list[int] = field(default_factory=list)


class Step(NamedTuple):
    """One draft pass: the jobs (by index) that drew a token, the tokens, and the rows drawn from (None: one-hot)."""

    owners: list[int]
    tokens: Array
    probs: Array | None


class ModelDrafter:
    """`chunk` is the most tokens it reads of a long prompt in one step.

    A draft that `shares_slots` keeps its state under the target's page ids: what the target remembers of earlier
    sequences, the draft remembers too.
    """

    name = "model"

    def __init__(self, backend: Backend, *, chunk: int = 512, shares_slots: bool = False) -> None:
        self.backend = backend
        self.chunk = chunk
        self.shares_slots = shares_slots
        self.seats: dict[int, Seat] = {}
        self._unseated: set[int] = set()  # jobs it had no room for, so far

    def lag(self, job: Job) -> int:
        if len(job.tokens) > self.backend.info.context or job.id in self._unseated:
            return 0  # it will not read on; `propose` says why
        seat = self.seats.get(job.id)
        if seat is not None:
            known = seat.length
        else:
            known = self.backend.length(job.slot) if self.shares_slots and job.slot is not None else 0
        return max(0, len(job.tokens) - known - self.chunk)  # `propose` reads the last chunk itself

    def propose(self, jobs: Sequence[Job], widths: Sequence[int]) -> Drafts:
        """One draft pass per place of the proposal, for all jobs that still want a token there."""
        drafts = Drafts(counts=[], tokens=None)
        rooms = [self._room(job, width, drafts) for job, width in zip(jobs, widths, strict=True)]
        drafted: list[list[int]] = [[] for _ in jobs]
        steps: list[Step] = []
        while active := [
            b for b, room in enumerate(rooms) if room > len(steps) and b not in drafts.faults and not jobs[b].cancelled
        ]:
            drafting, so_far = [jobs[b] for b in active], [drafted[b] for b in active]
            drawn = self.backend.ops.draft(drafting, so_far, self._read(drafting, so_far))
            for index, fault in drawn.faults.items():
                if isinstance(fault, RequestError):  # what the request did to this row: the target's rows will tell
                    rooms[active[index]] = 0
                else:
                    drafts.faults[active[index]] = DraftError(f"the draft failed: {fault.message}", param=fault.param)
            for b, token in zip(active, drawn.tokens.tolist(), strict=True):
                drafted[b].append(token)
            steps.append(Step(active, drawn.tokens, drawn.probs))
        drafts.steps = len(steps)
        drafts.counts = [len(tokens) for tokens in drafted]
        drafts.tokens = self.backend.ops.integers([token for tokens in drafted for token in tokens])
        if any(step.probs is not None for step in steps):
            drafts.probs = self._rows(steps)
        return drafts

    def _rows(self, steps: Sequence[Step]) -> Array:
        """The rows of all drafts, job after job; they came step after step. [N, V]"""
        ops, vocab_size = self.backend.ops, self.backend.info.vocab_size
        rows = [ops.one_hot(step.tokens, vocab_size) if step.probs is None else step.probs for step in steps]
        came = [(b, place) for place, step in enumerate(steps) for b in step.owners]
        return ops.xp.concat(rows)[ops.integers(sorted(range(len(came)), key=came.__getitem__)), ...]

    def observe(self, plan: Plan, scores: Scores, verdicts: Verdicts) -> int:
        behind = []
        for job in plan.jobs:
            seat = self.seats.get(job.id)
            if seat is not None:
                if seat.ahead:
                    self._settle(job, seat)
                if len(job.tokens) - seat.length <= self.chunk:
                    continue
            if job.width != 0 and not job.done and self.lag(job) > 0:
                behind.append(job)
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
        if len(job.tokens) - seat.length > self.chunk:  # it got its seat only now, with the answer under way
            drafts.fallbacks.append((job, "the draft is still reading the prompt"))
            return 0
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

    def _read(self, jobs: Sequence[Job], drafted: Sequence[Sequence[int]]) -> Array:
        """Feed each job what its seat has not seen, and return one row per job. [B, V]"""
        seats = [self.seats[job.id] for job in jobs]
        starts = [seat.length + len(seat.ahead) for seat in seats]
        fed: list[Sequence[int]] = []
        for job, tokens, seat in zip(jobs, drafted, seats, strict=True):
            if tokens:
                fed.append(tokens[-1:])
                seat.ahead.append(tokens[-1])
            else:
                fed.append(job.tokens[seat.length :])
                seat.length = len(job.tokens)
        scores = self._score(seats, starts, fed, rows=1)
        return scores.logits[:, : self.backend.info.vocab_size]

    def _settle(self, job: Job, seat: Seat) -> None:
        """Keep the drafts that were emitted, rewind the others. The last token stays unread: its row comes next."""
        kept = 0
        for token, emitted in zip(seat.ahead, job.tokens[seat.length : -1], strict=False):
            if token != emitted:
                break
            kept += 1
        seat.length += kept
        if kept < len(seat.ahead):
            self.backend.rewind(seat.slot, seat.length)
        seat.ahead.clear()

    def _catch_up(self, jobs: Sequence[Job]) -> None:
        """Read one more chunk of tokens the draft lags behind, without asking for rows."""
        seats = [self.seats[job.id] for job in jobs]
        starts = [seat.length for seat in seats]
        fed = [job.tokens[seat.length : seat.length + self.chunk] for job, seat in zip(jobs, seats, strict=True)]
        for seat, tokens in zip(seats, fed, strict=True):
            seat.length += len(tokens)
        self._score(seats, starts, fed, rows=0)

    def _score(self, seats: Sequence[Seat], starts: list[int], fed: Sequence[Sequence[int]], rows: int) -> Scores:
        return self.backend.score(
            Spans(
                slots=[seat.slot for seat in seats],
                starts=starts,
                counts=[len(tokens) for tokens in fed],
                rows=[rows] * len(seats),
                tokens=self.backend.ops.integers([token for tokens in fed for token in tokens]),
            )
        )
