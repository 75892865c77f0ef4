"""EAGLE-3 heads on a CPU by the kernels of the native backend: numpy's arrays, quantised weights, no torch.

A pass of a head is one of a small model whose first layer reads hidden states beside tokens (`native/forward.h`).
Chains are drawn in one call (`native/roll.h`). What entries are and where they lie is told in `head_base.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.backends.head_base import Edges, Entries, draft_ids, settle_on
from outrider.backends.native_head_weights import HeadWeights
from outrider.backends.native_plan import Plan, Turns
from outrider.kv.host_store import HostStore
from outrider.kv.pages import Page
from outrider.models.head_spec import EagleSpec
from outrider.models.heads import HeadFile
from outrider.native.binding import KV_TYPES, Model, Numbers, Pass, Roll, address_of, forward, roll
from outrider.native.sampling import NativeDrawing
from outrider.sampling.ops import Drawing

if TYPE_CHECKING:
    from outrider.backends.native import NativeBackend

Array = np.ndarray[Any, Any]


def can_compute(file: HeadFile) -> bool:
    """Whether this head is of the kind that runs here: heads before EAGLE-3 enter their layers in another way."""
    return isinstance(file.spec, EagleSpec) and file.spec.version == 3


class HostEdges(HostStore):
    """Keys and values by page, and for each page the fused hidden state of its last token."""

    def __init__(self, edges: Array, *shape: Any) -> None:
        super().__init__(*shape)
        self.edges = edges  # [pages, width]

    def copy_page(self, source: Page, target: Page) -> None:
        super().copy_page(source, target)
        self.edges[target] = self.edges[source]


class NativeHead(Edges):
    """`head_base.Head` in numpy and native code."""

    def __init__(self, file: HeadFile, target: NativeBackend) -> None:
        spec = file.spec
        assert isinstance(spec, EagleSpec) and can_compute(file), f"{file.path} is no EAGLE-3 head"
        settle_on(file, target)
        self.spec, self.target, self.pages = spec, target, target.pages
        self.name = file.name
        self.hidden = spec.layers_of(target.spec.num_layers)
        self.context = min(spec.layer.context, target.info.context)
        self.weights = HeadWeights(file, target.weights, draft_ids(file, target), target.info.vocab_size)
        layer, pages = spec.layer, self.pages
        self.store = HostEdges(
            np.empty((pages.num_pages, layer.width), dtype=np.float32),
            layer.num_layers,
            pages.num_pages,
            layer.num_kv_heads,
            layer.head_dim,
            pages.page_size,
            target.store.kv_type,
        )
        self.number = pages.add_store(self.store)
        self._turns = Turns(layer.rope)
        self._model = Model(
            num_layers=layer.num_layers,
            width=layer.width,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            ffn_width=layer.ffn_width,
            num_columns=self.weights.output.matrix.rows,
            rotary_pairs=len(layer.rope.frequencies),
            interleaved=layer.rope.interleaved,
            page_size=pages.page_size,
            eps=layer.norm_eps,
            keeps_normed=spec.norm_before_residual,
            embedding=self.weights.embedding.matrix,
            output=self.weights.output.matrix,
            output_norm=address_of(self.weights.norm),
            input_norm=address_of(self.weights.input_norm),
            layers=ctypes.addressof(self.weights.layers),
            kv_type=KV_TYPES[self.store.kv_type],
            kv_cache=address_of(self.store.whole),
            num_pages=pages.num_pages,
        )

    def roller(self) -> NativeHead:
        return self

    def join(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts)

    def nothing(self) -> Array:
        return np.empty((0, self.spec.layer.width), dtype=np.float32)

    def pick(self, states: Mapping[int, Array], rows: Sequence[int]) -> list[Array]:
        is_run = rows[-1] - rows[0] == len(rows) - 1  # they come in order, most often without a gap
        at = slice(rows[0], rows[-1] + 1) if is_run else rows
        return [states[layer][at] for layer in self.hidden]

    def fuse(self, features: Sequence[Array]) -> Array:
        weights = self.weights
        if weights.fc_norms:
            features = [self._norm(one, weight) for one, weight in zip(features, weights.fc_norms, strict=True)]
        joined = np.concatenate(features, axis=1)
        if weights.fc_norm is not None:
            joined = self._norm(joined, weights.fc_norm)
        fused = weights.fc.multiply(joined)
        return fused if weights.fc_bias is None else fused + weights.fc_bias

    def fill_cache(self, entries: Entries) -> None:
        self._make_room(entries)
        arguments, _kept = self._arguments(entries, 0, {"hidden_layers": [], "wanted": []})
        forward(self._model, Pass(**arguments))

    def read(self, entries: Entries) -> Array:
        self._make_room(entries)
        outputs = np.empty((len(entries.tokens), self.spec.layer.width), dtype=np.float32)
        address = ctypes.c_void_p(address_of(outputs))
        with_layer = {"hidden_layers": [self.spec.layer.num_layers], "wanted": []}
        arguments, _kept = self._arguments(entries, 0, with_layer)
        forward(self._model, Pass(num_hidden=1, hidden=ctypes.addressof(address), **arguments))
        return outputs

    def roll(self, entries: Entries, steps: int, drawing: Drawing) -> bool:
        """As `head_base.Roller` says: one call for all steps."""
        assert isinstance(drawing, NativeDrawing) and not entries.parents
        ends = [start + count for start, count in zip(entries.starts, entries.counts, strict=True)]
        if not all(self.pages.make_room(slot, end + steps) for slot, end in zip(entries.slots, ends, strict=True)):
            return False
        wanted = [end - 1 for end in accumulate(entries.counts)]
        arguments, _kept = self._arguments(entries, steps, {"wanted": wanted})
        chains = Roll(
            num_chains=len(entries.slots),
            steps=steps,
            vocab_size=self.target.info.vocab_size,
            hidden_layer=self.spec.layer.num_layers + self.spec.norm_output,
            ids=address_of(self.weights.ids),
            jobs=drawing.settings,
            lengths=address_of(drawing.lengths),
            streams=address_of(drawing.streams),
            drawn=address_of(drawing.drawn),
            probs=address_of(drawing.probs(self.target.info.vocab_size)),
        )
        return roll(self._model, Pass(num_wanted=len(wanted), **arguments), chains)

    def again(self, outputs: Array) -> Array:
        return self._norm(outputs, self.weights.norm) if self.spec.norm_output else outputs

    def own_rows(self, outputs: Array) -> tuple[Array, Array | None]:
        rows, ids = self.weights.output.multiply(self._norm(outputs, self.weights.norm)), self.weights.ids
        return (rows[:, : self.target.info.vocab_size], None) if ids is None else (rows, ids)

    def logits(self, outputs: Array) -> Array:
        rows, ids = self.own_rows(outputs)
        if ids is None:
            return rows
        whole = np.full((len(rows), self.target.info.vocab_size), -np.inf, dtype=np.float32)
        whole[:, ids] = rows
        return whole

    def _arguments(
        self, entries: Entries, further: int, lists: Mapping[str, Sequence[int]]
    ) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """What a pass over the entries is given, and what must live as long. further: steps that come behind it."""
        plan, size = Plan(), self.pages.page_size
        for index, (slot, first, start, count) in enumerate(
            zip(entries.slots, entries.firsts, entries.starts, entries.counts, strict=True)
        ):
            pages, parents = self.pages.leases[slot].pages, entries.parents.get(index)
            plan.add(start + 1, count, pages, parents, size, skipped=first + 1)  # an entry lies at its token's place
        hidden = np.ascontiguousarray(entries.hidden, dtype=np.float32)
        turns = self._turns.reach(max(plan.positions) + further)
        numbers = Numbers(**vars(plan), tokens=entries.tokens, **lists)
        arguments = {
            "num_rows": len(entries.tokens),
            "num_layers": self.spec.layer.num_layers,
            "inputs": address_of(hidden),
            "turns": address_of(turns),
            **numbers.addresses,
        }
        return arguments, (hidden, turns, numbers)

    def _norm(self, x: Array, weight: Array) -> Array:
        eps = np.float32(self.spec.layer.norm_eps)
        normed: Array = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps) * weight
        return normed
