"""One pass over arrays of fixed sizes: run as it stands, or recorded once as a CUDA graph and replayed.

A graph replays kernels with the arguments they were recorded with, so everything that differs between passes lies in
one array of integers (`layout.py`), and a pass with fewer rows is filled up: what fills it reads and writes a place of
the cache that belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from outrider.backends.cuda.forward import Buffers, Constants, Long, build_buffers, run_layers
from outrider.backends.cuda.graphs import Graphs
from outrider.backends.cuda.layout import Ints, Rows, Shape, fill, most_splits, size_of, view
from outrider.backends.weights import Weights
from outrider.models.base import TransformerSpec


class Model(NamedTuple):
    """What all passes of a model have in common."""

    spec: TransformerSpec
    weights: Weights
    held: Sequence[torch.Tensor]  # keys and values of each layer
    kernels: Any
    constants: Constants
    frequencies: torch.Tensor
    scratch: int  # the place that belongs to nobody
    graphs: Graphs | None = None  # None: passes run kernel by kernel


@dataclass(slots=True)
class Work:
    """What passes of up to so many rows work in."""

    buffers: Buffers
    logits: torch.Tensor  # of the rows wanted
    holder: Program | None = None  # whose results are in here

    def of(self, rows: int) -> tuple[Buffers, torch.Tensor]:
        """The part that a pass of fewer rows needs."""
        if rows == len(self.buffers.x):
            return self.buffers, self.logits
        x, qkv, seen, gated, normed, scratch = self.buffers
        return Buffers(x[:rows], qkv[:rows], seen[:rows], gated[:rows], normed[:rows], scratch), self.logits[:rows]


def build_work(
    spec: TransformerSpec,
    rows: int,
    like: torch.Tensor,
    seats: tuple[int, int] | None = None,
    num_wanted: int | None = None,
) -> Work:
    """seats: rows in groups, and splits of each; None: as many as there may ever be."""
    seated, num_splits = seats or (rows, most_splits(spec.num_kv_heads))
    logits = torch.empty(rows if num_wanted is None else num_wanted, spec.num_columns, device=like.device)
    return Work(build_buffers(rows, seated * num_splits, spec, like), logits)


class Later(NamedTuple):
    """Tokens of a pass that only the device knows: which of those that are fed, and their values."""

    places: torch.Tensor  # [n] int64
    tokens: torch.Tensor  # [n] int32


class Program:
    """Everything a pass of one shape needs; `run` may be called again and again."""

    def __init__(
        self,
        model: Model,
        shape: Shape,
        room: int,
        hidden: Sequence[int],
        work: Work,
        num_splits: int | None = None,
        wanted: torch.Tensor | None = None,
        long: Sequence[Long] = (),
    ) -> None:
        """room: integers of the table. num_splits: of a row at most. wanted: rows whose logits are computed, or all."""
        device = model.weights.embedding.device
        self.model, self.hidden, self.wanted, self.long = model, hidden, wanted, long
        self.room = room
        size = size_of(shape) + room
        self._staged = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host: Ints = self._staged.numpy()
        self._numbers = torch.empty(size, dtype=torch.int32, device=device)
        self._copied: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.layout = view(self._numbers, shape, num_splits or most_splits(model.spec.num_kv_heads))
        self.work = work
        self.buffers, self.logits = work.of(shape.rows)
        self._held = self.buffers.x.new_empty(len(hidden), *self.buffers.x.shape)
        self.states = dict(zip(hidden, self._held, strict=True))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._upload = (self._numbers, self._staged)
        self.num_staged = 0  # who wants to move it on must know that nobody else has staged something

    def stage(self, rows: Rows) -> None:
        """Write down the next pass, but for its tokens; while another one runs, if that can be."""
        if self._copied is not None:
            self._copied.synchronize()  # the pass before this one has read what is written over now
        self.num_staged += 1
        used = fill(rows, self.layout.shape, self.model.scratch, self._host)
        self._upload = (self._numbers[:used], self._staged[:used])

    def run(
        self,
        tokens: Any,
        later: Later | None = None,
        by: torch.Tensor | None = None,
        bits: torch.Tensor | None = None,
    ) -> None:
        """What was staged, with these tokens, which may be on the device already. Fills `logits` and `states`.

        What only the device may know: `by`, how much further chains stand than what was staged says; `bits`, which of
        a tree's first 32 nodes each row sees.
        """
        on_device = isinstance(tokens, torch.Tensor) and tokens.device.type != "cpu"
        if not on_device:
            self._host[: len(tokens)] = tokens
        self.upload()
        if on_device:
            self.layout["tokens"][: len(tokens)].copy_(tokens)
        if later is not None:
            self.layout["tokens"].index_copy_(0, later.places, later.tokens)
        if bits is not None:
            self.layout["low_bits"][: len(bits)].copy_(bits)
        if by is None:
            self._go()
        else:
            self.run_on(tokens, by)

    def upload(self) -> None:
        """What was staged is on its way to the device."""
        self.work.holder = self
        there, here = self._upload
        there.copy_(here, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def run_on(self, tokens: torch.Tensor, by: torch.Tensor) -> None:
        """The same once more, its chains so many places further on and with these tokens, which the device knows."""
        self.work.holder = self
        self.move(tokens, by)
        self._go()

    def move(self, tokens: torch.Tensor, by: torch.Tensor) -> None:
        """The chains are so many places further on, and are fed these tokens next."""
        self.model.kernels.advance(
            self.layout, tokens, by, page_size=self.model.constants.page_size, max_splits=self.layout.num_splits
        )

    def _go(self) -> None:
        if self._graph is None:
            self.compute()
        else:
            self._graph.replay()

    @property
    def is_recorded(self) -> bool:
        return self._graph is not None

    def record(self) -> None:
        """From the next run on it is a graph. Has run at least once, so that nothing is built while recording."""
        assert self.model.graphs is not None, "this model has no graphs"
        self._graph = self.model.graphs.record(self.compute)

    def compute(self) -> None:
        """The pass itself, kernel by kernel, over what was staged."""
        model, layout, buffers = self.model, self.layout, self.buffers
        weights, spec, x = model.weights, model.spec, buffers.x
        torch.index_select(weights.embedding, 0, layout["tokens"], out=x)
        turns = self._turns(layout["positions"])
        num_layers, done = len(weights.layers), 0
        inner = sorted({layer for layer in self.hidden if layer <= num_layers} | {num_layers})
        for stop in inner:
            run_layers(
                model.kernels, weights.layers[done:stop], done, model.held, buffers,
                layout if layout.shape.groups else None, turns, layout["places"], self.long, model.constants,
            )  # fmt: skip
            if stop in self.hidden:
                self.states[stop].copy_(x)
            done = stop
        if self.wanted is not None and spec.num_layers + 1 not in self.hidden:
            x = x.index_select(0, self.wanted)
        normed = buffers.normed[: len(x)]
        model.kernels.normed(x, normed, norm=model.constants.floor, weight=weights.norm)
        if spec.num_layers + 1 in self.hidden:
            self.states[spec.num_layers + 1].copy_(normed)
            normed = normed if self.wanted is None else normed.index_select(0, self.wanted)
        if len(normed):
            model.kernels.product(normed, weights.output.t(), self.logits, tile=model.constants.tile)

    def _turns(self, positions: torch.Tensor) -> torch.Tensor:
        """Cosine and sine of how far each pair of a head turns. [rows, pairs, 2]"""
        angles = positions[:, None] * self.model.frequencies
        return torch.stack([angles.cos(), angles.sin()], dim=-1) * self.model.spec.rope.scale

    def copied(self, rows: slice | torch.Tensor) -> dict[int, torch.Tensor]:
        """The states of some rows, which the next run leaves alone: one copy for all layers."""
        some = self._held[:, rows].clone() if isinstance(rows, slice) else self._held.index_select(1, rows)
        return dict(zip(self.hidden, some.unbind(), strict=True))
