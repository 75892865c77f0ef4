"""An EAGLE head on a GPU: chains and trees of guesses without a look of the host in between. All of a chain is one
graph for a few jobs, and behind a verdict that only the device knows (`head_chain`); else each step is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from outrider.backends.cuda.forward import Constants
from outrider.backends.cuda.graphs import RECORDED
from outrider.backends.cuda.head_chain import MOST_RECORDED, ChainShape, HeadChain
from outrider.backends.cuda.head_program import HeadProgram
from outrider.backends.cuda.layout import (
    GRAPH_ROWS,
    WORK_ROWS,
    Rows,
    Shape,
    arrange,
    graph_rows,
    group_room,
    most_splits,
    tile_for,
)
from outrider.backends.cuda.measuring import Greedy
from outrider.backends.cuda.program import Model, Work, build_work
from outrider.backends.eagle_head import EagleHead
from outrider.backends.head_base import Entries, Judged
from outrider.backends.torch_common import on, sent
from outrider.sampling.ops import Drawing
from outrider.types import Array, Slot

SPARE = 64  # places behind the context that guesses may come to
AHEAD = 64  # tokens for which pages are taken ahead, where there are some
MANY = 128  # tokens of a prompt
MOST_CHAINS = 64  # shapes of rounds that are kept


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


class _Arranged(NamedTuple):
    """A pass as it will be staged."""

    rows: Rows
    shape: Shape


def _fits(program: HeadProgram, arranged: _Arranged) -> bool:
    """Whether it was built for passes like this one."""
    return program.layout.shape == arranged.shape and program.room >= len(arranged.rows.table)


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
            graphs=target.graphs,
        )
        self._programs: dict[tuple[Shape, bool], HeadProgram] = {}  # and whether it only reads
        self._chains: dict[ChainShape, HeadChain] = {}
        self._work: dict[int, Work] = {}  # by rows: programs run one after another
        angles = torch.arange(head.context + SPARE, device=self._device)[:, None] * self._model.frequencies
        self._turns = torch.stack([angles.cos(), angles.sin()], dim=-1) * layer.rope.scale
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
            if self._roll_at_once(entries, steps, drawing):
                return True
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

    def read(self, entries: Entries) -> bool:
        """`head_base.DeviceRoller.read`."""
        slots, starts, counts = entries.slots, entries.starts, entries.counts
        if entries.parents or any(first % self._head.pages.page_size for first in entries.firsts):
            return False
        ends = [start + count + 1 for start, count in zip(starts, counts, strict=True)]
        if not all(map(self._head.pages.make_room, slots, ends)):
            return False
        at = 0
        with torch.inference_mode(), on(self._device):
            for slot, first, start, count in zip(slots, entries.firsts, starts, counts, strict=True):
                for begin in range(0, count, GRAPH_ROWS[-1]):
                    size = min(GRAPH_ROWS[-1], count - begin)
                    staged = self._arrange([slot], [first], [start + begin], [size], 0)
                    program = self._program(staged, reads=True)
                    program.stage(staged.rows)
                    program.given[:size] = entries.hidden[at : at + size]
                    program.run(np.asarray(entries.tokens[at : at + size]))
                    at += size
        return True

    def may_follow(self, jobs: int, count: int) -> bool:
        return jobs * (count + 1) <= GRAPH_ROWS[-1]

    def roll_on(self, judged: Judged, steps: int, drawing: Drawing) -> Array | None:
        """`head_base.DeviceRoller.roll_on`. One graph; rounds that keep rows beside tokens are for others."""
        asked = getattr(drawing, "plainly", None)
        jobs, count, pages = len(judged.slots), judged.count, self._head.pages
        is_whole = not any(first % pages.page_size for first in judged.firsts)
        if asked is None or not is_whole or not self.may_follow(jobs, count):
            return None
        states = [torch.as_tensor(judged.states[layer]) for layer in self._head.hidden]
        with torch.inference_mode(), on(self._device):
            verdict = [torch.as_tensor(one) for one in (judged.drafted, judged.accepted, judged.following)]
            chain = self._run_chain(judged, ChainShape(jobs, count, steps), states, verdict, asked, drawing)
        if chain is None:
            return None
        for slot in judged.slots:
            pages.leases[slot].written = len(pages.leases[slot].pages) * pages.page_size
        return chain.fused

    def _roll_at_once(self, entries: Entries, steps: int, drawing: Drawing) -> bool:
        """`roll`, where so little is to be read that it can be as if chains had been judged: one graph."""
        asked, counts = getattr(drawing, "plainly", None), entries.counts
        if asked is None or max(counts) > steps + 1 or not self.may_follow(len(counts), steps):
            return False
        if len(counts) > MOST_RECORDED:  # of more jobs each step is a graph of its own, and reads no more than it must
            return False
        width, tokens, at = self._like.shape[1], np.zeros((len(counts), steps + 2), dtype=np.int32), 0
        hidden = entries.hidden.new_zeros(len(counts), steps + 1, width)
        for index, count in enumerate(counts):
            *kept, following = entries.tokens[at : at + count]
            tokens[index, : len(kept)], tokens[index, steps:] = kept, (count - 1, following)
            hidden[index, :count] = entries.hidden[at : at + count]
            at += count
        there = sent(tokens, np.int32, self._device)
        verdict = [there[:, :steps].contiguous(), there[:, steps], there[:, steps + 1]]
        shape = ChainShape(len(counts), steps, steps, is_fused=True)
        return self._run_chain(entries, shape, [hidden.flatten(0, 1)], verdict, asked, drawing) is not None

    def _run_chain(
        self,
        where: Entries | Judged,
        shape: ChainShape,
        states: Sequence[torch.Tensor],
        verdict: Sequence[torch.Tensor],
        asked: tuple[torch.Tensor, torch.Tensor],
        drawing: Drawing,
    ) -> HeadChain | None:
        """verdict: what was drafted, how much of it stays, and what follows. None: there is no room."""
        ends = [start + shape.judged + 2 + shape.steps for start in where.starts]  # if all drafts stay
        if max(ends) > self._head.context or not all(map(self._head.pages.make_room, where.slots, ends)):
            return None
        chain = self._chain(where, ends, shape)
        drafted, accepted, following = verdict
        drawn = chain.run(where.starts, states, drafted, accepted, following, asked, graphs=self._has_graphs)
        drawing.take(drawn)  # type: ignore[attr-defined]
        return chain

    def roll_s(self, jobs: int, steps: int) -> float | None:
        """`head_base.DeviceRoller.roll_s`."""
        target: Any = self._head.target
        zeros = self._ones.new_zeros
        states = self._like.new_zeros(jobs * (steps + 1), self._head.spec.target_width)
        with target.sequences(jobs, 0, 2 * steps + 8) as slots:
            if slots is None or not self.may_follow(jobs, steps):
                return None
            judged = Judged(
                slots, [0] * jobs, [0] * jobs, steps, zeros(jobs * steps), zeros(jobs), zeros(jobs),
                dict.fromkeys(self._head.hidden, states),
            )  # fmt: skip
            greedy: Any = [Greedy(slot) for slot in slots]

            def run() -> Array | None:
                drawing = target.ops.drawing(greedy, steps)
                return None if drawing is None else self.roll_on(judged, steps, drawing)

            seconds: float | None = None if run() is None else target.median_s(run)
            hidden = self._like.new_zeros(jobs, self._like.shape[1])
            entries = Entries(slots, [0] * jobs, [0] * jobs, [1] * jobs, [0] * jobs, hidden)
            for _ in range(RECORDED):  # the beginning of a chain is another one, and is built here, too
                self.roll(entries, steps, target.ops.drawing(greedy, steps))
            return seconds

    def read_s(self) -> float | None:
        """`head_base.DeviceRoller.read_s`."""
        target: Any = self._head.target
        many = min(MANY, self._head.context - 1)
        with target.sequences(1, 0, many + 8) as slots:
            if slots is None:
                return None
            hidden = self._like.new_zeros(many, self._like.shape[1])
            entries = Entries(slots, [0], [0], [many], [0] * many, hidden)
            seconds: float = target.median_s(lambda: self.read(entries))
            return seconds / many

    def _chain(self, judged: Entries | Judged, ends: Sequence[int], shape: ChainShape) -> HeadChain:
        """For the pass that reads what stays, and the one that every step is. While sequences stay on their pages, they
        are not written down again: some are taken ahead."""
        pages, slots, firsts = self._head.pages, judged.slots, judged.firsts
        chain, leases = self._chains.get(shape), [pages.leases[slot].pages for slot in slots]
        if chain is not None and chain.goes_on(slots, firsts, leases, ends):
            return chain
        size = pages.page_size
        for slot, end in zip(slots, ends, strict=True):
            pages.make_room(slot, min(end + min(AHEAD, pages.spare(slot)), self._head.context))
        leases = [pages.leases[slot].pages for slot in slots]
        ahead = min(len(ids) * size - end for ids, end in zip(leases, ends, strict=True))
        counts, once, starts = [shape.judged + 1] * shape.jobs, [1] * shape.jobs, [one + 1 for one in judged.starts]
        read = self._arrange(slots, firsts, judged.starts, counts, ahead)
        step = self._arrange(slots, firsts, starts, once, shape.judged + shape.steps - 2 + ahead)
        if chain is None or not (_fits(chain.read, read) and _fits(chain.step, step)):
            chain = HeadChain(self._head, self._build(read), self._build(step), shape)
            if len(self._chains) == MOST_CHAINS and shape not in self._chains:
                del self._chains[next(iter(self._chains))]  # what runs of it, runs before all that comes
            self._chains[shape] = chain
        noted = [ids[: (end + ahead) // size] for ids, end in zip(leases, ends, strict=True)]
        chain.begin(slots, firsts, noted, read.rows, step.rows)
        return chain

    def grow(self, entries: Entries, levels: int, per: int, warps: Sequence[tuple[float, float]]) -> Grown | None:
        """`head_base.DeviceRoller.grow`. One copy to the host, at the end."""
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
        staged = self._arrange(entries.slots, entries.firsts, starts, counts, ahead, parents)
        program = self._program(staged)
        program.stage(staged.rows)
        return program

    def _program(self, staged: _Arranged, *, reads: bool = False) -> HeadProgram:
        program = self._programs.get((staged.shape, reads))
        if program is None or not _fits(program, staged):
            program = self._programs[staged.shape, reads] = self._build(staged, reads=reads)
        return program

    def _arrange(
        self,
        slots: Sequence[Slot],
        firsts: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        ahead: int,
        parents: Sequence[int] | None = None,
    ) -> _Arranged:
        layer, pages = self._model.spec, self._head.pages
        tile = tile_for(max(counts), self._share)
        rows = arrange(
            [start - first + 1 for start, first in zip(starts, firsts, strict=True)],
            counts,
            [pages.leases[slot].pages[first // pages.page_size :] for slot, first in zip(slots, firsts, strict=True)],
            pages.page_size,
            {} if parents is None else dict.fromkeys(range(len(slots)), parents),
            tile=tile,
            max_splits=most_splits(layer.num_kv_heads),
            by_path=False,
            ahead=ahead,
        )
        return _Arranged(rows, Shape(graph_rows(sum(counts)), group_room(rows.num_groups), tile, rows.tree))

    def _build(self, arranged: _Arranged, *, reads: bool = False) -> HeadProgram:
        (rows, shape), pages = arranged, self._head.pages
        longest = min(-(-self._head.context // pages.page_size) + 1, pages.num_pages)
        room = max(len(rows.table), shape.rows * longest)
        most = next(size for size in WORK_ROWS if size >= shape.rows)
        if most not in self._work:  # without logits: each program has its own
            self._work[most] = build_work(self._model.spec, most, self._like, num_wanted=0)
        return HeadProgram(self._head, self._model, shape, room, self._work[most], self._turns, reads=reads)
