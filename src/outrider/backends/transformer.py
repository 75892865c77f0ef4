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
from outrider.backends.base import ModelInfo, Paths, Spans, State
from outrider.backends.checks import check_rewind, check_spans
from outrider.backends.forward import Block, Constants, Rows, Work, compiled, run_layers
from outrider.backends.torch_common import array_of, dtype_for, sampling_for
from outrider.backends.weights import Loader
from outrider.errors import BackendError
from outrider.kv.pages import Pages
from outrider.kv.store import PageStore
from outrider.models.base import ModelFile, TransformerSpec
from outrider.types import Scores, Slot

FEW = 64  # rows up to which buffers are kept
TILE = 8  # rows of every product in strict mode


Scored = tuple[torch.Tensor, dict[int, torch.Tensor]]  # logits [rows, columns], hidden states by layer [tokens, width]


class TransformerBackend:
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
        strict: bool = False,
    ) -> None:
        spec = file.spec
        assert isinstance(spec, TransformerSpec), f"{file.path} holds a {spec.family}"
        self.spec, self.pages = spec, pages
        self.device = torch.device(device)
        dtype = dtype_for(self.device)
        self.info = ModelInfo(
            name=file.name,
            vocab_size=vocab_size or spec.num_columns,
            num_columns=spec.num_columns,
            context=min(context or spec.context, spec.context, pages.num_pages * pages.page_size),
            eos_ids=file.eos_ids,
            trees=True,
            num_layers=spec.num_layers,
            num_hidden=spec.num_layers + 2,
            heads=True,
        )
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

    def open(self, tokens: Sequence[int] = (), limit: int | None = None, tenant: str = "") -> Slot | None:
        assert self.number == 0, "a draft that shares pages is given the target's slots"
        return self.pages.open(tokens, limit, tenant)

    def length(self, slot: Slot) -> int:
        if slot not in self.pages.leases:
            raise BackendError(f"there is no slot {slot}")
        return self.pages.length(slot, self.number)

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        check_spans(spans, hidden, self.info, self.length)
        self._make_room(spans)
        with torch.inference_mode():
            logits, states = (self._score_strictly if self.strict else self._score_once)(spans, hidden)
        for slot, start, count in zip(spans.slots, spans.starts, spans.counts, strict=True):
            self._advance(slot, start + count)
        rows = [rows for rows in spans.rows if rows]
        return Scores(rows, array_of(logits), hidden={layer: array_of(state) for layer, state in states.items()})

    def _advance(self, slot: Slot, length: int) -> None:
        self.pages.advance(slot, self.number, length)

    def keep(self, slots: Sequence[Slot], lengths: Sequence[int], paths: Paths | None = None) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            if paths and slot in paths:
                path, held = list(paths[slot]), self.length(slot)
                start = length - len(path)
                if start < 0 or sorted(set(path)) != path or not all(start <= place < held for place in path):
                    raise BackendError(f"slot {slot} holds {held} tokens and cannot keep places {path} as its last")
                self.pages.move(slot, self.number, path, start)
            self.rewind(slot, length)

    def publish(self, slot: Slot, tokens: Sequence[int]) -> None:
        self.pages.publish(slot, tokens)

    def rewind(self, slot: Slot, length: int) -> None:
        held = self.length(slot)
        check_rewind(slot, held, length, oldest=0)
        if length < held:
            self.pages.rewind(slot, self.number, length)

    def fork(self, slot: Slot) -> Slot | None:
        self.length(slot)  # says so when there is no such slot
        return self.pages.fork(slot)

    def close(self, slot: Slot) -> None:
        self.length(slot)
        if self.number == 0:
            self.pages.close(slot)
        else:  # the target still holds the sequence, or is about to close it
            self.pages.rewind(slot, self.number, 0)

    def save(self, slot: Slot) -> State:
        self.length(slot)
        return self.pages.save(slot)

    def load(self, state: State) -> Slot | None:
        return self.pages.load(state)

    def reserve(self, slot: Slot, length: int) -> bool:
        return self.pages.make_room(slot, length)

    def would_free(self, slot: Slot) -> int:
        return self.pages.would_free(slot)

    def swap_out(self, slot: Slot) -> State:
        return self.pages.save(slot, shared=False)

    def swap_in(self, state: State, tokens: Sequence[int], limit: int, tenant: str = "") -> Slot | None:
        return self.pages.load(state, tokens, limit, tenant)

    def _make_room(self, spans: Spans) -> None:
        """Pages for everything that is fed."""
        for slot, start, count in zip(spans.slots, spans.starts, spans.counts, strict=True):
            if not self.pages.make_room(slot, start + count):
                raise BackendError(f"no page is left for slot {slot} ({self.pages.usage}); give the cache more tokens")

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


class FirstLayers(TransformerBackend):
    """A model's first layers as a model of their own, for layer skip: the same weights, cache and slots.

    Keys and values of these layers are the whole model's, so there is nothing to read before it can draft. It writes
    from the whole model's length on; how far is known here alone, and the whole model's next pass writes over it.
    """

    def __init__(self, whole: TransformerBackend, layers: int) -> None:
        self.__dict__.update(whole.__dict__)  # all of it is shared
        self._whole = whole
        self.weights = whole.weights._replace(layers=whole.weights.layers[:layers])
        self.info = replace(whole.info, name=f"{whole.info.name}, {layers} layers", num_hidden=0, heads=False)
        self._ahead: dict[Slot, int] = {}

    def open(self, tokens: Sequence[int] = (), limit: int | None = None, tenant: str = "") -> Slot | None:
        raise BackendError("the first layers of a model use its slots")

    def length(self, slot: Slot) -> int:
        return self._ahead.get(slot) or self._whole.length(slot)

    def _advance(self, slot: Slot, length: int) -> None:
        self._ahead[slot] = length

    def rewind(self, slot: Slot, length: int) -> None:
        check_rewind(slot, self.length(slot), length, oldest=self._whole.length(slot))
        self._ahead[slot] = length

    def fork(self, slot: Slot) -> Slot | None:
        raise BackendError("the first layers of a model use its slots")

    def close(self, slot: Slot) -> None:
        """Forget what is ahead of the whole model."""
        self._ahead.pop(slot, None)


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
