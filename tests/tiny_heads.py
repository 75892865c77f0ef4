"""Tiny draft heads with random weights for tiny targets (`tiny.py`), in every public layout.

Weights are made under the names of the EAGLE and Medusa repositories; a layout renames them and writes the files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]
MEDUSA = ("medusa", "medusa_safetensors", "medusa_second", "vllm", "vllm_shared", "vllm_reduced", "vllm_rows")
EAGLE = ("eagle", "eagle_safetensors", "eagle_speculators", "eagle_norms", "eagle_biased", "eagle_deep")
EAGLE3 = (
    "eagle3",
    "eagle3_forge",
    "eagle3_speculators",
    "eagle3_norms",
    "eagle3_narrow",
    "eagle3_qwen3",
    "eagle3_deep",
)
DRAFT_VOCAB = 40


def save_head(path: Path, layout: str, target: Any, *, seed: int = 0) -> Weights:
    """A head for the transformers model `target`. Returns its weights by the names of the repositories."""
    path.mkdir(parents=True, exist_ok=True)
    save = _save_medusa if layout in MEDUSA else _save_eagle if layout in EAGLE else _save_eagle3
    return save(path, layout, target.config, torch.Generator().manual_seed(seed))


def _matrix(generator: torch.Generator, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
    return gain / math.sqrt(columns) * torch.randn(rows, columns, generator=generator)


def _vector(generator: torch.Generator, size: int, mean: float = 1.0) -> torch.Tensor:
    return mean + 0.1 * torch.randn(size, generator=generator)


def _write(path: Path, name: str, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
    (path / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file({key: value.contiguous() for key, value in weights.items()}, path / name)
    else:
        torch.save(dict(weights), path / name)


def _save_medusa(path: Path, layout: str, config: Any, generator: torch.Generator) -> Weights:
    width, vocab, heads, layers = config.hidden_size, config.vocab_size, 3, 2
    ids = torch.randperm(vocab, generator=generator)[:DRAFT_VOCAB]
    rows = DRAFT_VOCAB if layout == "vllm_reduced" else vocab
    weights: Weights = {}
    for head in range(heads):
        for block in range(layers):
            weights[f"{head}.{block}.linear.weight"] = _matrix(generator, width, width)
            if not layout.startswith("vllm") or layout == "vllm":
                weights[f"{head}.{block}.linear.bias"] = _vector(generator, width, 0.0)
        if layout not in ("medusa_second", "vllm_shared"):
            weights[f"{head}.{layers}.weight"] = _matrix(generator, rows, width, 3.0)
    if layout == "vllm_shared":
        weights["output"] = _matrix(generator, rows, width, 3.0)
    keys: dict[str, Any] = {"medusa_num_heads": heads, "medusa_num_layers": layers, "base_model_name_or_path": "tiny"}
    if layout.startswith("medusa"):
        _write(path, "medusa_lm_head.pt" if layout == "medusa" else "medusa_lm_head.safetensors", keys, weights)
        return weights
    named: Weights = {}
    for name, value in weights.items():
        parts = name.split(".")
        if name == "output":
            named["lm_heads.0.weight"] = value
        elif "linear" in parts:
            named[f"blocks.{parts[0]}.layers.{parts[1]}.{parts[3]}"] = value
        else:
            named[f"medusa_heads.lm_heads.{parts[0]}.weight"] = value
    keys = {"model_type": "medusa", "hidden_size": width, "vocab_size": vocab, "num_heads": heads}
    keys |= {"num_hidden_layers": layers, "medusa_fc_bias": layout == "vllm", "original_lm_head": "output" in weights}
    if layout in ("vllm_reduced", "vllm_rows"):
        named["token_map"] = weights["token_map"] = ids
        keys["truncated_vocab_size"] = DRAFT_VOCAB
    _write(path, "model.safetensors", keys, named)
    return weights


def _layer_config(config: Any, width: int, num_layers: int = 1) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
    }


def _layer(generator: torch.Generator, prefix: str, width: int, inputs: int, *, normed: bool, biased: bool) -> Weights:
    head_dim = width // 4
    parts = {"q": 4 * head_dim, "k": 2 * head_dim, "v": 2 * head_dim}
    weights = {f"{prefix}.self_attn.{part}_proj.weight": _matrix(generator, r, inputs) for part, r in parts.items()}
    if biased:
        weights |= {f"{prefix}.self_attn.{part}_proj.bias": _vector(generator, r, 0.0) for part, r in parts.items()}
    weights[f"{prefix}.self_attn.o_proj.weight"] = _matrix(generator, width, width)
    weights[f"{prefix}.mlp.gate_proj.weight"] = _matrix(generator, 80, width)
    weights[f"{prefix}.mlp.up_proj.weight"] = _matrix(generator, 80, width)
    weights[f"{prefix}.mlp.down_proj.weight"] = _matrix(generator, width, 80)
    weights[f"{prefix}.post_attention_layernorm.weight"] = _vector(generator, width)
    if normed:
        weights[f"{prefix}.input_layernorm.weight"] = _vector(generator, width)
    return weights


def _save_eagle(path: Path, layout: str, config: Any, generator: torch.Generator) -> Weights:
    width, num_layers = config.hidden_size, 2 if layout == "eagle_deep" else 1
    normed, speculators = layout == "eagle_norms", layout in ("eagle_speculators", "eagle_norms")
    biased = layout == "eagle_biased"
    weights = {"fc.weight": _matrix(generator, width, 2 * width)}
    if layout != "eagle_speculators":
        weights["fc.bias"] = _vector(generator, width, 0.0)
    for index in range(num_layers):
        prefix = f"layers.{index}"
        weights |= _layer(generator, prefix, width, width, normed=normed or index > 0, biased=biased)
    if layout in ("eagle", "eagle_deep"):
        weights["embed_tokens.weight"] = torch.randn(config.vocab_size, width, generator=generator)
    keys = _layer_config(config, width, num_layers)
    if not speculators:
        name = "model.safetensors" if layout == "eagle_safetensors" else "pytorch_model.bin"
        _write(path, name, keys | {"bias": True, "qkv_bias": biased}, weights)
        return weights
    if normed:
        weights["embedding_layernorm.weight"] = _vector(generator, width)
        weights["pre_lm_head_layernorm.weight"] = _vector(generator, width)
    outer = {"speculators_model_type": "eagle", "transformer_layer_architecture": "LlamaDecoderLayer"}
    outer |= {"transformer_layer_config": keys, "layernorms": normed, "fusion_bias": normed}
    named = {_speculators_name(name): value for name, value in weights.items()}
    _write(path, "model.safetensors", outer, named)
    return weights


def _speculators_name(name: str) -> str:
    return name.replace("layers.0.", "transformer.") if name.startswith("layers") else name.replace("fc.", "fusion_fc.")


def _save_eagle3(path: Path, layout: str, config: Any, generator: torch.Generator) -> Weights:
    target_width, num_layers = config.hidden_size, 2 if layout == "eagle3_deep" else 1
    width = 32 if layout == "eagle3_narrow" else target_width
    speculators = layout in ("eagle3_speculators", "eagle3_norms", "eagle3_qwen3", "eagle3_deep")
    full = layout == "eagle3_forge"  # the whole vocabulary
    vocab = config.vocab_size if full else DRAFT_VOCAB
    first = "layers.0" if speculators else "midlayer"
    weights = {"fc.weight": _matrix(generator, width, 3 * target_width)}
    weights |= _layer(generator, first, width, 2 * width, normed=True, biased=False)
    weights[f"{first}.hidden_norm.weight"] = _vector(generator, width)
    for index in range(1, num_layers):
        weights |= _layer(generator, f"layers.{index}", width, width, normed=True, biased=False)
    weights["norm.weight"] = _vector(generator, width)
    weights["lm_head.weight"] = _matrix(generator, vocab, width, 3.0)
    if not full:
        chosen = torch.randperm(config.vocab_size, generator=generator)[:vocab].sort().values
        weights["d2t"] = chosen - torch.arange(vocab)
        weights["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    if layout in ("eagle3_narrow", "eagle3_speculators"):
        weights["embed_tokens.weight"] = torch.randn(config.vocab_size, width, generator=generator)
    keys = _layer_config(config, width, num_layers)
    if layout == "eagle3_forge":
        keys |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": vocab}
        keys["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True}
        _write(path, "model.safetensors", keys, weights)
        return weights
    if not speculators:
        keys |= {"draft_vocab_size": vocab, **({"target_hidden_size": target_width} if width != target_width else {})}
        _write(path, "pytorch_model.bin", keys, weights)
        return weights
    outer = {"speculators_model_type": "eagle3", "draft_vocab_size": vocab, "norm_before_residual": False}
    outer |= {"transformer_layer_config": keys, "eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    if layout == "eagle3_norms":
        outer |= {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
        weights["input_norm.weight"] = _vector(generator, 3 * target_width)
    if layout == "eagle3_deep":
        outer["fc_norm"] = True
        weights |= {f"fc_norm.{index}.weight": _vector(generator, target_width) for index in range(3)}
    if layout == "eagle3_qwen3":
        keys["model_type"] = "qwen3"
        weights |= {f"layers.0.self_attn.{part}_norm.weight": _vector(generator, width // 4) for part in "qk"}
        keys["head_dim"] = width // 4
    _write(path, "model.safetensors", outer, weights)
    return weights
