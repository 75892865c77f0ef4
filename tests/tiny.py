"""Tiny models with random weights, of every family that can be read, and the two formats they are stored in.

The models are transformers' own: what they compute is the reference. `save_gguf` follows llama.cpp's converter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

transformers.utils.logging.disable_progress_bar()

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3", "phi3", "mamba")

_COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_TRANSFORMER: dict[str, Any] = {
    **_COMMON,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": _TRANSFORMER,
    "llama3": {**_TRANSFORMER, "rope_parameters": _LLAMA3},
    "mistral": {**_TRANSFORMER, "sliding_window": 8},
    "qwen2": {**_TRANSFORMER, "num_hidden_layers": 3},
    "qwen3": {**_TRANSFORMER, "head_dim": 32, "tie_word_embeddings": True},
    "phi3": _TRANSFORMER,
    "mamba": {**_COMMON, "state_size": 8, "num_hidden_layers": 3, "tie_word_embeddings": True},
}


def tiny(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """A model of the family on the CPU in float32. `changes` go to its config."""
    config = transformers.AutoConfig.for_model(family.removesuffix("3") if family == "llama3" else family)
    config = type(config)(**{**_SETTINGS[family], **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # mamba's own start is random, too
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith(("A_log", "dt_proj.bias")):  # only sensible around their own start
                weight.add_(0.1 * noise)
            elif weight.dim() == 1:
                weight.copy_(0.1 * noise if name.endswith("bias") else 1.0 + 0.1 * noise)
            elif "embed" in name:
                weight.copy_((0.3 if config.tie_word_embeddings else 1.0) * noise)
            else:  # sharp enough that logits are far from uniform
                gain = 3.0 if name.endswith(("lm_head.weight", "mixer.out_proj.weight")) else 1.0
                weight.copy_(gain / math.sqrt(weight.shape[-1]) * noise)
    return model.eval()


def save_folder(model: Any, path: Path, *, max_shard_size: str = "1GB") -> Path:
    """The model as a Hugging Face folder."""
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path


def architecture(model: Any) -> str:
    """As GGUF names it."""
    kind = model.config.model_type
    return "llama" if kind == "mistral" else str(kind)


def save_gguf(
    model: Any,
    path: Path,
    *,
    types: str | Mapping[str, str] = "F32",
    tokenizer: bool = False,
    more: Callable[[GGUFWriter], None] | None = None,
) -> Path:
    """The model as a GGUF file. `types` is one for all matrices or one per tensor; norms and biases are always F32.

    A matrix whose rows are not whole blocks of its type stays F32. `more` may add keys and tensors.
    """
    writer = GGUFWriter(path, architecture(model))
    _add_keys(writer, model)
    if tokenizer:
        _add_tokenizer(writer, model.config.vocab_size)
    for name, weight in gguf_tensors(model).items():
        wanted = types if isinstance(types, str) else types.get(name, "F32")
        small = weight.ndim == 1 or "conv1d" in name or "ssm_a" in name
        kind = GGMLQuantizationType["F32" if small else wanted]
        if weight.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(weight, kind), raw_dtype=kind)
    if more is not None:
        more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(model: Any) -> dict[str, np.ndarray]:
    """What a GGUF file of the model holds, by name: rows of q and k in llama's order, the factors of its positions."""
    config = model.config
    names = gguf.get_tensor_name_map(gguf_architecture(model), config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    for theirs, weight in model.state_dict().items():
        if theirs == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = weight.float().numpy()
        ours = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert ours is not None, theirs
        if architecture(model) == "llama" and ".attn_q." in ours:
            value = interleaved(value, config.num_attention_heads)
        elif architecture(model) == "llama" and ".attn_k." in ours:
            value = interleaved(value, config.num_key_value_heads)
        elif ours.endswith(".ssm_a"):
            value = -np.exp(value)
        elif ours.endswith(".ssm_conv1d.weight"):
            value = value.squeeze(1)
        tensors[ours] = np.ascontiguousarray(value)
    return tensors | _position_factors(config)


def gguf_architecture(model: Any) -> gguf.MODEL_ARCH:
    return next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture(model))


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head reordered from (first half, second half) to pairs."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _position_factors(config: Any) -> dict[str, np.ndarray]:
    given = getattr(config, "rope_parameters", None) or {}
    if given.get("rope_type") == "longrope":
        return {f"rope_factors_{one}.weight": np.array(given[f"{one}_factor"], np.float32) for one in ("short", "long")}
    if given.get("rope_type") != "llama3":
        return {}
    head_dim = _head_dim(config)
    factor, low, high = (given[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    length, factors = given["original_max_position_embeddings"], []
    for pair in range(head_dim // 2):
        wave = 2 * math.pi * given["rope_theta"] ** (2 * pair / head_dim)
        if wave < length / high:
            factors.append(1.0)
        elif wave > length / low:
            factors.append(factor)
        else:
            smooth = (length / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return {"rope_freqs.weight": np.array(factors, np.float32)}


def _add_keys(writer: GGUFWriter, model: Any) -> None:
    config = model.config
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "mamba":
        writer.add_context_length(2**20)
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_ssm_conv_kernel(config.conv_kernel)
        writer.add_ssm_inner_size(config.intermediate_size)
        writer.add_ssm_state_size(config.state_size)
        writer.add_ssm_time_step_rank(config.time_step_rank)
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
        return
    writer.add_context_length(config.max_position_embeddings)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = _head_dim(config)
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
        slides = [one == "sliding_attention" for one in getattr(config, "layer_types", None) or []]
        if len(set(slides)) > 1:
            writer.add_sliding_window_pattern(slides)
    _add_positions(writer, config)


def _add_positions(writer: GGUFWriter, config: Any) -> None:
    given, head_dim = config.rope_parameters, _head_dim(config)
    writer.add_rope_dimension_count(int(head_dim * given.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(given["rope_theta"])
    kind = given["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(given["factor"])
    if kind in ("yarn", "longrope"):
        original = given["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
    if kind == "longrope":
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))


def _add_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
    """Byte pairs over printable ASCII: three control tokens, single characters, two merges, padding."""
    letters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]  # the last two are space and newline
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "th", "he"]
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    padding = vocab_size - len(tokens)
    assert padding >= 0, f"a vocabulary of {vocab_size} is too small for a tokenizer of {len(tokens)}"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens + [f"[PAD{index}]" for index in range(padding)])
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED] * padding)
    writer.add_token_merges(["t h", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
