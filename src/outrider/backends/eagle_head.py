"""EAGLE heads in torch. What entries are and where they lie is told in `head_base.py`; a tree of them is read level by
level (`attention.build_span`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from outrider.backends.attention import Span, build_blocks, build_span
from outrider.backends.base import HeadHost
from outrider.backends.forward import Block, attend
from outrider.backends.head_base import Edges, Entries, Roller, settle_on
from outrider.backends.heads import DraftVocabulary, is_embedding, is_output, load, output_of
from outrider.backends.torch_common import array_of, sent
from outrider.kv.pages import Page
from outrider.kv.store import PageStore
from outrider.models.head_spec import EagleSpec
from outrider.models.heads import HeadFile
from outrider.types import Array


class PageEdges(PageStore):
    """Keys and values by place, and for each page the fused hidden state of its last token."""

    def __init__(self, whole: torch.Tensor, num_heads: int, page_size: int, edges: torch.Tensor) -> None:
        super().__init__(whole, num_heads, page_size)
        self.edges = edges  # [pages, width]

    def copy_page(self, source: Page, target: Page) -> None:
        super().copy_page(source, target)
        self.edges[target] = self.edges[source]


class _Layer(NamedTuple):
    """Matrices are turned over: a row times one gives its output. [inputs, outputs]"""

    attn_norm: torch.Tensor | None
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norm: torch.Tensor | None  # of queries and keys, [heads + kv heads, head_dim]
    attention_out: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class _Work(NamedTuple):
    """One pass, for all layers."""

    qkv: torch.Tensor  # [N, queries | keys | values], a buffer
    turns: torch.Tensor  # [N, 1, pairs] complex
    places: torch.Tensor  # [N]
    blocks: list[Block]


class EagleHead(Edges):
    """`head_base.Head` in torch, where the target keeps its heads."""

    own_rows = None

    def __init__(self, file: HeadFile, target: HeadHost) -> None:
        spec = file.spec
        assert isinstance(spec, EagleSpec), f"{file.path} holds no EAGLE head"
        settle_on(file, target)
        self.spec, self.target, self.pages = spec, target, target.pages
        self.name = file.name
        self.hidden = spec.layers_of(target.spec.num_layers)
        self.context = min(spec.layer.context, target.info.context)
        self.vocabulary = DraftVocabulary(file, target)
        self._file = file
        self._load()
        self.store = self._build_store()
        self.number = self.pages.add_store(self.store)
        self._frequencies = np.array(spec.layer.rope.frequencies, dtype=np.float32)

    def roller(self) -> Roller | None:
        build = getattr(self.target, "roller", None)
        built: Roller | None = None if build is None else build(self)
        return built

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def nothing(self) -> torch.Tensor:
        return self._fc.new_empty(0, self.spec.layer.width)

    def pick(self, states: Mapping[int, Array], rows: Sequence[int]) -> list[torch.Tensor]:
        is_run = rows[-1] - rows[0] == len(rows) - 1  # they come in order, most often without a gap: no copy, then
        at = slice(rows[0], rows[-1] + 1) if is_run else sent(rows, np.int64, self.target.device)
        return [torch.as_tensor(states[layer])[at] for layer in self.hidden]

    def fuse(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """Hidden states of the target, one tensor for each of `hidden`, as entries take them. [n, width]"""
        with torch.inference_mode():
            features = [one.to(self._fc) for one in features]
            if self.spec.version == 1:
                return features[0]
            if self._fc_norms:
                features = [self.norm(one, weight) for one, weight in zip(features, self._fc_norms, strict=True)]
            joined = torch.cat(list(features), dim=-1)
            if self._fc_norm is not None:
                joined = self.norm(joined, self._fc_norm)
            return self._project(joined)

    def fill_cache(self, entries: Entries) -> None:
        self.read(entries)

    def read(self, entries: Entries) -> torch.Tensor:
        """Outputs of the entries: what follows their tokens. [N, width]"""
        self._make_room(entries)
        order = sorted(range(len(entries.slots)), key=lambda index: (entries.counts[index], entries.starts[index]))
        spans = [self._span(entries, index) for index in order]
        ends = np.cumsum(entries.counts)
        moved = np.concatenate([np.arange(ends[index] - entries.counts[index], ends[index]) for index in order])
        with torch.inference_mode():
            at = sent(moved, np.int64, self.target.device)
            tokens = sent(entries.tokens, np.int64, self.target.device)[at]
            x = self._forward(self.embed(tokens), entries.hidden.to(self._fc)[at], self._work(spans))
            return torch.empty_like(x).index_copy_(0, at, x)

    def again(self, outputs: torch.Tensor) -> torch.Tensor:
        """Outputs as the hidden states of entries that guess on."""
        if not self.spec.norm_output:
            return outputs
        assert self._output_norm is not None
        return self.norm(outputs, self._output_norm)

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Logits over the target's tokens. [n, width] -> [n, V]"""
        with torch.inference_mode():
            x = outputs if self._output_norm is None else self.norm(outputs, self._output_norm)
            rows = self.target.unembed(x) if self._output is None else torch.mm(x, self._output).float()
            return self.vocabulary.spread(rows)

    def logits(self, outputs: torch.Tensor) -> Array:
        return array_of(self.rows(outputs))

    def _span(self, entries: Entries, index: int) -> Span:
        first, start, count = entries.firsts[index], entries.starts[index], entries.counts[index]
        pages, size = np.asarray(self.pages.leases[entries.slots[index]].pages), self.pages.page_size
        at = np.arange(first + 1, start + count + 1)
        return build_span(start - first, count, pages[at // size] * size + at % size, entries.parents.get(index))

    def _work(self, spans: Sequence[Span]) -> _Work:
        layer, device = self.spec.layer, self.target.device
        positions = np.concatenate([span.positions[span.start :] + 1 for span in spans])  # an entry lies one further on
        places = np.concatenate([span.places[span.start :] for span in spans])
        angles = positions[:, None].astype(np.float32) * self._frequencies
        turns = np.empty(angles.shape, dtype=np.complex64)
        turns.real, turns.imag = np.cos(angles), np.sin(angles)
        heads = layer.num_heads + 2 * layer.num_kv_heads
        qkv = self._fc.new_empty(len(positions), heads * layer.head_dim)
        queries = qkv.view(len(positions), heads, layer.head_dim)[:, : layer.num_heads]
        return _Work(
            qkv,
            torch.from_numpy(turns * np.float32(layer.rope.scale)).unsqueeze(1).to(device),
            torch.from_numpy(places).to(device),
            build_blocks(spans, None, queries, self.store),
        )

    def enter(self, embedding: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What passes the first layer by, and what it sees."""
        first = self.layers[0]
        if self.spec.version == 3:
            normed = self.norm(hidden, self._hidden_norm)
            x = normed if self.spec.norm_before_residual else hidden
            return x, torch.cat([self.norm(embedding, first.attn_norm), normed], dim=-1)
        if self._embedding_norm is not None:
            embedding = self.norm(embedding, self._embedding_norm)
        x = self._project(torch.cat([embedding, hidden], dim=-1))
        return x, x if first.attn_norm is None else self.norm(x, first.attn_norm)

    def gate(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        """The second half of a layer."""
        gate, up = torch.mm(self.norm(x, layer.ffn_norm), layer.gate_up).chunk(2, dim=-1)
        return x + torch.mm(functional.silu(gate) * up, layer.down)

    def _forward(self, embedding: torch.Tensor, hidden: torch.Tensor, work: _Work) -> torch.Tensor:
        x, seen = self.enter(embedding, hidden)
        for number, layer in enumerate(self.layers):
            if number:
                seen = self.norm(x, layer.attn_norm)
            x = x + self._attend(layer, number, seen, work)
            x = self.gate(layer, x)
        return x

    def _attend(self, layer: _Layer, number: int, seen: torch.Tensor, work: _Work) -> torch.Tensor:
        spec, qkv = self.spec.layer, work.qkv
        self.look(layer, seen, qkv)
        turning = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        heads = qkv[:, :turning].view(len(qkv), -1, spec.head_dim)
        if layer.head_norm is not None:
            heads.copy_(self.norm(heads, layer.head_norm))
        rotary = heads[:, :, : 2 * work.turns.shape[2]]
        pairs = torch.view_as_complex(rotary.float().reshape(*rotary.shape[:2], -1, 2))
        rotary.copy_(torch.view_as_real(pairs * work.turns).flatten(2))
        held = self.store.layers[number]
        held.index_copy_(0, work.places, qkv[:, spec.num_heads * spec.head_dim :])
        return torch.mm(attend(work.blocks, number, held, spec.num_kv_heads), layer.attention_out)

    def look(self, layer: _Layer, seen: torch.Tensor, qkv: torch.Tensor) -> None:
        """Queries, keys and values."""
        if layer.qkv_bias is None:
            torch.mm(seen, layer.qkv, out=qkv)
        else:
            torch.addmm(layer.qkv_bias, seen, layer.qkv, out=qkv)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.target.embed(tokens) if self._embedding is None else self._embedding.index_select(0, tokens)

    def _project(self, joined: torch.Tensor) -> torch.Tensor:
        return torch.mm(joined, self._fc) if self._fc_bias is None else torch.addmm(self._fc_bias, joined, self._fc)

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        assert weight is not None
        if weight.ndim == 1:
            return functional.rms_norm(x, weight.shape, weight, self.spec.layer.norm_eps)
        return (functional.rms_norm(x.float(), x.shape[-1:], None, self.spec.layer.norm_eps) * weight).to(x.dtype)

    def _build_store(self) -> PageEdges:
        layer, pages = self.spec.layer, self.pages
        places = pages.num_pages * pages.page_size + 1  # the last one is nobody's, for what fills a pass up
        shape = (layer.num_layers, places, 2 * layer.num_kv_heads * layer.head_dim)
        edges = self._fc.new_empty(pages.num_pages, layer.width)
        return PageEdges(self._fc.new_zeros(shape), layer.num_kv_heads, pages.page_size, edges)

    def _load(self) -> None:
        spec = self.spec
        self._fc, self._fc_bias = self._get("fc.weight").t(), self._maybe("fc.bias")
        self._fc_norm = self._maybe("fc_norm.weight")
        norms = [f"fc_norm.{index}.weight" for index in range(len(self.hidden))]
        self._fc_norms = [self._get(name) for name in norms if name in self._file.shapes]
        self._embedding = self._own("token_embd.weight", is_embedding)
        self._embedding_norm = self._maybe("token_embd_norm.weight")
        self._hidden_norm = self._maybe("blk.0.hidden_norm.weight")
        self._output_norm = self._maybe("output_norm.weight")
        output = self._own("output.weight", is_output)
        self._output = None if output is None else output.t()
        ids = self.vocabulary.ids
        if output is None and ids is not None and len(ids) < self.target.spec.num_columns:  # some rows of the target's
            self._output = output_of(self.target, self.vocabulary.ids).to(self._fc)
        self.layers = [self._layer(f"blk.{index}.") for index in range(spec.layer.num_layers)]

    def _layer(self, prefix: str) -> _Layer:
        spec, biased = self.spec.layer, f"{prefix}attn_q.bias" in self._file.shapes
        heads = spec.num_heads + spec.num_kv_heads
        qkv = torch.cat([self._get(f"{prefix}attn_{part}.weight") for part in "qkv"])
        bias = torch.cat([self._get(f"{prefix}attn_{part}.bias") for part in "qkv"]) if biased else None
        head_norm = None
        if f"{prefix}attn_q_norm.weight" in self._file.shapes:
            queries, keys = (self._get(f"{prefix}attn_{part}_norm.weight") for part in "qk")
            head_norm = torch.stack([queries] * spec.num_heads + [keys] * spec.num_kv_heads)[:, self._pairs()]
        for rows in (qkv, bias):
            if rows is not None:
                turning = rows[: heads * spec.head_dim].view(heads, spec.head_dim, *rows.shape[1:])
                turning.copy_(turning[:, self._pairs()])
        return _Layer(
            attn_norm=self._maybe(f"{prefix}attn_norm.weight"),
            qkv=qkv.t(),
            qkv_bias=bias,
            head_norm=head_norm,
            attention_out=self._get(f"{prefix}attn_output.weight").t(),
            ffn_norm=self._get(f"{prefix}ffn_norm.weight"),
            gate_up=torch.cat([self._get(f"{prefix}ffn_{part}.weight") for part in ("gate", "up")]).t(),
            down=self._get(f"{prefix}ffn_down.weight").t(),
        )

    def _pairs(self) -> torch.Tensor:
        """Where each dimension of a head comes from: (0, d/2), (1, d/2 + 1), ... become neighbours."""
        half = len(self.spec.layer.rope.frequencies)
        order = torch.arange(self.spec.layer.head_dim, device=self.target.device)
        order[: 2 * half] = order[: 2 * half].view(2, half).t().reshape(-1)
        return order

    def _get(self, name: str) -> torch.Tensor:
        return load(self._file, name, self.target)

    def _maybe(self, name: str) -> torch.Tensor | None:
        return self._get(name) if name in self._file.shapes else None

    def _own(self, name: str, is_targets: Callable[[torch.Tensor, HeadHost], bool]) -> torch.Tensor | None:
        """A matrix of its own; None where it has none, or a copy of the target's: that one is here already."""
        own = self._maybe(name)
        return None if own is not None and is_targets(own, self.target) else own
