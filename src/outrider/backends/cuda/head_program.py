"""A pass of an EAGLE head on a GPU. Its layers are torch's (`eagle_head`), but for rope and attention, which go by the
pass's integers. An entry lies one place further than the number of its sequence says, so the first place of a sequence
is nobody's, and is skipped."""

from __future__ import annotations

import torch

from outrider.backends.cuda.layout import Shape
from outrider.backends.cuda.program import Model, Program, Work
from outrider.backends.eagle_head import EagleHead


class HeadProgram(Program):
    """A pass of the head over arrays of fixed sizes. `given` goes in beside the tokens: hidden states."""

    def __init__(
        self,
        head: EagleHead,
        model: Model,
        shape: Shape,
        room: int,
        work: Work,
        table: torch.Tensor,
        *,
        reads: bool = False,
    ) -> None:
        """table: how far each pair of a head turns at each position. [positions, pairs, 2]; reads: that is all."""
        super().__init__(model, shape, room, (), work)
        self._head, self._reads = head, reads
        self.given = self.buffers.x.new_zeros(shape.rows, head.spec.layer.width)
        self.rows = self.given  # logits over the target's tokens, once it ran
        self._table = table

    def compute(self, wanted: torch.Tensor | None = None) -> None:
        """wanted: rows whose logits are computed, or all."""
        head, layout, buffers, constants = self._head, self.layout, self.buffers, self.model.constants
        turns = self._table.index_select(0, layout["positions"])
        x, seen = head.enter(head.embed(layout["tokens"]), self.given)
        for number, layer in enumerate(head.layers):
            if number:
                seen = head.norm(x, layer.attn_norm)
            head.look(layer, seen, buffers.qkv)
            norm = None if layer.head_norm is None else layer.head_norm * constants.heads[2] ** 0.5
            self.model.kernels.turn_and_store(
                buffers.qkv, self.model.held[number], turns, layout["places"], constants.heads,
                head_norm=norm, floor=constants.head_floor,
            )  # fmt: skip
            if self._reads and layer is head.layers[-1]:
                return  # keys and values are there, and what they see is nobody's concern
            self.model.kernels.attend(
                buffers.qkv, self.model.held[number], buffers.seen, layout, constants.heads,
                page_size=constants.page_size, window=None, scratch=buffers.scratch, skip=1,
            )  # fmt: skip
            x = head.gate(layer, x + torch.mm(buffers.seen, layer.attention_out))
        self.rows = head.rows(x if wanted is None else x.index_select(0, wanted))
        self.given.copy_(head.again(x))  # what a next step goes in with
