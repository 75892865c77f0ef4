"""Transformers of the llama kind in PyTorch: one lean forward pass over paged keys and values.

This module owns sequences and passes; the arithmetic is in `forward.py`, who sees whom in `attention.py`. What families
add (biases, norms of queries and keys, windows) comes from the file. fp32 on the CPU, bf16 on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from outrider.backends.attention import Ints, Span, build_blocks, build_lone_query, build_span
from outrider.backends.base import Spans
from outrider.backends.checks import check_spans
from outrider.backends.forward import Block, Constants, Rows, Work, compiled, run_layers
from outrider.backends.paged import PagedSequences, SequencesAhead, info_of
from outrider.backends.torch_common import array_of, dtype_for, sampling_for
from outrider.backends.weights import Loader
from outrider.kv.pages import Pages
from outrider.kv.store import PageStore
from outrider.models.base import ModelFile, TransformerSpec
from outrider.types import Scores

FEW = 64  # rows up to which buffers are kept
TILE = 8  # rows of every product in strict mode


Scored = tuple[torch.Tensor, dict[int, torch.Tensor]]  # logits [rows, columns], hidden states by layer [tokens, width]


class TransformerBackend(PagedSequences):
    """A model and its sequences. A draft may share the target's `pages`: its slots are the target's, then."""

    fingerprint: str | None = None  # of the weights, where they came from a file

    def __init__(
        self,
        file: ModelFile,
        pages: Pages,
        *,
        vocab_size: int | None = None,
        context: int | None = None,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        strict: bool = False,
    ) -> None:
        spec = file.spec
        assert isinstance(spec, TransformerSpec), f"{file.path} holds a {spec.family}"
        self.spec, self.pages = spec, pages
        self.device = torch.device(device)
        dtype = dtype or dtype_for(self.device)
        self.info = info_of(file, spec, pages, vocab_size, context)
        self.ops = sampling_for(self.device)
        self.weights = Loader(file, spec, dtype, self.device).load()
        self.strict = strict
        self._scratch = pages.num_pages * pages.page_size  # a place that belongs to no page
        shape = (spec.num_layers, self._scratch + 1, 2 * spec.num_kv_heads * spec.head_dim)
        whole = torch.empty(shape, dtype=dtype, device=self.device)
        self.store = PageStore(whole, spec.num_kv_heads, pages.page_size)
        self.number = pages.add_store(self.store)  # 0: the target, who opens and closes sequences
        windows = spec.windows or (None,) * spec.num_layers
        self._windows = sorted(set(windows), key=str)
        self._kinds = [self._windows.index(window) for window in windows]
        self._constants = Constants(
            floor=torch.tensor(math.sqrt(spec.width * spec.norm_eps), device=self.device),
            head_floor=spec.head_dim * spec.norm_eps,
            kv_heads=spec.num_kv_heads,
        )
        self._run_layers = compiled() if self.device.type == "cpu" else run_layers
        self._kept_rows: dict[int, Rows] = {}
        self._frequencies = np.array(spec.rope.frequencies, dtype=np.float32)

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        check_spans(spans, hidden, self.info, self.length)
        self._make_room(spans)
        with torch.inference_mode():
            logits, states = (self._score_strictly if self.strict else self._score_once)(spans, hidden)
        for slot, start, count in zip(spans.slots, spans.starts, spans.counts, strict=True):
            self._advance(slot, start + count)
        rows = [rows for rows in spans.rows if rows]
        return Scores(rows, array_of(logits), hidden={layer: array_of(state) for layer, state in states.items()})

    def _score_once(self, spans: Spans, hidden: Sequence[int]) -> Scored:
        """Everything in one pass, spans of one length side by side."""
        order = sorted(range(len(spans.slots)), key=lambda index: (spans.counts[index], spans.starts[index]))
        pieces = [self._piece(spans, index) for index in order]
        tokens = torch.as_tensor(spans.tokens, device=self.device)
        stands = _where(order, spans.counts)
        moved = None
        if order != sorted(order):
            moved = torch.tensor(_members(stands, spans.counts, spans.counts), device=self.device)
            tokens = torch.empty_like(tokens).index_copy_(0, moved, tokens)
        wanted = None
        if len(order) > 1 or spans.rows != spans.counts:
            members = _members(stands, spans.counts, spans.rows)
            wanted = torch.tensor(members, dtype=torch.int64, device=self.device)
        rows = self._rows(len(tokens))
        queries = rows.heads[:, : self.spec.num_heads]
        work = self._work(
            rows,
            positions=np.concatenate([piece.positions[piece.start :] for piece in pieces]),
            places=np.concatenate([piece.places[piece.start :] for piece in pieces]),
            blocks=[build_blocks(pieces, window, queries, self.store) for window in self._windows],
        )
        logits, states = self._forward(tokens, work, wanted, hidden)
        if moved is not None:
            states = {layer: state.index_select(0, moved) for layer, state in states.items()}
        return logits, states

    def _score_strictly(self, spans: Spans, hidden: Sequence[int]) -> Scored:
        """Tiles of one size, each query looking by itself: a row's bits depend on nothing but its own tokens.

        Slower, since short passes pay for whole tiles. What fills a tile up reads and writes the scratch place.
        """
        pieces = [self._piece(spans, index) for index in range(len(spans.slots))]
        filler = Span(0, 1, np.array([self._scratch]), np.zeros(1, dtype=np.int64), None)
        fed = [(piece, index) for piece in pieces for index in range(piece.count)]
        num_fed = len(fed)
        fed += [(filler, 0)] * (-num_fed % TILE)
        tokens = torch.zeros(len(fed), dtype=torch.int64, device=self.device)
        tokens[:num_fed] = torch.as_tensor(spans.tokens)
        rows = self._rows(TILE)
        queries = rows.heads[:, : self.spec.num_heads]
        tiles = []
        members = _members(_where(range(len(pieces)), spans.counts), spans.counts, spans.rows)
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        for at in range(0, len(fed), TILE):
            tile = list(enumerate(fed[at : at + TILE]))
            work = self._work(
                rows,
                positions=np.array([piece.positions[piece.start + index] for _, (piece, index) in tile]),
                places=np.array([piece.places[piece.start + index] for _, (piece, index) in tile]),
                blocks=[
                    [build_lone_query(piece, i, window, queries[row : row + 1], self.store) for row, (piece, i) in tile]
                    for window in self._windows
                ],
            )
            rows_here = [member - at for member in members if at <= member < at + TILE]
            logits, states = self._forward(tokens[at : at + TILE], work, None if rows_here else none, hidden)
            tiles.append((logits[rows_here], states))
        every = {layer: torch.cat([states[layer] for _, states in tiles])[:num_fed] for layer in hidden}
        return torch.cat([logits for logits, _ in tiles]), every

    def _piece(self, spans: Spans, index: int) -> Span:
        start, count, slot = spans.starts[index], spans.counts[index], spans.slots[index]
        pages, size, at = np.asarray(self.pages.leases[slot].pages), self.pages.page_size, np.arange(start + count)
        places = pages[at // size] * size + at % size
        return build_span(start, count, places, spans.parents.get(index))

    def _work(self, rows: Rows, positions: Ints, places: Ints, blocks: list[list[Block]]) -> Work:
        self._set_turns(rows, positions)
        return Work(rows, torch.from_numpy(places).to(self.device), blocks, self._kinds)

    def _set_turns(self, rows: Rows, positions: Ints) -> None:
        """How far queries and keys turn at these positions; values and what is not rotary stay as they are (1)."""
        spec = self.spec
        angles = positions[:, None].astype(np.float32) * self._frequencies
        turns = np.empty(angles.shape, dtype=np.complex64)
        turns.real, turns.imag = np.cos(angles), np.sin(angles)
        every = rows.turns.view(len(positions), -1, spec.head_dim // 2)
        turning = every[:, : spec.num_heads + spec.num_kv_heads, : angles.shape[1]]
        turning.copy_(torch.from_numpy(turns * np.float32(spec.rope.scale)).unsqueeze(1))

    def _forward(self, tokens: torch.Tensor, work: Work, wanted: torch.Tensor | None, hidden: Sequence[int]) -> Scored:
        """Logits of the rows wanted (None: all) and the hidden states asked for, of one pass."""
        layers, x = self.weights.layers, work.rows.x
        torch.index_select(self.weights.embedding, 0, tokens, out=x)
        states: dict[int, torch.Tensor] = {}
        inner = {layer for layer in hidden if layer <= len(layers)}
        for start, stop in pairwise([0, *sorted({*inner, len(layers)})]):
            self._run_layers(layers[start:stop], start, self.store.layers, work, self._constants)
            if stop in inner:
                states[stop] = x.clone()
        if len(inner) < len(set(hidden)):  # after the norm is asked for, too
            normed = states[len(layers) + 1] = self._norm(x)
            return self.unembed(normed if wanted is None else normed.index_select(0, wanted)), states
        return self.unembed(self._norm(x if wanted is None else x.index_select(0, wanted))), states

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        """The norm before the output."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        normed: torch.Tensor = x / length.hypot_(self._constants.floor) * self.weights.norm
        return normed.to(x.dtype)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weights.embedding.index_select(0, tokens)

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.mm(hidden, self.weights.output).float()

    def view(self, layers: int) -> TransformerBackend:
        return FirstLayers(self, layers)

    def _rows(self, count: int) -> Rows:
        """Buffers for a pass of so many rows; those for a few are kept, since they come all the time."""
        rows = self._kept_rows.get(count)
        if rows is None:
            rows = _build_rows(count, self.spec, self.weights.embedding)
            if count <= FEW:
                self._kept_rows[count] = rows
        return rows


class FirstLayers(SequencesAhead, TransformerBackend):
    """A model's first layers as a model of their own, for layer skip: the same weights, cache and slots."""

    def __init__(self, whole: TransformerBackend, layers: int) -> None:
        self.__dict__.update(whole.__dict__)  # all of it is shared
        SequencesAhead.__init__(self, whole)
        self.weights = whole.weights._replace(layers=whole.weights.layers[:layers])
        self.info = replace(whole.info, name=f"{whole.info.name}, {layers} layers", num_hidden=0, heads=False)


def _build_rows(count: int, spec: TransformerSpec, like: torch.Tensor) -> Rows:
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv, gate_up = like.new_empty(count, queries + 2 * keys), like.new_empty(count, 2 * spec.ffn_width)
    pairs = qkv.view(count, -1, 2)
    gate, up = gate_up.chunk(2, dim=-1)
    return Rows(
        x=like.new_empty(count, spec.width),
        length=torch.empty(count, 1, device=like.device),
        normed=like.new_empty(count, spec.width),
        qkv=qkv,
        heads=qkv[:, : queries + keys].view(count, -1, spec.head_dim),
        pairs=torch.view_as_complex(pairs) if like.dtype == torch.float32 else pairs,  # none are made of two bf16
        turns=torch.ones(count, pairs.shape[1], dtype=torch.complex64, device=like.device),
        fresh=qkv[:, queries:],
        gate_up=gate_up,
        gate=gate,
        up=up,
    )


def _members(stands: Sequence[int], counts: Sequence[int], rows: Sequence[int]) -> list[int]:
    """Where the last `rows` tokens of each span stand."""
    return [
        at
        for first, count, wanted in zip(stands, counts, rows, strict=True)
        for at in range(first + count - wanted, first + count)
    ]


def _where(order: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Where each span's first token stands when the spans come in this order."""
    stands, at = [0] * len(counts), 0
    for index in order:
        stands[index] = at
        at += counts[index]
    return stands
