"""Drafting with a model of another vocabulary, by shared tokens: its rows are projected onto the target's ids.

Tokens of the two models that mean the same bytes are shared. What the target said reaches the draft token by token: a
shared token as its counterpart, any other as the several draft tokens that spell it. What the draft thinks comes back
as rows over the target's ids, minus infinity where nothing is shared, so the judge sees the row that was drawn from.

    target   " The"   " rider"   "rode"           three tokens held
    draft    " The"   " ri" "der"   "rode"        four of the draft's own
    ends     0   1               3       4        draft tokens held after each
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise

from outrider.backends.base import Backend, Paths, Spans, State
from outrider.draft.model import ModelDrafter, Seat
from outrider.errors import BackendError, ConfigError, OutriderError, VocabularyError
from outrider.tokenizer.base import PieceTokenizer, Tokenizer
from outrider.tokenizer.text import TextTokenizer
from outrider.types import Array, Drafts, Job, Scores, Slot

ANCHOR = "\n"  # stands before a text that does not begin a line: some tokenizers put a space in front of what does
SHORT = 16  # letters: so much text is spelled as a whole where the tokenizer changes it
GROWTH = 2  # draft tokens that room is kept for, per token of the answer; one that needs more goes on without drafts
SPARE = 32  # and so many more, since a short answer may be far from the average


class Vocabulary:
    """The tokens of one model as bytes, and how bytes are spelled with them.

    `pieces[id]` is empty where a token adds no text; such tokens may have a name in `specials`. Where several tokens
    mean the same bytes the lowest id speaks for them, but one of `spare` only when there is no other.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        *,
        encode: Callable[[str], list[int]] | None = None,
        specials: Mapping[str, int] | None = None,
        bos_id: int | None = None,
        eos_id: int | None = None,
        adds_bos: bool = False,
        spare: Collection[int] = (),
    ) -> None:
        self.pieces = list(pieces)
        self.specials = dict(specials or {})
        self.names = {token: name for name, token in self.specials.items()}
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.opening = (bos_id,) if adds_bos and bos_id is not None else ()  # what every text begins with
        self.ids: dict[bytes, int] = {}
        for token in sorted(range(len(self.pieces)), key=lambda token: token in spare):
            self.ids.setdefault(self.pieces[token], token)
        self.ids.pop(b"", None)
        self._encode = encode
        self._longest = max(map(len, self.pieces), default=0)

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int | None = None) -> Vocabulary:
        """The vocabulary of a tokenizer. `size`: the model's `vocab_size`, where that is another."""
        if isinstance(tokenizer, TextTokenizer):
            return _of_text(tokenizer, tokenizer.vocab_size if size is None else size)
        if isinstance(tokenizer, PieceTokenizer):
            return cls(tokenizer.pieces[:size], encode=tokenizer.encode)
        if size is None:
            raise ConfigError(
                f"a {type(tokenizer).__name__} does not say how many tokens it has; pass size=", param="size"
            )
        return cls([tokenizer.token_bytes(token) for token in range(size)], encode=tokenizer.encode)

    @property
    def size(self) -> int:
        return len(self.pieces)

    @cached_property
    def stand_in(self) -> tuple[int, ...]:
        """For what cannot be said with this vocabulary."""
        if "<unk>" in self.specials:
            return (self.specials["<unk>"],)
        spelled = [self._fewest(text.encode()) for text in ("\ufffd", "?", " ")]
        return next((tuple(tokens) for tokens in spelled if tokens), (0,))

    def spell(self, data: bytes) -> list[int]:
        """Tokens for these bytes: the tokenizer's own where it can, and the fewest for halves of characters.

        Bytes that no token has are left out.
        """
        ending, text, rest = split_text(data)
        return self._fewest(ending) + self._tokenize(text) + self._fewest(rest)

    def _tokenize(self, text: str) -> list[int]:
        """The tokenizer's choice if it means exactly this text, wherever that stands in a line."""
        data = text.encode()
        if not data:
            return []
        try:
            if self._encode is not None:
                tokens = self._encode(text)
                if self._joined(tokens) == data:
                    return tokens
                tokens = self._encode(ANCHOR + text)
                for start in range(1, min(4, len(tokens))):
                    if self._joined(tokens[start:]) == data:
                        return tokens[start:]
        except OutriderError:  # a small vocabulary need not have all letters
            pass
        if self._encode is None or len(text) <= SHORT:
            return self._fewest(data)
        middle = text.find(" ", len(text) // 2)  # one odd letter shall not change how all others are read
        middle = len(text) // 2 if middle < 0 else middle
        return self._tokenize(text[:middle]) + self._tokenize(text[middle:])

    def _joined(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.pieces[token] if token < self.size else b"" for token in tokens)

    def _fewest(self, data: bytes) -> list[int]:
        """The fewest tokens that spell as much of `data` as can be spelled."""
        best: list[tuple[int, int]] = [(0, 0)]  # (bytes left out, tokens) for each beginning of data
        steps: list[tuple[int, int | None]] = [(0, None)]  # where the last token begins, and which it is
        for end in range(1, len(data) + 1):
            missed, count = best[end - 1]
            cost = (missed + 1, count)
            step: tuple[int, int | None] = (end - 1, None)
            for start in range(max(0, end - self._longest), end):
                token = self.ids.get(data[start:end])
                if token is not None and (best[start][0], best[start][1] + 1) < cost:
                    cost, step = (best[start][0], best[start][1] + 1), (start, token)
            best.append(cost)
            steps.append(step)
        tokens, end = [], len(data)
        while end:
            end, token = steps[end]
            if token is not None:
                tokens.append(token)
        return tokens[::-1]


def split_text(data: bytes) -> tuple[bytes, str, bytes]:
    """The bytes that end a character begun before, the whole characters, and what comes after those."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    try:
        return data[:start], data[start:].decode(), b""
    except UnicodeDecodeError as error:
        end = start + error.start
        return data[:start], data[start:end].decode(), data[end:]


def _of_text(tokenizer: TextTokenizer, size: int) -> Vocabulary:
    pieces = [tokenizer.token_bytes(token) for token in range(size)]
    # SentencePiece has a token for every byte beside those for letters; models say the letters
    single = [token for token, piece in enumerate(pieces) if len(piece) == 1]
    return Vocabulary(
        pieces,
        encode=lambda text: tokenizer.encode(text, add_special=False),
        specials={
            name: token for token in sorted(tokenizer.special_ids) if token < size and (name := tokenizer.piece(token))
        },
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        adds_bos=tokenizer.bos_id is not None and tokenizer.encode("a")[:1] == [tokenizer.bos_id],
        spare={token for token in single if (tokenizer.piece(token) or "").startswith("<0x")},
    )


class Translation:
    """Which draft token each target token stands for. `shared` is one to one, by the target's ids."""

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        self.target = target
        self.draft = draft
        self.shared = _shared(target, draft)
        self._readings: dict[int, tuple[int, ...]] = {token: (other,) for token, other in self.shared.items()}

    @classmethod
    def of(
        cls, target: Tokenizer, draft: Tokenizer, *, target_size: int | None = None, draft_size: int | None = None
    ) -> Translation:
        """From the two tokenizers; the sizes are the models' `vocab_size` where those differ."""
        return cls(Vocabulary.of(target, target_size), Vocabulary.of(draft, draft_size))

    @property
    def num_shared(self) -> int:
        return len(self.shared)

    @property
    def share(self) -> float:
        """How much of the target's vocabulary the draft can say."""
        return len(self.shared) / self.target.size

    def reading(self, token: int) -> tuple[int, ...]:
        """The draft tokens a target token is read as: one that is shared, or several that spell it; never none."""
        known = self._readings.get(token)
        if known is None:
            known = self._readings[token] = tuple(self._spelled(token)) or self.draft.stand_in
        return known

    def read(self, tokens: Sequence[int], start: int) -> list[tuple[int, ...]]:
        """The readings of tokens that stand from `start` on. A sequence begins with the draft's opening."""
        readings = [self.reading(token) for token in tokens]
        opening = self.draft.opening
        if start == 0 and readings and readings[0][: len(opening)] != opening:
            readings[0] = opening + readings[0]
        return readings

    def _spelled(self, token: int) -> Sequence[int]:
        target, draft = self.target, self.draft
        piece = target.pieces[token]
        if piece in draft.ids:  # another token that means the same is the shared one
            return [draft.ids[piece]]
        if not piece:
            for role, counterpart in ((target.bos_id, draft.bos_id), (target.eos_id, draft.eos_id)):
                if token == role and counterpart is not None:
                    return [counterpart]
            piece = target.names.get(token, "").encode()
        return draft.spell(piece)


def _shared(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """Target token -> draft token: the same bytes, the same special token, or the same role."""
    shared = {target.ids[piece]: draft.ids[piece] for piece in target.ids.keys() & draft.ids.keys()}
    for name in target.specials.keys() & draft.specials.keys():
        shared[target.specials[name]] = draft.specials[name]
    for ours, theirs in ((target.eos_id, draft.eos_id), (target.bos_id, draft.bos_id)):
        if ours is not None and theirs is not None and ours not in shared and theirs not in shared.values():
            shared[ours] = theirs
    return dict(sorted(shared.items()))


@dataclass(slots=True)
class Line:
    """What the draft holds of a sequence: `ends[n]` of its own tokens stand for the first n of the target's."""

    ends: list[int]
    limit: int  # draft tokens it has room for

    @property
    def length(self) -> int:
        return len(self.ends) - 1


class TranslatedBackend(Backend):
    """A draft model that speaks the target's token ids. Slots are the draft's own; see `backends.base.Backend`.

    `info.context` is what fits when every token is shared: `room` says how much really does. Likewise tokens of the
    history may be more to rewind than `info.max_rewind`; what was drafted is shared, one for one.
    """

    def __init__(self, draft: Backend, translation: Translation) -> None:
        ours, size = draft.info, translation.target.size
        if translation.draft.size != ours.vocab_size:
            raise VocabularyError(
                f"the translation is for a draft of {translation.draft.size} tokens, {ours.name} has "
                f"{ours.vocab_size}; build it with draft_size={ours.vocab_size}",
                param="draft",
            )
        if not translation.shared:
            raise VocabularyError(
                f"no token of the draft {ours.name} means what a token of the target does; let it draft text instead",
                param="draft",
            )
        self.draft = draft
        self.translation = translation
        self.ops = draft.ops
        eos_ids = tuple(token for token, other in translation.shared.items() if other in ours.eos_ids)
        self.info = replace(ours, vocab_size=size, num_columns=size, eos_ids=eos_ids, num_hidden=0, heads=False)
        nowhere = ours.num_columns  # a column of minus infinity is put behind the draft's own
        self._columns = self.ops.integers([translation.shared.get(token, nowhere) for token in range(size)])
        self._is_shared = self._columns != nowhere
        self._lines: dict[Slot, Line] = {}

    @property
    def num_slots(self) -> int:
        return len(self._lines)

    def open(self, tokens: Sequence[int] = (), limit: int | None = None, tenant: str = "") -> Slot | None:
        """None, too, when these do not fit."""
        if not self.fits(tokens):
            return None
        context = self.draft.info.context
        readings = self.translation.read(tokens, 0)
        ends = [0, *accumulate(map(len, readings))]
        most = None if limit is None else min(context, ends[-1] + GROWTH * max(0, limit - len(tokens)) + SPARE)
        slot = self.draft.open(list(chain.from_iterable(readings)), most, tenant)
        if slot is None:
            return None
        known = self.draft.length(slot)
        del ends[bisect_right(ends, known) :]  # a beginning it remembers may end inside a token
        if ends[-1] < known:
            self.draft.rewind(slot, ends[-1])
        self._lines[slot] = Line(ends, context if most is None else most)
        return slot

    def length(self, slot: Slot) -> int:
        return self._line(slot).length

    def fits(self, tokens: Sequence[int]) -> bool:
        """Whether the draft's context holds a sequence of these."""
        context = self.draft.info.context
        return len(tokens) <= context and sum(map(len, self.translation.read(tokens, 0))) <= context

    def limit(self, slot: Slot) -> int:
        """Draft tokens there is room for in the slot."""
        return self._line(slot).limit

    def room(self, slot: Slot, tokens: Sequence[int] = ()) -> int:
        """How many shared tokens fit after these, which follow what the slot holds. Negative: these do not."""
        line = self._line(slot)
        return line.limit - line.ends[-1] - sum(map(len, self.translation.read(tokens, line.length)))

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        if hidden:
            raise BackendError(f"{self.info.name} has no hidden states of another model's tokens")
        fed: list[int] = []
        starts: list[int] = []
        counts: list[int] = []
        rows: list[int] = []
        picked: list[int] = []  # the rows after whole tokens
        num_rows = 0
        parents: dict[int, list[int]] = {}
        ends: list[list[int]] = []
        for index, (slot, readings, wanted) in enumerate(self._readings(spans)):
            line, sizes = self._lines[slot], [len(reading) for reading in readings]
            fed += chain.from_iterable(readings)
            starts.append(line.ends[-1])
            ends.append(list(accumulate(sizes, initial=line.ends[-1]))[1:])
            counts.append(sum(sizes))
            rows.append(0)
            if wanted:
                later = sizes[len(sizes) - wanted + 1 :]
                rows[-1] = 1 + sum(later)
                picked += accumulate(later, initial=num_rows)
                num_rows += rows[-1]
            if index in spans.parents:
                parents[index] = _expand(spans.parents[index], line, sizes)
        logits = self.draft.score(Spans(spans.slots, starts, counts, rows, self.ops.fed(fed), parents)).logits
        for slot, new in zip(spans.slots, ends, strict=True):
            self._lines[slot].ends += new
        if len(picked) < num_rows:
            logits = logits[self.ops.integers(picked), ...]
        return Scores([rows for rows in spans.rows if rows], self._project(logits))

    def keep(self, slots: Sequence[Slot], lengths: Sequence[int], paths: Paths | None = None) -> None:
        lengths_inside: list[int] = []
        places: dict[Slot, list[int]] = {}
        tails: list[list[int]] = []  # the last of each slot's ends
        for slot, length in zip(slots, lengths, strict=True):
            line = self._line(slot)
            path = list(paths[slot]) if paths and slot in paths else []
            start = length - len(path)
            if not 0 <= start <= length <= line.length or not all(start <= place < line.length for place in path):
                raise BackendError(f"slot {slot} holds {line.length} tokens and cannot keep {length}, last {path}")
            parts = [range(line.ends[place], line.ends[place + 1]) for place in path]
            tails.append(list(accumulate(map(len, parts), initial=line.ends[start])))
            lengths_inside.append(tails[-1][-1])
            if path:
                places[slot] = list(chain.from_iterable(parts))
        self.draft.keep(slots, lengths_inside, places or None)
        for slot, length, tail in zip(slots, lengths, tails, strict=True):
            self._lines[slot].ends[length + 1 - len(tail) :] = tail

    def publish(self, slot: Slot, tokens: Sequence[int]) -> None:
        self.draft.publish(slot, list(chain.from_iterable(self.translation.read(tokens, 0))))

    def rewind(self, slot: Slot, length: int) -> None:
        line = self._line(slot)
        if not 0 <= length <= line.length:
            raise BackendError(f"slot {slot} holds {line.length} tokens and cannot go to {length}")
        self.draft.rewind(slot, line.ends[length])
        del line.ends[length + 1 :]

    def fork(self, slot: Slot) -> Slot | None:
        line = self._line(slot)
        other = self.draft.fork(slot)
        if other is not None:
            self._lines[other] = replace(line, ends=list(line.ends))
        return other

    def close(self, slot: Slot) -> None:
        self._line(slot)
        del self._lines[slot]
        self.draft.close(slot)

    def save(self, slot: Slot) -> State:
        line = self._line(slot)
        return {"ends": list(line.ends), "limit": line.limit, "draft": self.draft.save(slot)}

    def load(self, state: State) -> Slot | None:
        slot = self.draft.load(state["draft"])
        if slot is not None:
            self._lines[slot] = Line(list(state["ends"]), state["limit"])
        return slot

    def _line(self, slot: Slot) -> Line:
        line = self._lines.get(slot)
        if line is None:
            raise BackendError(f"there is no slot {slot}")
        return line

    def _readings(self, spans: Spans) -> list[tuple[Slot, list[tuple[int, ...]], int]]:
        """Each span's slot, what it is fed in the draft's tokens, and the rows wanted."""
        tokens, size = spans.tokens.tolist(), self.info.vocab_size
        if sum(spans.counts) != len(tokens):
            raise BackendError(f"spans name {sum(spans.counts)} tokens, {len(tokens)} were given")
        if tokens and not 0 <= min(tokens) <= max(tokens) < size:
            raise BackendError(f"tokens {min(tokens)} to {max(tokens)} are not in a vocabulary of {size}")
        readings, at = [], 0
        for slot, start, count, rows in zip(spans.slots, spans.starts, spans.counts, spans.rows, strict=True):
            held = self.length(slot)
            if start != held:
                raise BackendError(f"slot {slot} holds {held} tokens but was fed position {start}")
            if not 0 <= rows <= count:
                raise BackendError(f"slot {slot} is fed {count} tokens, but {rows} rows are wanted")
            readings.append((slot, self.translation.read(tokens[at : at + count], start), rows))
            at += count
        return readings

    def _project(self, logits: Array) -> Array:
        """Rows over the target's ids. A row that says nothing about shared tokens finds them all alike. [R, V]"""
        xp = self.ops.xp
        nowhere = xp.full((logits.shape[0], 1), -xp.inf, dtype=logits.dtype, device=logits.device)
        rows = xp.take(xp.concat([logits, nowhere], axis=1), self._columns, axis=1)
        silent = xp.max(rows, axis=1, keepdims=True) == -xp.inf
        if silent.any():
            rows = xp.where(silent & self._is_shared, xp.zeros_like(rows), rows)
        return rows


def past_reason(limit: int) -> str:
    """Why a draft is not asked any more."""
    return f"the answer is past the {limit} tokens of its own that the draft has room for"


def end_reason(limit: int) -> str:
    """Why a draft is asked for less."""
    return f"the answer comes to the end of the {limit} tokens of its own that the draft has room for"


def _expand(parents: Sequence[int], line: Line, sizes: Sequence[int]) -> list[int]:
    """The parents of the draft's tokens: the first of a reading follows the last of its parent's, the others follow on.

    `sizes` are those of the tokens fed; the tree may begin before them.
    """
    covered = len(parents) - len(sizes)
    earlier = [end - start for start, end in pairwise(line.ends[line.length - covered :])]
    expanded: list[int] = []
    last: list[int] = []
    for parent, size in zip(parents, [*earlier, *sizes], strict=True):
        first = len(expanded)
        expanded.append(last[parent] if parent >= 0 else -1)
        expanded += range(first, first + size - 1)
        last.append(first + size - 1)
    return expanded


class TranslatedDrafter(ModelDrafter):
    """A `ModelDrafter` that knows how much of the draft's context the answer takes up in the draft's own tokens."""

    backend: TranslatedBackend

    def __init__(self, backend: TranslatedBackend, *, chunk: int = 512) -> None:
        super().__init__(backend, chunk=chunk)
        self.info = replace(self.info, run_ahead=False)  # what it holds ahead is not one token for one
        self._past: set[int] = set()  # jobs that have outgrown the draft's context

    def lag(self, job: Job) -> int:
        seat = self.seats.get(job.id)
        if job.id in self._past or (seat is not None and self._left(job, seat) < 0):
            return 0  # it will not read on; `propose` says why
        return super().lag(job)

    def forget(self, job: Job) -> None:
        self._past.discard(job.id)
        super().forget(job)

    def _room(self, job: Job, width: int, drafts: Drafts) -> int:
        seat = self._seat(job) if width else None
        left = 0 if seat is None else self._left(job, seat)
        if left < 0:  # it may have another seat, with more room, if the context allows that
            self.forget(job)
            seat = self._seat(job)
            left = 0 if seat is None else self._left(job, seat)
        if job.id in self._past:
            drafts.fallbacks.append((job, past_reason(self.backend.info.context)))
            return 0
        if seat is not None and left + 1 < width:
            drafts.fallbacks.append((job, end_reason(self.backend.limit(seat.slot))))
            width = left + 1
        return super()._room(job, width, drafts)

    def _open(self, job: Job) -> Slot | None:
        if job.id not in self._past and not self.backend.fits(job.tokens):
            self._past.add(job.id)
        return None if job.id in self._past else super()._open(job)

    def _left(self, job: Job, seat: Seat) -> int:
        return self.backend.room(seat.slot, job.tokens[seat.length + len(seat.ahead) :])
