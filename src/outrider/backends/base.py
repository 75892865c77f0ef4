"""The backend contract: a model that owns its state. The mock, llama-family, Mamba and plug-ins all fit.

A backend names each sequence by a slot. It never sees a request, a rule or a draft: only tokens at positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from outrider.errors import BackendError, ConfigError
from outrider.kv.pages import Page, Pages
from outrider.models.base import TransformerSpec
from outrider.sampling.ops import Drawing, SamplingOps
from outrider.types import Array, Scores, Slot

if TYPE_CHECKING:
    import torch

Paths = Mapping[Slot, Sequence[int]]
State = dict[str, Any]  # what `save` returns and `load` takes; plain data, so swap and snapshots can store it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the engine must know of a model before it runs it."""

    name: str
    vocab_size: int  # tokens that exist; ids run from 0 to vocab_size - 1
    num_columns: int  # columns of a logits row: vocab_size, or more where the weights are padded
    context: int  # the most tokens one sequence may hold
    eos_ids: tuple[int, ...] = ()
    max_rewind: int | None = None  # how many tokens it can go back; None: any number
    trees: bool = False  # whether a span may branch
    num_layers: int = 0  # that `Layered.view` may cut; 0 where it has no such layers
    num_hidden: int = 0  # hidden states on offer: after the embedding (0), after the first layer (1), ...
    pages: bool = False  # whether sequences share pages that may run out while they grow (`reserve` and the like)
    prelaunch: bool = False  # whether a device is given passes before the host asks for them: shapes are dear there
    heads: bool = False  # whether heads can sit on it (`HeadHost`): then the last hidden state is after the output norm

    def __post_init__(self) -> None:
        if not 1 <= self.vocab_size <= self.num_columns:
            raise ConfigError(
                f"{self.name} has {self.num_columns} columns for {self.vocab_size} tokens; it needs at least one each",
                param="vocab_size",
            )
        if self.context < 2:
            raise ConfigError(f"{self.name} has a context of {self.context}; two tokens are the least", param="context")


@dataclass(slots=True)
class Spans:
    """One pass: each slot is fed `counts` tokens from position `start` on, and the last `rows` of them are scored.

    A span may be a tree: `parents` maps its index to the place of each token's parent, counted from the span's first
    token; -1 is the last token before the span. Children of one parent stand at the same position and do not see each
    other. A chain (0 follows -1, 1 follows 0, ...) needs no entry. A tree that is fed in several passes names the
    parents of what was fed before, too: `parents` then begins that many places before the span, and counts from there.

        fed      t  a  b  c  d        t, then a or b after it, c after a, d after c
        parents -1  0  0  1  3

        fed      t  a  b   then  c  d
        parents -1  0  0        -1  0  0  1  3

    `goes_on` is a hint: spans (by index) of single tokens after which most likely the token chosen from their row is
    fed, and nothing else; or, where there are drafts, spans after which most likely as many drafts come again.
    `later` are tokens that only the device knows (`DeviceDrafts.is_deferred`): their places among `tokens`, which hold
    zeros there, and their values; `source`: where those were taken from (`DeviceDrafts.source`). Only a model whose
    sampling defers drafts is given any.
    """

    slots: list[Slot]
    starts: list[int]
    counts: list[int]
    rows: list[int]
    tokens: Array  # [sum(counts)] integers, slot after slot
    parents: Mapping[int, Sequence[int]] = field(default_factory=dict)
    goes_on: Sequence[int] = ()
    later: tuple[Sequence[int], Array] | None = None
    source: Array | None = None


class Backend(ABC):
    """A model and its sequences. Shortage is a value (None); a broken promise is an exception.

    A simple model writes `open`, `length`, `score`, `rewind` and `close`. The other methods have working defaults.
    """

    info: ModelInfo
    ops: SamplingOps  # sampling in the array library this model computes with
    fingerprint: str | None = None  # of the weights, where it is known
    num_threads: int = 1  # that compute
    pages: Pages | None = None  # the account of them, if `info.pages`

    def identity(self) -> str | None:
        """What tells this model from another one of its name; a snapshot is resumed only where it is the same."""
        return self.fingerprint

    @abstractmethod
    def open(self, tokens: Sequence[int] = (), limit: int | None = None, tenant: str = "") -> Slot | None:
        """A new sequence for `tokens` that may grow to `limit`; None when there is no room for it.

        A backend that remembers what earlier sequences of the tenant held may start it with a part of the tokens
        (`length` says how many), but never all: one row is left to score.
        """

    @abstractmethod
    def length(self, slot: Slot) -> int:
        """Tokens the slot holds."""

    @abstractmethod
    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        """ONE forward pass over everything in `spans`. Rows of slots that want none are left out of the scores.

        `hidden` asks for hidden states of every token fed (see `ModelInfo.num_hidden`).
        """

    @abstractmethod
    def rewind(self, slot: Slot, length: int) -> None:
        """Go back to an earlier length. Beyond the current length is an error."""

    @abstractmethod
    def close(self, slot: Slot) -> None:
        """Give everything the slot holds back."""

    def keep(self, slots: Sequence[Slot], lengths: Sequence[int], paths: Paths | None = None) -> None:
        """After a round: each slot keeps its first `length` tokens and forgets the rejected ones.

        After a tree, `paths` maps a slot to the places (counted from the sequence's first token) of the nodes it
        keeps; they become its last tokens.
        """
        for slot, length in zip(slots, lengths, strict=True):
            self.rewind(slot, length)

    def publish(self, slot: Slot, tokens: Sequence[int]) -> None:
        """The slot's first tokens are these, for good: later sequences may start with them. May do nothing."""

    def fork(self, slot: Slot) -> Slot | None:
        """Another slot with the same contents; the two go separate ways from here."""
        raise BackendError(f"{self.info.name} cannot fork a sequence")

    def save(self, slot: Slot) -> State | None:
        """The slot's contents as plain data; None where they cannot be saved, and must be computed again."""
        return None

    def load(self, state: State) -> Slot | None:
        """A new slot with saved contents; None when there is no room."""
        raise BackendError(f"{self.info.name} cannot load a saved sequence")

    # Of a model whose sequences share pages (`info.pages`). Without them, `open` gets the whole length at once.

    def reserve(self, slot: Slot, length: int) -> bool:
        """Whether there is room for `length` tokens of the slot; it is taken at once."""
        return True

    def trim(self, slot: Slot) -> bool:
        """Give back what was reserved and not used. Whether there was anything."""
        return False

    def would_free(self, slot: Slot) -> int:
        """Pages that closing the slot would really free: those it does not share."""
        return 0

    def swap_out(self, slot: Slot) -> State:
        """Contents of the slot that no other slot shares, in host memory; the slot stays to be closed."""
        raise BackendError(f"{self.info.name} cannot swap")

    def swap_in(self, state: State, tokens: Sequence[int], limit: int, tenant: str = "") -> Slot | None:
        """A slot for `tokens` as `open` gives it, with saved contents as far as they join what is known."""
        raise BackendError(f"{self.info.name} cannot swap")

    def view(self, layers: int) -> Backend:
        """A model of the first `layers` layers (of `info.num_layers`), for layer skip: the same weights, cache and
        slots. What it writes lies ahead of this model's own length, and the next pass of this model writes over it."""
        raise BackendError(f"{self.info.name} has no layers to cut")

    def build_head(self, file: Any) -> Any:
        """A draft head that this model computes itself; None where torch does."""
        return None


class Chains(NamedTuple):
    """Drafted chains that were judged, and what the device knows of it. B slots, N drafts."""

    slots: list[Slot]
    lengths: list[int]  # tokens before the drafts
    lasts: list[int]  # the last of those
    counts: list[int]  # of drafts
    drafted: Array  # [N]
    accepted: Array  # [B]
    following: Array  # [B]


class Rolled(NamedTuple):
    """What a model drew behind a verdict: for whom, how far, and on which pages."""

    slots: list[Slot]
    steps: int
    pages: list[list[Page]]


class Rolling(Protocol):
    """A model that can go on by itself: what is drawn from its rows is what it is fed next."""

    def roll(self, spans: Spans, steps: int, drawing: Drawing) -> bool:
        """After `spans`, of which the last row is drawn from, feed each slot what was drawn, until `steps` tokens are
        drawn for all of them; the last one is not fed. No look of the host in between. False: it cannot, and nothing
        changed."""

    def roll_on(self, chains: Chains, steps: int, drawing: Drawing) -> Rolled | None:
        """The same behind a verdict that the host does not know yet. Nobody's length changes: when the host knows, and
        wants what was drawn, `arrive` says whether it is good. None: it cannot."""

    def arrive(self, rolled: Rolled, lengths: Mapping[Slot, int]) -> bool:
        """Whether what was drawn stands: these slots have so many tokens now, of which it read all, and its own."""

    def drop(self, rolled: Rolled) -> None:
        """Nobody wants it."""


class Measured(Protocol):
    """A model whose costs can be measured before anybody asks. Seconds of the device, of work that is queued; None
    where so many sequences have no room, or it cannot do that."""

    def pass_s(self, jobs: int, rows: int, context: int = 0, hidden: Sequence[int] = ()) -> float | None:
        """Of a pass with `rows` tokens for each of so many sequences, which hold `context` before that; with the hidden
        states after these layers."""

    def roll_s(self, jobs: int, steps: int, context: int = 0) -> float | None:
        """Of `Rolling.roll`."""


class HeadHost(Protocol):
    """What heads need of the model they sit on (`ModelInfo.heads`), beside hidden states. Arrays are torch's, whatever
    the model itself computes with."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def ops(self) -> SamplingOps: ...

    @property
    def spec(self) -> TransformerSpec: ...

    @property
    def pages(self) -> Pages:
        """Of its sequences: a head may keep what it holds of them under the same ids."""

    @property
    def device(self) -> torch.device:
        """Where heads are kept and compute."""

    def embed(self, tokens: Array) -> Array:
        """[n] -> [n, width]; heads compute in the precision this comes in."""

    def unembed(self, hidden: Array) -> Array:
        """Logits of hidden states that are after the output norm. [n, width] -> [n, columns]"""
