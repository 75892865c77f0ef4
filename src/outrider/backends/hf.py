"""Any causal language model of `transformers` as a backend: for the many families that have no backend of their own.

Sequences are not batched: a pass is one forward per span, and caches grow by copying, so this is the slow way. Each
slot has the cache the model makes itself. What that cache can do is tried out once, at construction (`hf_probe.py`):
whether several tokens may follow a cached past, and whether it can be cropped. Where it cannot (recurrent models,
sliding windows that drop entries), `info.max_rewind` is 0 and the engine drafts at most one token, judged before it is
fed. Trees are refused. Nothing is fetched, no remote code is run, no pickle is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from outrider.backends.base import Backend, ModelInfo, Paths, Spans, State
from outrider.backends.checks import check_chains, check_rewind, check_spans
from outrider.errors import BackendError, MissingPackageError, ModelFileError
from outrider.models.gguf import end_tokens, read_metadata
from outrider.types import Scores, Slot

try:
    import torch
    from torch import Tensor
    from transformers import AutoModelForCausalLM, PreTrainedModel
except ImportError as error:
    raise MissingPackageError(f"{error.name} is not installed; run: pip install 'outrider[hf]'") from error

from outrider.backends.hf_probe import Calls, context_of, probe
from outrider.backends.torch_common import array_of, sampling_for


@dataclass(slots=True)
class Held:
    """A slot: the model's own cache (None without tokens) and how many tokens are in it."""

    cache: Any = None
    length: int = 0


class HFBackend(Backend):
    """`vocab_size` defaults to the logit columns, `context` to what the configuration names.

    Hidden states are taken at the layers themselves, so the last one is before the final norm (that of transformers'
    `output_hidden_states` is after it).
    """

    fingerprint: str | None = None  # of the weights, where they came from a file

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_size: int | None = None,
        name: str | None = None,
        eos_ids: Sequence[int] = (),
        device: str = "cpu",
        context: int | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._calls = Calls(model.to(self._device).eval(), self._device)  # type: ignore[arg-type]
        name = name or model.config.name_or_path or type(model).__name__
        context = context_of(self._calls, name) if context is None else context
        found = probe(self._calls, name, context)
        self._chunked = found.chunked
        self._template = found.cache
        self.info = ModelInfo(
            name=name,
            vocab_size=found.num_columns if vocab_size is None else vocab_size,
            num_columns=found.num_columns,
            context=context,
            eos_ids=tuple(eos_ids),
            max_rewind=None if found.croppable else 0,
            num_hidden=found.num_hidden,
        )
        self.ops = sampling_for(self._device)
        self._slots: dict[Slot, Held] = {}
        self._next_slot = 0

    @classmethod
    def from_path(
        cls,
        path: str | Path,
        *,
        device: str = "cpu",
        vocab_size: int | None = None,
        name: str | None = None,
        eos_ids: Sequence[int] | None = None,
        context: int | None = None,
    ) -> Self:
        """A safetensors folder or a GGUF file. `eos_ids=None` takes the model's own."""
        path = Path(path)
        model = _load(path, torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16)
        if eos_ids is None:
            eos_ids = _eos_ids(path, model)
        return cls(
            model,
            vocab_size=vocab_size,
            name=name or path.name,
            eos_ids=eos_ids,
            device=device,
            context=context,
        )

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def open(self, tokens: Sequence[int] = (), limit: int | None = None, tenant: str = "") -> Slot | None:
        return self._add(Held())

    def length(self, slot: Slot) -> int:
        return self._held(slot).length

    @torch.inference_mode()
    def score(self, spans: Spans, hidden: Sequence[int] = ()) -> Scores:
        check_spans(spans, hidden, self.info, self.length)
        fed = torch.as_tensor(spans.tokens, device=self._device)
        logits = [torch.empty(0, self.info.num_columns, device=self._device)]
        states: dict[int, list[Tensor]] = {index: [] for index in hidden}
        begin = 0
        for slot, count, rows in zip(spans.slots, spans.counts, spans.rows, strict=True):
            logits += self._feed(self._held(slot), fed[begin : begin + count], rows, states)
            begin += count
        return Scores(
            [rows for rows in spans.rows if rows],
            array_of(torch.cat(logits)),
            hidden={index: array_of(torch.cat(parts)) for index, parts in states.items()},
        )

    def keep(self, slots: Sequence[Slot], lengths: Sequence[int], paths: Paths | None = None) -> None:
        check_chains(paths, self.info)
        for slot, length in zip(slots, lengths, strict=True):
            self.rewind(slot, length)

    def publish(self, slot: Slot, tokens: Sequence[int]) -> None:
        pass  # every slot has a cache of its own

    def rewind(self, slot: Slot, length: int) -> None:
        held = self._held(slot)
        check_rewind(slot, held.length, length, oldest=held.length if self.info.max_rewind == 0 else 0)
        if length == 0:
            held.cache = None
        elif length < held.length:
            held.cache.crop(length - held.length)
        held.length = length

    def fork(self, slot: Slot) -> Slot | None:
        return self._add(deepcopy(self._held(slot)))

    def close(self, slot: Slot) -> None:
        self._held(slot)
        del self._slots[slot]

    def save(self, slot: Slot) -> State:
        held = self._held(slot)
        layers = [] if held.cache is None else [_exported(vars(layer)) for layer in held.cache.layers]
        return {"length": held.length, "layers": layers}

    def load(self, state: State) -> Slot | None:
        held = Held(None, state["length"])
        if held.length:
            held.cache = deepcopy(self._template)
            if len(state["layers"]) != len(held.cache.layers):
                given, wanted = len(state["layers"]), len(held.cache.layers)
                raise BackendError(f"the saved state has {given} layers, {self.info.name} has {wanted}")
            for layer, saved in zip(held.cache.layers, state["layers"], strict=True):
                vars(layer).update(_adopted(saved, vars(layer)))
        return self._add(held)

    def _feed(self, held: Held, tokens: Tensor, rows: int, states: dict[int, list[Tensor]]) -> list[Tensor]:
        """Feed a span and return its wanted rows. Models that cannot read on in chunks get one token at a time."""
        pieces = [tokens] if self._chunked or held.cache is None else list(torch.chunk(tokens, len(tokens)))
        logits = []
        left = len(tokens)
        for piece in pieces:
            left -= len(piece)
            wanted = min(len(piece), max(0, rows - left))
            step = self._calls.forward(piece, held.cache, wanted, tuple(states))
            held.cache = step.cache
            held.length += len(piece)
            logits.append(step.logits)
            for index, part in step.hidden.items():
                states[index].append(part)
        return logits

    def _held(self, slot: Slot) -> Held:
        held = self._slots.get(slot)
        if held is None:
            raise BackendError(f"there is no slot {slot}; {len(self._slots)} are open")
        return held

    def _add(self, held: Held) -> Slot:
        slot = Slot(self._next_slot)
        self._next_slot += 1
        self._slots[slot] = held
        return slot


def _load(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    if not path.exists():
        raise ModelFileError(f"{path}: there is no such file or folder")
    folder, options = path, {"use_safetensors": True}
    if path.is_file():
        folder, options = path.parent, {"gguf_file": path.name}  # type: ignore[dict-item]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, dtype=dtype, output_loading_info=True, **options
        )
    except Exception as error:
        reason = " ".join(str(error).split()).split(". ")[0] or type(error).__name__
        raise ModelFileError(f"{path}: transformers cannot load it: {reason}") from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would go on with random numbers in their place
        raise ModelFileError(f"{path}: {len(missing)} tensors are missing, {missing[0]} is one; fetch the model again")
    return model  # type: ignore[no-any-return]


def _eos_ids(path: Path, model: PreTrainedModel) -> tuple[int, ...]:
    """As our own readers find them: a GGUF file's keys and texts, or the generation settings and the configuration."""
    config = model.config.get_text_config()
    if path.is_file():
        return end_tokens(path, read_metadata(path), config.vocab_size)
    ids: list[int] = []
    for source in (model.generation_config, model.config, config):
        given = getattr(source, "eos_token_id", None)
        ids += [] if given is None else [given] if isinstance(given, int) else given
    return tuple(dict.fromkeys(ids))


def _exported(value: Any) -> Any:
    """A cache layer's data without torch: tensors become arrays of their own, what is no data is left out."""
    if isinstance(value, dict):
        kept = {key: _exported(entry) for key, entry in value.items()}
        return {key: entry for key, entry in kept.items() if entry is not None}
    if isinstance(value, Tensor):  # numpy has no bfloat16; float32 holds it exactly
        value = value.float() if value.dtype == torch.bfloat16 else value
        return np.array(value.cpu().numpy())
    return value if isinstance(value, (bool, int)) else None


def _adopted(saved: Any, like: Any) -> Any:
    """The other way; `like` is the same data of a cache that has read something."""
    if isinstance(saved, dict):
        return {**like, **{key: _adopted(entry, like[key]) for key, entry in saved.items()}}
    if isinstance(saved, np.ndarray):
        return torch.tensor(saved, dtype=like.dtype, device=like.device)
    return saved
