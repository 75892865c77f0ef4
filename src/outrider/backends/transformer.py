"""Transformers of the llama kind in PyTorch: one lean forward pass over paged keys and values.

Projections that read the same input are one matrix, queries and keys turn in place as complex numbers, nothing is a
module. What families add (biases, norms of queries and keys, windows) comes from the file. fp32 on the CPU, where torch
has no quick half precision; bf16 on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from outrider.backends.attention import Group, attend, build_groups, build_span
from outrider.backends.base import ModelInfo, Paths, Spans, State
from outrider.backends.checks import check_rewind, check_spans
from outrider.backends.torch_common import array_of, dtype_for, sampling_for
from outrider.backends.weights import Layer, Loader, Norm
from outrider.errors import BackendError
from outrider.kv.pages import Pages
from outrider.kv.store import PageStore
from outrider.models.base import ModelFile, TransformerSpec
from outrider.types import Scores, Slot


@dataclass(slots=True)
class Pass:
    """What one forward pass feeds, where it goes and who sees whom. Spans of one length stand side by side."""

    tokens: torch.Tensor  # [N]
    places: torch.Tensor  # [N] where keys and values go
    turns: torch.Tensor  # [N, 1, pairs] complex: the rotation of each position
    groups: dict[int | None, list[Group]]  # by window
    rows: torch.Tensor | None  # the tokens to score, in the caller's order; None: all, as they stand
    order: torch.Tensor | None  # where each of the caller's tokens stands; None: as they came


class TransformerBackend:
    """A model and its sequences. A draft may share the target's `pages`: its slots are the target's, then."""

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
            num_hidden=spec.num_layers + 1,
        )
        self.ops = sampling_for(self.device)
        self.weights = Loader(file, spec, dtype, self.device).load()
        kv_width = spec.num_kv_heads * spec.head_dim
        self.store = PageStore(spec.num_layers, pages.num_pages, pages.page_size, kv_width, dtype, self.device)
        self.number = pages.add_store(self.store)  # 0: the target, who opens and closes sequences
        self._windows = spec.windows or (None,) * spec.num_layers
        self._frequencies = torch.tensor(spec.rope.frequencies, dtype=torch.float32, device=self.device)

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
            logits, states = self._forward(self._plan(spans), hidden)
        for slot, start, count in zip(spans.slots, spans.starts, spans.counts, strict=True):
            self.pages.advance(slot, self.number, start + count)
        rows = [rows for rows in spans.rows if rows]
        return Scores(rows, array_of(logits), hidden={layer: array_of(state) for layer, state in states.items()})

    def keep(self, slots: Sequence[Slot], lengths: Sequence[int], paths: Paths | None = None) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            if paths and slot in paths:
                path, held = list(paths[slot]), self.length(slot)
                start = length - len(path)
                if not all(start <= place < held for place in path):
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
        return self.pages.fork(slot)

    def close(self, slot: Slot) -> None:
        if self.number == 0:
            self.pages.close(slot)
        else:  # the target still holds the sequence, or is about to close it
            self.pages.rewind(slot, self.number, 0)

    def save(self, slot: Slot) -> State:
        length = self.length(slot)
        kept = self.store.read(self.pages.places(slot, range(length)))
        return {"length": length, "kv": kept.float().cpu().numpy()}

    def load(self, state: State) -> Slot | None:
        length = state["length"]
        slot = self.open((), length)
        if slot is not None:
            self.pages.make_room(slot, length)
            self.store.write(self.pages.places(slot, range(length)), torch.from_numpy(state["kv"]))
            self.pages.advance(slot, self.number, length)
        return slot

    def _make_room(self, spans: Spans) -> None:
        """Pages for everything that is fed."""
        for slot, start, count in zip(spans.slots, spans.starts, spans.counts, strict=True):
            if not self.pages.make_room(slot, start + count):
                raise BackendError(f"no page is left for slot {slot} ({self.pages.usage}); give the cache more tokens")

    def _plan(self, spans: Spans) -> Pass:
        """Put spans of one length side by side, and work out where everything is."""
        order = sorted(range(len(spans.slots)), key=spans.counts.__getitem__)
        pieces = []
        for index in order:
            start, count, slot = spans.starts[index], spans.counts[index], spans.slots[index]
            places = np.asarray(self.pages.places(slot, range(start + count)))
            pieces.append(build_span(start, count, places, spans.parents.get(index)))
        tokens = torch.as_tensor(spans.tokens, device=self.device)
        stands = _where(order, spans.counts)
        moved = None
        if order != sorted(order):
            ranges = [np.arange(at, at + count) for at, count in zip(stands, spans.counts, strict=True)]
            moved = torch.from_numpy(np.concatenate(ranges)).to(self.device)
            tokens = torch.empty_like(tokens).index_copy_(0, moved, tokens)
        written = np.concatenate([piece.places[piece.start :] for piece in pieces])
        return Pass(
            tokens=tokens,
            places=torch.from_numpy(written).to(self.device),
            turns=self._turns(np.concatenate([piece.start + piece.depths for piece in pieces])),
            groups={window: build_groups(pieces, window, self.device) for window in set(self._windows)},
            rows=self._rows(spans, stands),
            order=moved,
        )

    def _turns(self, positions: np.ndarray) -> torch.Tensor:
        """The rotation of each position as complex numbers, [N, 1, pairs]."""
        angles = torch.outer(torch.from_numpy(positions).to(self.device, torch.float32), self._frequencies)
        return torch.polar(torch.full_like(angles, self.spec.rope.scale), angles)[:, None]

    def _rows(self, spans: Spans, stands: Sequence[int]) -> torch.Tensor | None:
        if len(spans.slots) == 1 and spans.rows == spans.counts:
            return None
        wanted: list[int] = []
        for at, count, rows in zip(stands, spans.counts, spans.rows, strict=True):
            wanted += range(at + count - rows, at + count)
        return torch.tensor(wanted, dtype=torch.int64, device=self.device)

    def _forward(self, work: Pass, hidden: Sequence[int]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Logits of the rows wanted, [R, columns], and the hidden states asked for, [N, width] each."""
        weights = self.weights
        states: dict[int, torch.Tensor] = {}
        x = functional.embedding(work.tokens, weights.embedding)
        for number, layer in enumerate(weights.layers):
            if number in hidden:
                states[number] = x.clone()
            self._attention(x, layer, self.store.layers[number], work, work.groups[self._windows[number]])
            self._feed_forward(x, layer)
        if len(weights.layers) in hidden:
            states[len(weights.layers)] = x
        if work.order is not None:
            states = {number: state.index_select(0, work.order) for number, state in states.items()}
        if work.rows is not None:
            x = x.index_select(0, work.rows)
        return functional.linear(_normed(x, weights.norm), weights.output).float(), states

    def _attention(
        self, x: torch.Tensor, layer: Layer, held: torch.Tensor, work: Pass, groups: Sequence[Group]
    ) -> None:
        """Adds the layer's attention to x [N, width]; keys and values go into `held`."""
        spec = self.spec
        qkv = functional.linear(_normed(x, layer.attention_norm), layer.qkv, layer.qkv_bias)
        turning = qkv[:, : (spec.num_heads + spec.num_kv_heads) * spec.head_dim].view(len(qkv), -1, spec.head_dim)
        if layer.head_norm is not None:
            turning.copy_(_normed(turning, layer.head_norm))
        _turn(turning, work.turns)
        held.index_copy_(0, work.places, qkv[:, spec.num_heads * spec.head_dim :])
        x.add_(functional.linear(attend(qkv, held, groups, spec.num_heads, spec.head_dim), layer.attention_out))

    def _feed_forward(self, x: torch.Tensor, layer: Layer) -> None:
        gate, up = functional.linear(_normed(x, layer.ffn_norm), layer.gate_up).chunk(2, dim=-1)
        x.add_(functional.linear(functional.silu(gate).mul_(up), layer.down))


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """The RMS norm in four kernels: torch's own is eight small ones on a CPU, 30 us a row instead of 16."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return (x / torch.hypot(length, norm.floor)).mul_(norm.weight).to(x.dtype)


def _turn(heads: torch.Tensor, turns: torch.Tensor) -> None:
    """Rotary positions, in place. heads: [N, heads, head_dim], the pairs that turn together side by side."""
    size = turns.shape[-1]
    pairs = heads[..., : 2 * size].view(*heads.shape[:-1], size, 2)
    if heads.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(turns)
    else:  # there are no complex numbers of two bf16
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * turns))


def _where(order: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Where each span's first token stands when the spans come in this order."""
    stands, at = [0] * len(counts), 0
    for index in order:
        stands[index] = at
        at += counts[index]
    return stands
