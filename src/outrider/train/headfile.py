"""A trained head as files, in the layout of the `speculators` package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ConfigError
from outrider.models.base import Rope, TransformerSpec
from outrider.models.head_spec import EagleSpec
from outrider.models.heads import open_head
from outrider.train.net import NAMES, EagleNet, exported
from outrider.train.settings import write_whole

LAYERS = 1
WEIGHTS = "model.safetensors"


def head_spec(target: TransformerSpec) -> TransformerSpec:
    """One layer like the target's own, with plain rotary positions: scaling is for longer texts than drafts see."""
    return replace(
        target,
        family="llama",
        num_layers=LAYERS,
        windows=(),
        tied=False,
        rope=Rope(frequencies=_plain_frequencies(target), interleaved=False),
    )


def theta_of(target: TransformerSpec) -> float:
    """The base of its rotary positions: scaling leaves the ratio of the quickest pairs as it is."""
    frequencies = target.rope.frequencies
    return float(round((frequencies[0] / frequencies[1]) ** len(frequencies), 3)) if len(frequencies) > 1 else 10_000.0


def _plain_frequencies(target: TransformerSpec) -> tuple[float, ...]:
    half, theta = len(target.rope.frequencies), theta_of(target)
    return tuple(theta ** (-number / half) for number in range(half))


def write_head(
    folder: Path,
    net: EagleNet,
    target: TransformerSpec,
    *,
    layers: Sequence[int],
    ids: Sequence[int] | None,
    context: int,
    made_for: dict[str, Any],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """made_for: the target's name and fingerprint; the head is refused by any other."""
    tensors = {
        name: tensor if tensor.dtype == torch.int64 else tensor.to(dtype) for name, tensor in exported(net, ids).items()
    }
    spec = net.spec
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": made_for["name"], "architectures": ["LlamaForCausalLM"]},
        },
        "draft_vocab_size": target.num_columns if ids is None else len(ids),
        "target_hidden_size": target.width,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": spec.width,
            "intermediate_size": spec.ffn_width,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": spec.norm_eps,
            "rope_theta": theta_of(target),
            "partial_rotary_factor": 2 * len(spec.rope.frequencies) / spec.head_dim,
            "max_position_embeddings": context,
            "vocab_size": target.num_columns,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
        "outrider": {"made_for": made_for},
    }
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / "model.tmp.safetensors"
    save_file(tensors, beside)
    beside.replace(folder / WEIGHTS)
    _write_config(folder, config)


def check_start(folder: Path, fingerprint: str | None, num_layers: int, layers: Sequence[int]) -> None:
    """Whether a head can be begun with for a target of so many layers, of which these are read; else a ConfigError, or
    a ModelFileError where there is none."""
    file = open_head(folder)
    if not isinstance(file.spec, EagleSpec) or not (folder / WEIGHTS).is_file():
        raise ConfigError(f"{folder} holds no EAGLE head in the layout that is written here", param="start")
    if file.made_for != fingerprint:
        raise ConfigError(f"{folder} was made for another model or other weights of it; begin with none", param="start")
    if file.spec.layers_of(num_layers) != tuple(layers):
        raise ConfigError(f"{folder} reads other layers than {list(layers)}; begin with none", param="start")


def begin_with(net: EagleNet, folder: Path) -> None:
    """The weights of a head that was trained before. The tokens it chooses among may be others."""
    tensors, state = load_file(folder / WEIGHTS), net.state_dict()
    for ours, theirs in NAMES.items():
        if theirs not in tensors or tensors[theirs].shape != state[ours].shape:
            raise ConfigError(f"{folder} is another kind of head than what is trained here ({theirs})", param="start")
        state[ours].copy_(tensors[theirs])


def note_kept(folder: Path, kept: Sequence[float]) -> None:
    """What was measured of a head that is written goes with it: engines need not find it out."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["outrider"]["kept"] = [
        round(share, 3) for share in accumulate(kept, min)
    ]  # last places may be of few chains
    _write_config(folder, config)


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")
