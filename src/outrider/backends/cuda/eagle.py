"""An EAGLE head on a GPU: chains of guesses without a look of the host in between, each step a recorded graph.

The head's layers are torch's (`eagle_head`), but for rope and attention, which go by the pass's integers. An entry lies
one place further than the number of its sequence says, so the first place of a sequence is nobody's, and is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from outrider.backends.cuda.forward import Constants
from outrider.backends.cuda.layout import (
    GRAPH_ROWS,
    WORK_ROWS,
    Shape,
    arrange,
    graph_rows,
    group_room,
    most_splits,
    tile_for,
)
from outrider.backends.cuda.program import Model, Program, Work, build_work
from outrider.backends.eagle_head import EagleHead
from outrider.backends.head_base import Entries
from outrider.backends.torch_common import on, sent
from outrider.sampling.ops import Drawing


class HeadProgram(Program):
    """A pass of the head over arrays of fixed sizes. `given` goes in beside the tokens: hidden states."""

    def __init__(self, head: EagleHead, model: Model, shape: Shape, room: int, work: Work) -> None:
        super().__init__(model, shape, room, (), work)
        self._head = head
        self.given = self.buffers.x.new_zeros(shape.rows, head.spec.layer.width)
        self.rows = self.given  # logits over the target's tokens, once it ran

    def _compute(self) -> None:
        head, layout, buffers, constants = self._head, self.layout, self.buffers, self.model.constants
        turns = self._turns(layout["positions"])
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
            self.model.kernels.attend(
                buffers.qkv, self.model.held[number], buffers.seen, layout, constants.heads,
                page_size=constants.page_size, window=None, scratch=buffers.scratch, skip=1,
            )  # fmt: skip
            x = head.gate(layer, x + torch.mm(buffers.seen, layer.attention_out))
        self.rows = head.rows(x)
        self.given.copy_(head.again(x))  # what a next step goes in with


class Grown(NamedTuple):
    """The nodes of some trees, on the host. [B, nodes]"""

    tokens: Any
    parents: Any  # -1 is the last token before the tree
    confidences: Any  # log of how likely each node is, its ancestors included


class Tips(NamedTuple):
    """Nodes that are fed next. [B, per]"""

    tokens: torch.Tensor
    numbers: torch.Tensor  # among all nodes
    confidences: torch.Tensor
    hidden: torch.Tensor  # [B, per, width] what they go in with
    bits: torch.Tensor  # nodes that were fed and that they follow


class _Children(NamedTuple):
    tokens: torch.Tensor  # [n, per]
    confidences: torch.Tensor


def _likeliest(rows: torch.Tensor, warp: torch.Tensor, per: int) -> _Children:
    """The best children of each row, and log of how likely they are. [n, V], warp [n, 2]"""
    x = (rows - rows.max(-1, keepdim=True).values) / warp[:, :1]
    x = torch.where(x < warp[:, 1:], -torch.inf, x)
    best = x.topk(min(per, x.shape[1]), dim=-1)
    return _Children(best.indices, best.values - x.exp().sum(-1, keepdim=True).log())


class HeadRoller:
    """Lets a head guess on by itself."""

    def __init__(self, head: EagleHead, target: Model, *, graphs: bool) -> None:
        layer, pages = head.spec.layer, head.pages
        self._head, self._has_graphs = head, graphs
        self._device = head.target.device
        self._share = layer.num_heads // layer.num_kv_heads
        self._like = head.store.edges
        self._model = Model(
            spec=layer,
            weights=SimpleNamespace(embedding=self._like),  # type: ignore[arg-type]
            held=head.store.layers,
            kernels=target.kernels,
            constants=Constants(
                heads=(layer.num_heads, layer.num_kv_heads, layer.head_dim),
                floor=0.0,
                head_floor=layer.head_dim * layer.norm_eps,
                page_size=pages.page_size,
                windows=(None,) * layer.num_layers,
                tile=None,
            ),
            frequencies=torch.tensor(layer.rope.frequencies, device=self._device),
            scratch=pages.num_pages * pages.page_size,
            pool=target.pool,
            stream=target.stream,
        )
        self._programs: dict[Shape, HeadProgram] = {}
        self._work: dict[int, Work] = {}  # by rows: programs run one after another
        self._ones = torch.ones(GRAPH_ROWS[-1], dtype=torch.int32, device=self._device)

    def roll(self, entries: Entries, steps: int, drawing: Drawing) -> bool:
        """Read entries, whose last outputs are drawn from; then guess on until `steps` tokens are drawn for each slot.

        False: it cannot, and nothing changed.
        """
        count, pages = len(entries.slots), self._head.pages
        if not self._is_for_us(entries):
            return False
        ends = [start + read for start, read in zip(entries.starts, entries.counts, strict=True)]
        if not all(pages.make_room(slot, end + steps + 1) for slot, end in zip(entries.slots, ends, strict=True)):
            return False
        with torch.inference_mode(), on(self._device):
            first = self._stage(entries, entries.starts, entries.counts, 0)
            first.given[: len(entries.tokens)] = entries.hidden
            self._run(first, np.asarray(entries.tokens))
            lasts = sent([end - 1 for end in accumulate(entries.counts)], np.int64, self._device)
            tokens = drawing.step(first.rows[lasts])
            if steps == 1:
                return True
            hidden = first.given[lasts]
            program = self._stage(entries, ends, [1] * count, steps - 2)
            program.given[:count] = hidden
            self._run(program, tokens)
            for _ in range(steps - 2):
                program.run_on(drawing.step(program.rows[:count]), self._ones[:count])
            drawing.step(program.rows[:count])
        return True

    def grow(self, entries: Entries, levels: int, per: int, warps: Sequence[tuple[float, float]]) -> Grown | None:
        """Read entries and grow a tree behind each: level by level the `per` likeliest children of `per` tips, of which
        the likeliest are the next tips. One copy to the host, at the end. None: it cannot, and nothing changed.

        warps: temperature and the logarithm of min_p of each.
        """
        count, fed = len(entries.slots), per * (levels - 1)
        if not self._is_for_us(entries):
            return None
        if fed >= 32 or count * per > GRAPH_ROWS[-1]:
            return None
        ends = [start + read for start, read in zip(entries.starts, entries.counts, strict=True)]
        pages = self._head.pages
        if not all(pages.make_room(slot, end + fed + 1) for slot, end in zip(entries.slots, ends, strict=True)):
            return None
        with torch.inference_mode(), on(self._device):
            first = self._stage(entries, entries.starts, entries.counts, 0)
            first.given[: len(entries.tokens)] = entries.hidden
            self._run(first, np.asarray(entries.tokens))
            lasts = sent([end - 1 for end in accumulate(entries.counts)], np.int64, self._device)
            warp = sent(list(warps), np.float32, self._device)
            children = _likeliest(first.rows[lasts], warp, per)
            nodes = [(children.tokens, torch.full_like(children.tokens, -1), children.confidences)]
            tips = Tips(
                tokens=children.tokens,
                numbers=torch.arange(per, device=self._device).expand(count, per),
                confidences=children.confidences,
                hidden=first.given[lasts][:, None].expand(count, per, -1),
                bits=torch.zeros(count, per, dtype=torch.int32, device=self._device),
            )
            for level in range(1, levels):
                tips = self._level(entries, ends, level, tips, warp, nodes)
            tokens, parents, confidences = (torch.cat(parts, dim=1) for parts in zip(*nodes, strict=True))
            whole = torch.stack([tokens.int(), parents.int(), confidences.view(torch.int32)]).cpu().numpy()
        return Grown(whole[0], whole[1], whole[2].view(np.float32))

    def _level(
        self,
        entries: Entries,
        ends: Sequence[int],
        level: int,
        tips: Tips,
        warp: torch.Tensor,
        nodes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    ) -> Tips:
        """Feed the tips, note their children, and choose the next tips."""
        count, per = tips.tokens.shape
        before = (level - 1) * per
        # who follows whom is known on the device alone; how deep they are is known here, which chains side by side say
        parents = [node - per if node >= per else -1 for node in range(before + per)]
        program = self._stage(entries, [end + before for end in ends], [per] * count, 0, parents)
        bits = tips.bits | (1 << torch.arange(before, before + per, dtype=torch.int32, device=self._device))
        program.given[: count * per] = tips.hidden.flatten(0, 1)
        self._run(program, tips.tokens.flatten(), bits.flatten())
        children = _likeliest(program.rows[: count * per], warp.repeat_interleave(per, dim=0), per)
        confidences = (tips.confidences.flatten()[:, None] + children.confidences).view(count, per * per)
        tokens = children.tokens.view(count, per * per)
        above = torch.arange(per, device=self._device).repeat_interleave(per).expand(count, -1)  # tip of each child
        first = per + (level - 1) * per * per
        nodes.append((tokens, tips.numbers.gather(1, above), confidences))
        best = confidences.topk(per, dim=1).indices.sort(dim=1).values
        parent = above.gather(1, best)
        outputs = program.given[: count * per].view(count, per, -1)
        return Tips(
            tokens=tokens.gather(1, best),
            numbers=best + first,
            confidences=confidences.gather(1, best),
            hidden=outputs.gather(1, parent[:, :, None].expand(-1, -1, outputs.shape[2])).clone(),
            bits=bits.gather(1, parent),
        )

    def _is_for_us(self, entries: Entries) -> bool:
        """Whether their passes are small, and those that do not see the beginning see nothing of some whole pages: then
        the others are a sequence of their own."""
        size = self._head.pages.page_size
        return not (
            entries.parents or len(entries.tokens) > GRAPH_ROWS[-1] or any(one % size for one in entries.firsts)
        )

    def _run(self, program: HeadProgram, tokens: Any, bits: torch.Tensor | None = None) -> None:
        if not self._has_graphs or program.is_recorded:
            program.run(tokens, bits=bits)
            return
        given = program.given.clone()  # running changes it, and recording only writes down
        program.run(tokens, bits=bits)
        program.given.copy_(given)
        program.record()
        program.run(tokens, bits=bits)

    def _stage(
        self,
        entries: Entries,
        starts: Sequence[int],
        counts: Sequence[int],
        ahead: int,
        parents: Sequence[int] | None = None,
    ) -> HeadProgram:
        """A pass behind entries. parents: of the trees that all of them are, if they are."""
        layer, pages, slots = self._model.spec, self._head.pages, entries.slots
        tile = tile_for(max(counts), self._share)
        rows = arrange(
            [start - first + 1 for start, first in zip(starts, entries.firsts, strict=True)],
            counts,
            [
                pages.leases[slot].pages[first // pages.page_size :]
                for slot, first in zip(slots, entries.firsts, strict=True)
            ],
            pages.page_size,
            {} if parents is None else dict.fromkeys(range(len(slots)), parents),
            tile=tile,
            max_splits=most_splits(layer.num_kv_heads),
            by_path=False,
            ahead=ahead,
        )
        shape = Shape(graph_rows(sum(counts)), group_room(rows.num_groups), tile, rows.tree)
        program = self._programs.get(shape)
        if program is None or program.room < len(rows.table):
            longest = min(-(-self._head.context // pages.page_size) + 1, pages.num_pages)
            room = max(len(rows.table), shape.rows * longest)
            most = next(size for size in WORK_ROWS if size >= shape.rows)
            if most not in self._work:  # without logits: each program has its own
                self._work[most] = build_work(layer, most, self._like, num_wanted=0)
            work = self._work[most]
            program = self._programs[shape] = HeadProgram(self._head, self._model, shape, room, work)
        program.stage(rows)
        return program
