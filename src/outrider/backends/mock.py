"""The mock model: a fixed random distribution for every context, known exactly, on numpy (or torch arrays).

It is a first-class backend: it keeps what it was fed, computes rows from that alone, goes back exactly, and screams
when a token arrives at the wrong position. A stale or missing token in its cache changes every later distribution,
so the tests of exactness can see it. `logits_after` tells the truth about any context without touching a slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import reduce
from typing import Any, Literal

import numpy as np

from outrider.backends.base import Backend, ModelInfo, Paths, Spans, State
from outrider.clock import Clock, SystemClock
from outrider.config import NUM_BYTES, MockConfig
from outrider.errors import BackendError
from outrider.sampling.ops import SamplingOps
from outrider.tokenizer.base import PieceTokenizer
from outrider.types import Scores, Slot

_MASK = (1 << 64) - 1
_EMPTY = 0x243F6A8885A308D3  # hash of the empty context
_LIMITS = {"context", "max_slots", "seconds_per_pass", "seconds_per_token"}  # settings that do not change the law


def _absorb(state: int, token: int) -> int:
    """Hash of a context extended by a token."""
    state = ((state ^ (token + 1)) * 0x9E3779B97F4A7C15) & _MASK
    return state ^ (state >> 29)


class MockBackend(Backend):
    """See `MockConfig` for what can be set."""

    def __init__(
        self,
        config: MockConfig | None = None,
        *,
        clock: Clock | None = None,
        arrays: Literal["numpy", "torch"] = "numpy",
        device: str | None = None,
    ) -> None:
        self.config = config = config or MockConfig()
        xp = _namespace(arrays)
        self.info = ModelInfo(
            name=f"mock-{config.seed}",
            vocab_size=config.vocab_size,
            num_columns=config.vocab_size + config.padding,
            context=config.context,
            eos_ids=config.eos_ids,
            max_rewind=config.max_rewind,
            trees=config.max_rewind is None,
        )
        self.ops = SamplingOps(xp, device)
        self.num_passes = 0
        self.num_tokens_fed = 0
        self._clock = clock or SystemClock()
        self._host_table = _logit_table(config)
        self._table = xp.asarray(self._host_table, device=device)
        self._tokens: dict[Slot, list[int]] = {}
        self._states: dict[Slot, list[int]] = {}  # hash of the context after each token, the empty one first
        self._next_slot = 0

    def identity(self) -> str | None:
        """Mocks of the same law are the same model, whatever their limits and costs."""
        settings = ((field.name, getattr(self.config, field.name)) for field in fields(self.config))
        return self.fingerprint or repr([setting for setting in settings if setting[0] not in _LIMITS])

    def logits_after(self, context: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The row after `context`, from the definition: no slot is read."""
        state = _EMPTY
        for token in self._window(context):
            state = _absorb(state, token)
        row: np.ndarray[Any, np.dtype[np.float32]] = self._host_table[state % self.config.num_contexts]
        return row

    def cached(self, slot: Slot) -> list[int]:
        """The tokens the slot holds."""
        return list(self._tokens[slot])

    @property
    def num_slots(self) -> int:
        return len(self._tokens)

    def open(self, tokens: Sequence[int] = (), limit: int | None = None, tenant: str = "") -> Slot | None:
        return self._new([], [_EMPTY])

    def length(self, slot: Slot) -> int:
        return len(self._tokens[slot])

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        if hidden:
            raise BackendError("the mock has no hidden states")
        if spans.parents and not self.info.trees:
            raise BackendError(f"{self.info.name} reads chains only; spans {sorted(spans.parents)} are trees")
        fed = spans.tokens.tolist()
        self.num_passes += 1
        self.num_tokens_fed += len(fed)
        wanted: list[int] = []
        at = 0
        spans_fed = zip(spans.slots, spans.starts, spans.counts, spans.rows, strict=True)
        for index, (slot, start, count, rows) in enumerate(spans_fed):
            self._feed(slot, start, fed[at : at + count], spans.parents.get(index))
            at += count
            if rows:
                if rows > count:
                    raise BackendError(f"{rows} rows wanted of {count} tokens")
                wanted += [state % self.config.num_contexts for state in self._states[slot][-rows:]]
        if at != len(fed):
            raise BackendError(f"spans name {at} tokens, {len(fed)} were given")
        cost = self.config.seconds_per_pass + self.config.seconds_per_token * len(fed)
        if cost:
            self._clock.sleep(cost)
        # Gathering lets go of the interpreter's lock, and taking it back costs more than a pass this brief.
        one = len(wanted) == 1
        logits = (
            self.ops.xp.asarray(self._table[wanted[0] : wanted[0] + 1], copy=True)
            if one
            else self._table[self.ops.integers(wanted), ...]
        )
        return Scores([rows for rows in spans.rows if rows], logits)

    def keep(self, slots: Sequence[Slot], lengths: Sequence[int], paths: Paths | None = None) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            if paths and slot in paths:
                tokens, states, path = self._tokens[slot], self._states[slot], list(paths[slot])
                start, held = length - len(path), len(tokens)
                if sorted(set(path)) != path or not all(start <= place < held for place in path):
                    raise BackendError(f"slot {slot} holds {held} tokens and cannot keep places {path} as its last")
                tokens[start:length] = [tokens[place] for place in path]
                states[start + 1 : length + 1] = [states[place + 1] for place in path]
            if length != len(self._tokens[slot]):
                self.rewind(slot, length)

    def publish(self, slot: Slot, tokens: Sequence[int]) -> None:
        pass  # it computes nothing that would be worth sharing

    def rewind(self, slot: Slot, length: int) -> None:
        held = len(self._tokens[slot])
        if not 0 <= length <= held:
            raise BackendError(f"slot {slot} holds {held} tokens and cannot go to {length}")
        limit = self.config.max_rewind
        if limit is not None and held - length > limit:
            raise BackendError(f"slot {slot} cannot rewind {held - length} tokens, only {limit}")
        del self._tokens[slot][length:]
        del self._states[slot][length + 1 :]

    def fork(self, slot: Slot) -> Slot | None:
        return self._new(list(self._tokens[slot]), list(self._states[slot]))

    def close(self, slot: Slot) -> None:
        del self._tokens[slot], self._states[slot]

    def save(self, slot: Slot) -> State:
        return {"tokens": list(self._tokens[slot])}

    def load(self, state: State) -> Slot | None:
        slot = self.open()
        if slot is not None:
            try:
                self._feed(slot, 0, state["tokens"])
            except BackendError:
                self.close(slot)
                raise
        return slot

    def _new(self, tokens: list[int], states: list[int]) -> Slot | None:
        if self.config.max_slots is not None and len(self._tokens) >= self.config.max_slots:
            return None
        slot = Slot(self._next_slot)
        self._next_slot += 1
        self._tokens[slot], self._states[slot] = tokens, states
        return slot

    def _feed(self, slot: Slot, start: int, fed: Sequence[int], parents: Sequence[int] | None = None) -> None:
        tokens, states = self._tokens[slot], self._states[slot]
        size, context = self.config.vocab_size, self.config.context
        if start != len(tokens):
            raise BackendError(f"slot {slot} holds {len(tokens)} tokens but was fed position {start}")
        if start + len(fed) > context:
            raise BackendError(f"{start + len(fed)} tokens in a context of {context}")
        before = start  # tokens that each one follows: all of them, or its ancestors in a tree
        for index, token in enumerate(fed):
            if not 0 <= token < size:
                raise BackendError(f"token {token} is not in a vocabulary of {size}")
            if parents is not None:
                covered = len(parents) - len(fed)  # tokens of the tree that were fed before
                before = start - covered + parents[covered + index] + 1
            tokens.append(token)
            if self.config.order is None:
                states.append(_absorb(states[before], token))
            else:
                state = _EMPTY
                for earlier in self._window(self._line(slot, start, len(fed), parents, index)):
                    state = _absorb(state, earlier)
                states.append(state)
            before += 1

    def _line(self, slot: Slot, start: int, count: int, parents: Sequence[int] | None, index: int) -> list[int]:
        """The tokens up to a fed one, along its ancestors."""
        tokens = self._tokens[slot]
        if parents is None:
            return tokens[: start + index + 1]
        root = start + count - len(parents)
        line: list[int] = []
        node = len(parents) - count + index
        while node >= 0:
            line.insert(0, tokens[root + node])
            node = parents[node]
        return tokens[:root] + line

    def _hashes(self, tokens: Sequence[int]) -> list[int]:
        """Of the contexts along these tokens, the empty one first."""
        states = [_EMPTY]
        for end in range(1, len(tokens) + 1):
            if self.config.order is None:
                states.append(_absorb(states[-1], tokens[end - 1]))
            else:
                states.append(reduce(_absorb, self._window(tokens[:end]), _EMPTY))
        return states

    def _window(self, context: Sequence[int]) -> Sequence[int]:
        """The part of a context the distribution depends on."""
        order = self.config.order
        return context if order is None else context[max(0, len(context) - order) :]


def mock_tokenizer(vocab_size: int, *, text: bool = False) -> PieceTokenizer:
    """Pieces for a mock vocabulary: letters, then words; two tokens are halves of one character (é)."""
    if text:
        return ByteTokenizer(vocab_size)
    pieces = [bytes([byte]) for byte in b"abcdefgh"] + [b"\xc3", b"\xa9", b".", b" "]
    words = "the rider rode ahead and saw a far river hill road under open sky scout horse back with light rain"
    pieces += [f" {word}".encode() for word in words.split()]
    pieces += [f"<{token}>".encode() for token in range(len(pieces), vocab_size)]
    return PieceTokenizer(pieces[:vocab_size])


WORDS = """
the rider rode ahead and saw a far river hill road under open sky scout horse back with light rain of to in on
at by for from was were is are it he she they we you his her their our that this when then there where who one
two three many some all no not never always often once again still soon late early morning evening night day
dawn dusk wind storm snow sun moon star stone field wood tree leaf grass path bridge gate wall town house fire
smoke bread water salt song word story letter map mile hour year friend stranger guide voice hand eye heart
foot step track trail camp rope knife bell lamp door window table room quiet slow quick long short old young
bright dark cold warm deep high wide
""".split()  # noqa: SIM905


class ByteTokenizer(PieceTokenizer):
    """All bytes, an end, and some words: any text can be encoded, and a conversation be put to a mock."""

    def __init__(self, vocab_size: int) -> None:
        extra = [f" {word}".encode() for word in WORDS][: vocab_size - NUM_BYTES - 1]
        extra += [b"<%d>" % token for token in range(NUM_BYTES + 1 + len(extra), vocab_size)]
        super().__init__([*(bytes([byte]) for byte in range(NUM_BYTES)), b"<end>", *extra])

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return super().encode(text)

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == NUM_BYTES else self.pieces[token]

    def encode_chat(self, messages: Sequence[Mapping[str, str]], text: str) -> list[int]:
        """The template writes no end, so one in the text is content: its letters."""
        return [one for token in self.encode(text) for one in (self.pieces[token] if token == NUM_BYTES else [token])]

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:"


def _logit_table(config: MockConfig) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[contexts, columns]: one row per context hash. Padding columns hold noise, as in real checkpoints."""
    shape = (config.num_contexts, config.vocab_size + config.padding)
    own = np.random.default_rng([config.seed, 0]).standard_normal(shape, dtype=np.float32)
    if config.drift:
        other = np.random.default_rng([config.seed, 1]).standard_normal(shape, dtype=np.float32)
        own = own + np.float32(config.drift) * other
    own = np.float32(config.sharpness) * own
    if config.text:
        own[:, :NUM_BYTES] -= np.float32(20.0)  # bytes are for reading, and for what a constraint wants
    return own


def _namespace(arrays: str) -> Any:
    if arrays == "numpy":
        return np  # numpy 2 follows the array API standard itself
    import array_api_compat.torch as xp

    return xp
