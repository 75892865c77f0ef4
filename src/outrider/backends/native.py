"""Transformers of the llama kind on a CPU: quantised weights, and one call into native code for a whole pass.

The bits of a row depend on its own tokens alone, not on what else is in the pass, on chunks, chains or trees: native
code sums in the order of positions (see `native/kernels.h`). Which tokens see which keys, `native_plan.py` says.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.backends.base import Spans
from outrider.backends.checks import check_spans
from outrider.backends.native_head import NativeHead, can_compute
from outrider.backends.native_plan import Plan, Turns
from outrider.backends.native_weights import weights_of
from outrider.backends.paged import PagedSequences, SequencesAhead, info_of
from outrider.kv.host_store import HostStore
from outrider.kv.pages import Pages
from outrider.models.base import TransformerSpec
from outrider.models.gguf import GGUFFile
from outrider.models.heads import HeadFile
from outrider.native.binding import KV_TYPES, Model, Numbers, Pass, address_of, forward, use_threads
from outrider.native.library import num_threads
from outrider.native.sampling import NativeSampling
from outrider.types import Scores

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]


class NativeBackend(PagedSequences):
    """A model and its sequences. A draft may share the target's `pages`: its slots are the target's, then."""

    fingerprint: str | None = None  # of the weights, where they came from a file

    def __init__(
        self,
        file: GGUFFile,
        pages: Pages,
        *,
        vocab_size: int | None = None,
        context: int | None = None,
        threads: int | None = None,
        kv_type: str = "f16",
    ) -> None:
        spec = file.spec
        assert isinstance(spec, TransformerSpec), f"{file.path} holds a {spec.family}"
        use_threads(threads)
        self.spec, self.pages = spec, pages
        self.info = info_of(file, spec, pages, vocab_size, context)
        self.ops = NativeSampling()
        self.weights = weights_of(file, spec)
        self.store = HostStore(
            spec.num_layers, pages.num_pages, spec.num_kv_heads, spec.head_dim, pages.page_size, kv_type
        )
        self.number = pages.add_store(self.store)
        self._turns = Turns(spec.rope)
        self._layers = spec.num_layers  # that a pass goes through
        self._model = Model(
            num_layers=spec.num_layers,
            width=spec.width,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            ffn_width=spec.ffn_width,
            num_columns=spec.num_columns,
            rotary_pairs=len(spec.rope.frequencies),
            interleaved=spec.rope.interleaved,
            page_size=pages.page_size,
            eps=spec.norm_eps,
            embedding=self.weights.embedding.matrix,
            output=self.weights.output.matrix,
            output_norm=address_of(self.weights.norm),
            layers=ctypes.addressof(self.weights.layers),
            kv_type=KV_TYPES[kv_type],
            kv_cache=address_of(self.store.whole),
            num_pages=pages.num_pages,
        )

    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        check_spans(spans, hidden, self.info, self.length)
        self._make_room(spans)
        plan = Plan()
        for index, slot in enumerate(spans.slots):
            pages = self.pages.leases[slot].pages
            plan.add(spans.starts[index], spans.counts[index], pages, spans.parents.get(index), self.pages.page_size)
        logits, states = self._run(spans, plan, hidden)
        for slot, start, count in zip(spans.slots, spans.starts, spans.counts, strict=True):
            self._advance(slot, start + count)
        return Scores([rows for rows in spans.rows if rows], logits, hidden=states)

    def _run(self, spans: Spans, plan: Plan, hidden: Sequence[int]) -> tuple[Array, dict[int, Array]]:
        ends = list(accumulate(spans.counts))
        wanted = [row for end, rows in zip(ends, spans.rows, strict=True) for row in range(end - rows, end)]
        logits = np.empty((len(wanted), self.info.num_columns), dtype=np.float32)
        states = {layer: np.empty((ends[-1], self.spec.width), dtype=np.float32) for layer in hidden}
        addresses = (ctypes.c_void_p * max(1, len(states)))(*map(address_of, states.values()))
        turns = self._turns.reach(max(plan.positions))
        numbers = Numbers(**vars(plan), tokens=spans.tokens.tolist(), wanted=wanted, hidden_layers=list(states))
        forward(
            self._model,
            Pass(
                num_rows=ends[-1],
                num_layers=self._layers,
                turns=address_of(turns),
                num_wanted=len(wanted),
                logits=address_of(logits),
                num_hidden=len(states),
                hidden=ctypes.addressof(addresses),
                **numbers.addresses,
            ),
        )
        return logits, states

    def build_head(self, file: HeadFile) -> NativeHead | None:
        """An EAGLE head by the same kernels; None: torch must compute it."""
        return NativeHead(file, self) if can_compute(file) else None

    @property
    def num_threads(self) -> int:  # type: ignore[override]
        return num_threads()

    @property
    def device(self) -> torch.device:
        """Of torch's, for heads that it computes: nobody else needs it."""
        import torch

        return torch.device("cpu")

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.from_numpy(self.weights.embedding.rows(tokens.numpy()))

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.from_numpy(self.weights.output.multiply(hidden.numpy()))

    def view(self, layers: int) -> NativeBackend:
        return FirstLayers(self, layers)


class FirstLayers(SequencesAhead, NativeBackend):
    """A model's first layers as a model of their own, for layer skip: the same weights, cache and slots."""

    def __init__(self, whole: NativeBackend, layers: int) -> None:
        self.__dict__.update(whole.__dict__)  # all of it is shared
        SequencesAhead.__init__(self, whole)
        self._layers = layers
        self.info = replace(whole.info, name=f"{whole.info.name}, {layers} layers", num_hidden=0, heads=False)
