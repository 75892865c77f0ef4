"""Calling a `transformers` model, and finding out with a few tokens what its cache can do.

Documentation and class names do not tell: some models start over when several tokens follow a cached past, some caches
accept a crop and stay as they are. So it is tried, and compared with reading everything at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList
from transformers import PreTrainedModel

from outrider.errors import ConfigError

NUM_TOKENS = 16
# Errors are parts of the largest logit. One token at a time is how transformers itself generates, so what that is off
# by is rounding, and a forgotten past must stand out from it. In bfloat16 it may not: there only caches that crop, and
# so have an entry for every token, are trusted with several at once.
ROUNDING = 1e-6
TIMES_ROUNDING = 4
TOO_FAR, TOO_FAR_IN_HALF = 0.01, 0.5
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "context_length")
RECURRENT_CONTEXT = 2**20  # where a configuration has none: nothing breaks beyond what such a model was trained on


@dataclass(slots=True)
class Step:
    """What a forward gave: wanted rows [rows, V], the cache after it, hidden states [T, width] by index."""

    logits: Tensor
    cache: Any
    hidden: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class Found:
    """What the probe found. `cache` has read a little: a pattern for caches that are filled from saved data."""

    chunked: bool  # several tokens may follow a cached past
    croppable: bool
    num_columns: int
    num_hidden: int
    cache: Any


class Calls:
    """One way to call models whose arguments have different names."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self.model = model
        self.device = device
        known = signature(model.forward).parameters
        names = [name for name in ("past_key_values", "cache_params") if name in known]
        if not names:
            raise ConfigError(f"{type(model).__name__} takes no cache this adapter knows", param="model")
        self._cache_name = names[0]
        self.is_recurrent = self._cache_name == "cache_params"
        self._keeps_rows = "logits_to_keep" in known
        self.layers = _layers(model)

    def forward(self, tokens: Tensor, cache: Any, rows: int, hidden: Sequence[int] = ()) -> Step:
        """Feed one sequence on from `cache` (None: from the start). tokens: [T]"""
        arguments: dict[str, Any] = {} if cache is None else {self._cache_name: cache}
        if self._keeps_rows:
            arguments["logits_to_keep"] = max(1, rows)  # 0 would mean all
        taken: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for index in hidden:
                hooks.enter_context(self._taking(index, taken))
            output = self.model(input_ids=tokens[None], use_cache=True, return_dict=True, **arguments)
        if output.get(self._cache_name) is None:
            raise ConfigError(f"{type(self.model).__name__} returns no {self._cache_name}", param="model")
        logits = output.logits[0]  # [T, V], or fewer rows
        return Step(logits[len(logits) - rows :].float(), output[self._cache_name], taken)

    def _taking(self, index: int, taken: dict[int, Tensor]) -> Any:
        """While entered, takes a hidden state: what layer `index` is given, or what the last one returns."""

        def given(_: Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            taken[index] = (args[0] if args else named["hidden_states"])[0]

        def returned(_: Module, __: tuple[Any, ...], output: Any) -> None:
            taken[index] = (output[0] if isinstance(output, tuple) else output)[0]

        if index < len(self.layers):
            return self.layers[index].register_forward_pre_hook(given, with_kwargs=True)
        return self.layers[-1].register_forward_hook(returned)


@torch.inference_mode()
def probe(calls: Calls, name: str, context: int) -> Found:
    """Read a few tokens in several ways. A model that does not continue its own cache is refused."""
    num_columns = calls.forward(_tokens(calls, [0]), None, 1).logits.shape[-1]
    count = max(2, min(NUM_TOKENS, context))
    tokens = _tokens(calls, [(7 * index + 1) % num_columns for index in range(count)])
    whole = calls.forward(tokens, None, count)
    if not hasattr(whole.cache, "layers"):
        raise ConfigError(f"the cache of {name} is a {type(whole.cache).__name__}; only a Cache with layers will do")
    half = count // 2
    single = max(_error(calls, tokens, whole.logits, cuts) for cuts in ([half] + [1] * (count - half), [1] * count))
    exact = calls.model.dtype == torch.float32
    if single > (TOO_FAR if exact else TOO_FAR_IN_HALF):
        raise ConfigError(
            f"{name} does not continue its own cache: fed token by token its logits are off by {single:.1%}",
            param="model",
        )
    thirds = [half, count - half - 1, 1] if count > 2 else [1, 1]
    chunked = _error(calls, tokens, whole.logits, thirds) < TIMES_ROUNDING * max(single, ROUNDING)
    crops = _crops(calls, tokens)
    return Found(
        chunked=chunked and (crops or exact),
        croppable=crops and not _drops(whole.cache, context),
        num_columns=num_columns,
        num_hidden=_num_hidden(calls, tokens),
        cache=whole.cache,
    )


def context_of(calls: Calls, name: str) -> int:
    """The context the configuration names."""
    for key in CONTEXT_NAMES:
        value = getattr(calls.model.config.get_text_config(), key, None)
        if isinstance(value, int) and value > 0:
            return value
    if calls.is_recurrent:
        return RECURRENT_CONTEXT
    raise ConfigError(f"the configuration of {name} names no context; pass context=<tokens>", param="context")


def _tokens(calls: Calls, ids: Sequence[int]) -> Tensor:
    return torch.tensor(ids, device=calls.device)


def _error(calls: Calls, tokens: Tensor, whole: Tensor, counts: Sequence[int]) -> float:
    """How far the logits are off when the tokens are fed in pieces."""
    cache, rows, begin = None, [], 0
    for count in counts:
        step = calls.forward(tokens[begin : begin + count], cache, count)
        begin += count
        cache = step.cache
        rows.append(step.logits)
    return float((torch.cat(rows) - whole).abs().max() / whole.abs().max())


def _drops(cache: Any, context: int) -> bool:
    """Whether it forgets entries once a window is full, which so few tokens need not show."""
    return any(layer.sliding_window <= context for layer in cache.layers if getattr(layer, "is_sliding", False))


def _crops(calls: Calls, tokens: Tensor) -> bool:
    """Whether the cache goes back without a trace."""
    held = min(4, len(tokens) - 1)
    start = calls.forward(tokens[:held], None, 0).cache
    straight = calls.forward(tokens[held : held + 1], deepcopy(start), 1)
    detour = calls.forward(tokens[:1], deepcopy(start), 1)
    try:
        detour.cache.crop(-1)
    except Exception:  # whatever it says, it means no
        return False
    return torch.equal(calls.forward(tokens[held : held + 1], detour.cache, 1).logits, straight.logits)


def _layers(model: PreTrainedModel) -> Sequence[Module]:
    """The stack of layers, where there is one to be found."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    stacks = [module for module in model.modules() if isinstance(module, ModuleList) and len(module) == count]
    return list(stacks[0]) if stacks else []


def _num_hidden(calls: Calls, tokens: Tensor) -> int:
    """How many hidden states are on offer: all or none."""
    wanted = tuple(range(len(calls.layers) + 1)) if calls.layers else ()
    width = calls.model.config.get_text_config().hidden_size
    taken = calls.forward(tokens, None, 0, wanted).hidden
    fits = all(index in taken and taken[index].shape == (len(tokens), width) for index in wanted)
    return len(wanted) if fits else 0
