"""Drafting with a model of another vocabulary, by its text: what it writes is re-encoded with the target's tokenizer.

The draft writes greedily in its own tokens, and the target's tokens for that text are offered as certain (one-hot). It
needs no shared tokens. Its cache is kept by bytes: after a round it holds a beginning of the emitted text, and the next
proposal reads only what is new.

    emitted text   | The rider rode ahead.
    draft cache    | The| rider| ro|            length 3: its tokens that the emitted text begins with
    rest           |               |de|         read so far, not in the cache: begins the next proposal
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.backends.base import Backend, Spans
from outrider.draft.base import Drafter, DrafterInfo
from outrider.draft.vocab import GROWTH, SPARE, Translation, end_reason, past_reason, split_text
from outrider.errors import DraftError, VocabularyError
from outrider.types import Array, Batch, Drafts, Job, Scores, Slot, Verdicts


@dataclass(slots=True)
class Seat:
    """A job's place in the draft model."""

    slot: Slot
    limit: int  # draft tokens it has room for
    length: int = 0  # draft tokens in the cache that stand for emitted text
    ahead: list[int] = field(default_factory=list)  # after those: its own, not yet judged
    read: int = 0  # of the job's tokens, those that are in the cache or in `rest`
    rest: bytes = b""


@dataclass(slots=True)
class Draft:
    """What the draft writes for a job in this round."""

    index: int  # of the job
    seat: Seat
    fed: list[int]  # what it reads next
    width: int
    passes: int  # that it may still make
    text: bytes = b""
    proposal: list[int] = field(default_factory=list)  # the text so far in the target's tokens


class ReencodeDrafter(Drafter):
    """`chunk` is the most tokens it reads of a long prompt in one step."""

    info = DrafterInfo(name="reencode")

    def __init__(self, backend: Backend, translation: Translation, *, chunk: int = 512) -> None:
        info = backend.info
        if translation.draft.size != info.vocab_size:
            raise VocabularyError(
                f"the translation is for a draft of {translation.draft.size} tokens, {info.name} has "
                f"{info.vocab_size}; build it with draft_size={info.vocab_size}",
                param="draft",
            )
        self.backend = backend
        self.translation = translation
        self.chunk = chunk
        self.seats: dict[int, Seat] = {}
        self._unseated: set[int] = set()  # jobs it had no room for, so far
        self._past: dict[int, int] = {}  # jobs that have outgrown it -> the draft tokens there was room for
        said = {other: token for token, other in translation.shared.items()}
        self._ends = {eos: said[eos] for eos in info.eos_ids if eos in said}  # the draft's EOS -> the target's

    def lag(self, job: Job) -> int:
        if job.id in self._past or job.id in self._unseated:
            return 0  # it will not read on; `propose` says why
        seat = self.seats.get(job.id)
        return max(0, len(job.tokens) - (seat.read if seat else 0) - self.chunk)

    def propose(self, jobs: Sequence[Job], widths: Sequence[int], trees: Sequence[bool]) -> Drafts:
        """One draft pass per draft token, for all jobs that still want one."""
        drafts = Drafts(counts=[], tokens=None)
        started = [
            self._start(index, job, width, drafts) for index, (job, width) in enumerate(zip(jobs, widths, strict=True))
        ]
        writing = [draft for draft in started if draft is not None]
        while writing := [draft for draft in writing if draft.passes > 0 and not jobs[draft.index].cancelled]:
            drafts.steps += 1
            for draft, token in zip(writing, self._write(writing, drafts), strict=True):
                self._take(draft, token)
        proposals = [[] if draft is None or draft.index in drafts.faults else draft.proposal for draft in started]
        drafts.counts = [len(proposal) for proposal in proposals]
        drafts.tokens = np.asarray([token for proposal in proposals for token in proposal], dtype=np.int64)
        return drafts

    def observe(self, batch: Batch, scores: Scores, verdicts: Verdicts) -> int:
        behind: list[tuple[Seat, list[int]]] = []
        for job in batch.jobs:
            if self.name not in job.drafters:
                continue
            seat = self.seats.get(job.id)
            if seat is not None and seat.ahead:
                self._settle(job, seat)
            if (job.width or self.name in job.wanted) and not job.done and self.lag(job) > 0:
                seat = self._seat(job)
                portion = None if seat is None else self._portion(job, seat)
                if seat is not None and portion is not None:
                    behind.append((seat, portion))
        if behind:
            self._score([seat for seat, _ in behind], [portion for _, portion in behind], rows=0)
        return 1 if behind else 0

    def forget(self, job: Job) -> None:
        self._unseated.discard(job.id)
        self._past.pop(job.id, None)
        seat = self.seats.pop(job.id, None)
        if seat:
            self.backend.close(seat.slot)

    def _start(self, index: int, job: Job, width: int, drafts: Drafts) -> Draft | None:
        """What the draft begins a job's round with; None, and the reason in `drafts`, where it cannot."""
        if width == 0:
            return None
        seat = None if job.id in self._past else self._seat(job)
        if seat is not None and len(job.tokens) - seat.read > self.chunk:
            drafts.fallbacks.append((job, "the draft is still reading the prompt"))
            return None
        fed = [] if seat is None else self._spell(job, seat, len(job.tokens))
        if seat is not None and seat.length + len(fed) > seat.limit:
            self._outgrow(job, seat)
        if job.id in self._past:
            drafts.fallbacks.append((job, past_reason(self._past[job.id])))
            return None
        if seat is None:
            drafts.fallbacks.append((job, "the draft has no room for another sequence"))
            return None
        # The last token it writes is never fed: n passes put n - 1 of its own into the cache.
        passes = min(width, seat.limit - seat.length - len(fed) + 1)
        if passes < width:
            drafts.fallbacks.append((job, end_reason(seat.limit)))
        most = self.backend.info.max_rewind
        if most is not None and most + 1 < width:
            drafts.fallbacks.append((job, f"the draft can rewind only {most} tokens"))
        if most is not None:
            passes = min(passes, most + 1)
        seat.read, seat.rest = len(job.tokens), b""
        return Draft(index, seat, fed, width, passes)

    def _write(self, writing: Sequence[Draft], drafts: Drafts) -> list[int]:
        """One pass: the token the draft finds likeliest for each."""
        for draft in writing:
            if draft.text:
                draft.seat.ahead += draft.fed
        logits = self._score([draft.seat for draft in writing], [draft.fed for draft in writing], rows=1)
        xp = self.backend.ops.xp
        logits = logits[:, : self.backend.info.vocab_size]
        sound = xp.isfinite(xp.max(logits, axis=1)).tolist()
        for draft, is_sound in zip(writing, sound, strict=True):
            if not is_sound:
                draft.passes = 0
                drafts.faults[draft.index] = DraftError(
                    "the draft failed: its logits are not finite; check its weights and number format", param="logits"
                )
        tokens: list[int] = logits.argmax(-1).tolist()
        return tokens

    def _take(self, draft: Draft, token: int) -> None:
        """The draft goes on by a token; the proposal is what its text means to the target so far."""
        draft.passes -= 1
        draft.fed = [token]
        piece = self.translation.draft.pieces[token]
        if not piece:  # the text ends here, so its last token is what it is
            ending = [self._ends[token]] if token in self._ends else []
            draft.proposal = (self._encode(draft.text) + ending)[: draft.width]
            draft.passes = 0
            return
        draft.text += piece
        # More text may make another token of the last one. It is offered all the same: a refusal there loses nothing,
        # while writing a token more to be sure of it takes a pass (1.95 tokens a round instead of 1.98 at width 4).
        draft.proposal = self._encode(draft.text)[: draft.width]
        if len(draft.proposal) == draft.width:
            draft.passes = 0

    def _encode(self, text: bytes) -> list[int]:
        """The target's tokens for a text that goes on after the emitted tokens, up to its last whole character."""
        _, _, unfinished = split_text(text)
        return self.translation.target.spell(text[: len(text) - len(unfinished)])

    def _settle(self, job: Job, seat: Seat) -> None:
        """Keep what the draft wrote as far as the emitted text goes the same way, rewind the rest."""
        ours, theirs = self.translation.draft.pieces, self.translation.target.pieces
        new = job.tokens[seat.read :]
        sizes = [len(theirs[token]) for token in new]
        num_text = sizes.index(0) if 0 in sizes else len(new)  # a special token is no text
        data = b"".join(theirs[token] for token in new[:num_text])
        kept = covered = 0
        while kept < len(seat.ahead) and data.startswith(ours[seat.ahead[kept]], covered):
            covered += len(ours[seat.ahead[kept]])
            kept += 1
        if kept and covered == len(data) and num_text == len(new):  # one is left to read: its row comes next
            kept -= 1
            covered -= len(ours[seat.ahead[kept]])
        seat.length += kept
        if kept < len(seat.ahead):
            self.backend.rewind(seat.slot, seat.length)
        seat.ahead.clear()
        for token, size in zip(new, sizes, strict=True):
            if covered == 0:
                break
            seat.rest = theirs[token][covered:]  # empty unless the cache ends inside this token
            covered = max(0, covered - size)
            seat.read += 1

    def _spell(self, job: Job, seat: Seat, stop: int) -> list[int]:
        """What the draft has to read of the job's tokens up to `stop`, in its own."""
        target, draft = self.translation.target, self.translation.draft
        fed: list[int] = [] if seat.read else list(draft.opening)
        text = [seat.rest]
        for token in job.tokens[seat.read : stop]:
            if target.pieces[token]:
                text.append(target.pieces[token])
                continue
            fed += draft.spell(b"".join(text))
            text.clear()
            reading = self.translation.reading(token)
            fed += [] if tuple(fed) == reading == draft.opening else reading  # a sequence has one beginning
        return fed + draft.spell(b"".join(text)) or list(draft.stand_in)

    def _portion(self, job: Job, seat: Seat) -> list[int] | None:
        """The next chunk of a long prompt; None when it does not fit."""
        stop = min(len(job.tokens), seat.read + self.chunk)
        portion = self._spell(job, seat, stop)
        if seat.length + len(portion) > seat.limit:
            self._outgrow(job, seat)
            return None
        seat.read, seat.rest = stop, b""
        return portion

    def _outgrow(self, job: Job, seat: Seat) -> None:
        """It cannot come back: others may use its place."""
        self.forget(job)
        self._past[job.id] = seat.limit

    def _seat(self, job: Job) -> Seat | None:
        seat = self.seats.get(job.id)
        if seat is None:
            limit = min(GROWTH * job.limit + SPARE, self.backend.info.context)
            slot = self.backend.open((), limit, job.request.tenant)
            if slot is None:
                self._unseated.add(job.id)
                return None
            self._unseated.discard(job.id)
            seat = self.seats[job.id] = Seat(slot, limit)
        return seat

    def _score(self, seats: Sequence[Seat], fed: Sequence[list[int]], rows: int) -> Array:
        """Feed the draft its own tokens. Those that are not ahead are emitted text."""
        starts = []
        for seat, tokens in zip(seats, fed, strict=True):
            if seat.ahead:
                starts.append(seat.length + len(seat.ahead) - len(tokens))
            else:
                starts.append(seat.length)
                seat.length += len(tokens)
        spans = Spans(
            slots=[seat.slot for seat in seats],
            starts=starts,
            counts=[len(tokens) for tokens in fed],
            rows=[rows] * len(seats),
            tokens=self.backend.ops.fed([token for tokens in fed for token in tokens]),
        )
        return self.backend.score(spans).logits
