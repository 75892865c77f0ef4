"""Recurrent state by length: what a Mamba-like model remembers, kept for the last few lengths of every slot.

A slot's state after n tokens is its convolution inputs n-1, n-2, ... and one state per layer. Both live in rings, so
going back is a matter of the length alone and costs nothing:

    max_rewind 3, 6 tokens held        ring place   0  1  2  3
    state after ... tokens                          4  5  6  3       lengths 3 to 6 can be gone back to

This class knows places and lengths; the model reads and writes the tensors layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import BackendError
from outrider.types import Array, Slot

FIRST_SEATS = 4  # slots there is memory for at first; it doubles as more are opened


@dataclass(slots=True)
class Seat:
    """Where a slot's rings are, how many tokens it holds, and the shortest length it can still go back to.

    `oldest` beyond `length` means that a pass that failed has overwritten the present state, too.
    """

    place: int
    length: int = 0
    oldest: int = 0


@dataclass(frozen=True, slots=True)
class Reach:
    """Ring entries that S slots read and write when each is fed T tokens; the same in every layer."""

    inputs_read: Tensor  # [S * (conv - 1)]
    inputs_written: Tensor  # [S * min(T, ring)]
    state_read: Tensor  # [S]
    states_written: Tensor  # [S * min(T, ring)]
    num_inputs: int  # inputs written per slot: the last ones fed
    num_states: int  # states written per slot: the last ones computed


class RecurrentStates:
    """Float32 rings of all slots: `inner` channels, `state` numbers each, a convolution over `conv` tokens.

    One slot takes layers * inner * 4 bytes * ((max_rewind + 1) * state + max_rewind + conv - 1).
    """

    def __init__(
        self,
        *,
        num_layers: int,
        inner: int,
        state: int,
        conv: int,
        max_rewind: int,
        max_slots: int,
        device: torch.device,
    ) -> None:
        self.max_rewind = max_rewind
        self.max_slots = max_slots
        self._window = conv - 1
        self._device = device
        self._seats: dict[Slot, Seat] = {}
        self._free: list[int] = []
        self._next_slot = 0
        self._input_ring = max(1, max_rewind + conv - 1)
        self._state_ring = max_rewind + 1
        # [layers, slots, ring, inner] and [layers, slots, ring, inner, state]
        self._inputs = torch.empty(num_layers, 0, self._input_ring, inner, device=device)
        self._states = torch.empty(num_layers, 0, self._state_ring, inner, state, device=device)

    @property
    def num_slots(self) -> int:
        return len(self._seats)

    def open(self) -> Slot | None:
        """A slot without tokens: its state is zero."""
        seat = self._take()
        if seat is None:
            return None
        self._inputs[:, seat.place] = 0.0  # inputs before the first token are zeros
        self._states[:, seat.place, 0] = 0.0
        return self._add(seat)

    def length(self, slot: Slot) -> int:
        return self._seat(slot).length

    def oldest(self, slot: Slot) -> int:
        """The shortest length the slot can go back to."""
        return self._sound(slot).oldest

    def set_length(self, slot: Slot, length: int) -> None:
        """Go back. The caller has checked that the length is one that is kept."""
        seat = self._seat(slot)
        assert seat.oldest <= length <= seat.length, f"{length} is not in {seat.oldest}..{seat.length}"
        seat.length = length

    def begin(self, slots: Sequence[Slot], counts: Sequence[int]) -> None:
        """The slots are about to be fed: what will be overwritten is given up first, as the pass may fail half-way."""
        for slot, count in zip(slots, counts, strict=True):
            seat = self._seat(slot)
            seat.oldest = max(seat.oldest, seat.length + count - self.max_rewind)

    def advance(self, slots: Sequence[Slot], counts: Sequence[int]) -> None:
        """The slots have been fed: what they read is now behind them."""
        for slot, count in zip(slots, counts, strict=True):
            self._seat(slot).length += count

    def fork(self, slot: Slot) -> Slot | None:
        seat = self._sound(slot)
        copy = self._take()
        if copy is None:
            return None
        self._inputs[:, copy.place] = self._inputs[:, seat.place]
        self._states[:, copy.place] = self._states[:, seat.place]
        copy.length, copy.oldest = seat.length, seat.oldest
        return self._add(copy)

    def close(self, slot: Slot) -> None:
        self._free.append(self._seat(slot).place)
        del self._seats[slot]

    def export(self, slot: Slot) -> tuple[Array, Array]:
        """The slot's inputs [layers, N, inner] and states [layers, N, inner, state] that are kept, oldest first."""
        seat = self._sound(slot)
        inputs, states = self._kept(seat)
        return self._inputs.flatten(1, 2)[:, inputs].cpu().numpy(), self._states.flatten(1, 2)[:, states].cpu().numpy()

    def adopt(self, length: int, inputs: Array, states: Array) -> Slot | None:
        """A new slot with exported contents; what is older than this ring reaches is left out."""
        num_states = min(states.shape[1], self._state_ring)
        oldest = length + 1 - num_states
        num_inputs = length - oldest + self._window
        wanted = [
            (self._inputs.shape[0], max(num_inputs, inputs.shape[1]), self._inputs.shape[3]),
            (self._states.shape[0], max(1, states.shape[1]), *self._states.shape[3:]),
        ]
        given = [tuple(inputs.shape), tuple(states.shape)]
        if given != wanted or oldest < 0:
            raise BackendError(f"the saved state of {length} tokens has shapes {given}, this model needs {wanted}")
        seat = self._take()
        if seat is None:
            return None
        seat.length, seat.oldest = length, oldest
        at_inputs, at_states = self._kept(seat)
        last_inputs, last_states = inputs[:, inputs.shape[1] - num_inputs :], states[:, states.shape[1] - num_states :]
        self._inputs.flatten(1, 2)[:, at_inputs] = torch.tensor(last_inputs, device=self._device)
        self._states.flatten(1, 2)[:, at_states] = torch.tensor(last_states, device=self._device)
        return self._add(seat)

    def _kept(self, seat: Seat) -> tuple[Tensor, Tensor]:
        """Flat entries of the seat's inputs and states from its oldest length to its present one."""
        inputs = torch.arange(seat.oldest - self._window, seat.length, device=self._device) % self._input_ring
        states = torch.arange(seat.oldest, seat.length + 1, device=self._device) % self._state_ring
        return seat.place * self._input_ring + inputs, seat.place * self._state_ring + states

    def reach(self, slots: Sequence[Slot], count: int) -> Reach:
        """The ring entries of a pass that feeds each slot `count` tokens."""
        seats = [self._sound(slot) for slot in slots]
        places = torch.tensor([seat.place for seat in seats])[:, None]  # [S, 1]
        lengths = torch.tensor([seat.length for seat in seats])[:, None]
        num_inputs, num_states = min(count, self._input_ring), min(count, self._state_ring)

        def entries(ring: int, first: int, last: int) -> Tensor:
            """Flat entries of the lengths held + first, ..., held + last - 1. [S * (last - first)]"""
            wanted = (lengths + torch.arange(first, last)) % ring
            return (places * ring + wanted).reshape(-1).to(self._device)

        return Reach(
            entries(self._input_ring, -self._window, 0),
            entries(self._input_ring, count - num_inputs, count),
            entries(self._state_ring, 0, 1),
            entries(self._state_ring, count + 1 - num_states, count + 1),
            num_inputs,
            num_states,
        )

    def inputs(self, layer: int, reach: Reach) -> Tensor:
        """The convolution inputs before the pass. [S, conv - 1, inner]"""
        ring = self._inputs[layer].flatten(0, 1)
        return ring[reach.inputs_read].view(len(reach.state_read), self._window, ring.shape[1])

    def state(self, layer: int, reach: Reach) -> Tensor:
        """The state before the pass. [S, inner, state]"""
        return self._states[layer].flatten(0, 1)[reach.state_read]

    def store_inputs(self, layer: int, reach: Reach, inputs: Tensor) -> None:
        """inputs: those of the pass, [S, T, inner]; the last are kept."""
        last = inputs[:, inputs.shape[1] - reach.num_inputs :].flatten(0, 1)
        self._inputs[layer].flatten(0, 1).index_copy_(0, reach.inputs_written, last)

    def store_states(self, layer: int, reach: Reach, states: Tensor) -> None:
        """states: after each of the last tokens of the pass. [S, num_states, inner, state]"""
        self._states[layer].flatten(0, 1).index_copy_(0, reach.states_written, states.flatten(0, 1))

    def _seat(self, slot: Slot) -> Seat:
        seat = self._seats.get(slot)
        if seat is None:
            raise BackendError(f"there is no slot {slot}; {len(self._seats)} of {self.max_slots} are open")
        return seat

    def _sound(self, slot: Slot) -> Seat:
        seat = self._seat(slot)
        if seat.oldest > seat.length:
            raise BackendError(f"slot {slot} lost its state in a pass that failed; close it and start over")
        return seat

    def _add(self, seat: Seat) -> Slot:
        slot = Slot(self._next_slot)  # never used twice, so that a closed slot cannot be mistaken for a new one
        self._next_slot += 1
        self._seats[slot] = seat
        return slot

    def _take(self) -> Seat | None:
        if len(self._seats) == self.max_slots:
            return None
        if not self._free:
            self._grow()
        return Seat(self._free.pop())

    def _grow(self) -> None:
        held = self._inputs.shape[1]
        size = min(self.max_slots, max(FIRST_SEATS, 2 * held))
        for name in ("_inputs", "_states"):
            old: Tensor = getattr(self, name)
            new = torch.empty(old.shape[0], size, *old.shape[2:], device=self._device)
            new[:, :held] = old
            setattr(self, name, new)
        self._free += reversed(range(held, size))
