"""The backend contract: a model that owns its state. The mock, llama-family, Mamba and plug-ins all fit.

A backend names each sequence by a slot. It never sees a request, a rule or a draft: only tokens at positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.errors import ConfigError
from outrider.sampling.ops import SamplingOps
from outrider.types import Array, Scores, Slot

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
    """One pass: each slot is fed `counts` tokens from position `start` on, and the last `rows` of them are scored."""

    slots: list[Slot]
    starts: list[int]
    counts: list[int]
    rows: list[int]
    tokens: Array  # [sum(counts)] integers, slot after slot


class Backend(Protocol):
    """A model and its sequences. Shortage is a value (None); a broken promise is an exception."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def ops(self) -> SamplingOps:
        """Sampling in the array library this model computes with."""

    def open(self) -> Slot | None:
        """A new empty sequence; None when there is no room for another."""

    def length(self, slot: Slot) -> int:
        """Tokens the slot holds."""

    def score(self, spans: Spans) -> Scores:
        """ONE forward pass over everything in `spans`. Rows of slots that want none are left out of the scores."""

    def keep(self, slots: Sequence[Slot], lengths: Sequence[int]) -> None:
        """After a round: each slot keeps its first `length` tokens and forgets the refused ones."""

    def rewind(self, slot: Slot, length: int) -> None:
        """Go back to an earlier length. Beyond the current length is an error."""

    def fork(self, slot: Slot) -> Slot | None:
        """Another slot with the same contents; the two go separate ways from here."""

    def close(self, slot: Slot) -> None:
        """Give everything the slot holds back."""

    def save(self, slot: Slot) -> State:
        """The slot's contents as plain data."""

    def load(self, state: State) -> Slot | None:
        """A new slot with saved contents; None when there is no room."""
