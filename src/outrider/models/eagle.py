"""EAGLE heads: what config.json and the tensors' names mean.

EAGLE, -2    fc.weight, layers.0.*, without a norm before the first layer; the config is that of a llama
EAGLE-3      fc.weight, midlayer.* or layers.0.*, norm.weight, lm_head.weight, d2t
speculators  transformer_layer_config within the config; eagle: fusion_fc.weight, transformer.*; eagle3: as above
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from outrider.models.base import MambaSpec, Shape, TransformerSpec
from outrider.models.facts import MAX_LAYERS, Facts
from outrider.models.folder_config import read_spec
from outrider.models.head_spec import NUMBER, OFFSETS, EagleSpec, rename
from outrider.models.head_tensors import Tensors

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose layer a head may have
_TOP = {
    "embed_tokens.weight": "token_embd.weight",
    "embedding_layernorm.weight": "token_embd_norm.weight",
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    "fusion_fc.weight": "fc.weight",
    "fusion_fc.bias": "fc.bias",
    "input_norm.weight": "fc_norm.weight",
    "norm.weight": "output_norm.weight",
    "pre_lm_head_layernorm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "d2t": OFFSETS,
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "hidden_norm.weight": "hidden_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_IN_LAYER = re.compile(rf"(?:layers\.{NUMBER}|midlayer|transformer)\.(.+)")
_UNUSED = re.compile(r"t2d|verifier_(?:lm_head|norm)\.weight|.*\.rotary_emb\.inv_freq")


def read_eagle(facts: Facts, tensors: Tensors) -> tuple[EagleSpec, dict[str, str]]:
    """The spec, and their name of each tensor by ours."""
    names = rename(tensors, _short, _UNUSED)
    kind = facts.text("speculators_model_type", default="")
    third = kind == "eagle3" or (not kind and ("blk.0.hidden_norm.weight" in names or facts.has("draft_vocab_size")))
    layer = _layers(facts, bool(kind))
    if not third:
        return _first(facts, layer, names), names
    if not kind and _nested(facts, "eagle_config").values.get("use_aux_hidden_state") is False:
        raise facts.fail("use_aux_hidden_state is false, and heads that read one layer only cannot be computed")
    spec = EagleSpec(
        version=3,
        layer=layer,
        target_width=facts.whole("target_hidden_size", default=layer.width),
        features=_features(facts),
        draft_vocab_size=facts.whole("draft_vocab_size", default=layer.num_columns),
        # speculators and vLLM differ in what its absence means
        norm_before_residual=facts.flag("norm_before_residual", default=None if kind else False),
        norm_output=facts.flag("norm_output", default=False),
    )
    if facts.flag("norm_before_fc", default=False) != ("fc_norm.weight" in names):
        raise facts.fail("norm_before_fc must be true when there is an input_norm.weight, and only then")
    if facts.flag("fc_norm", default=False) != ("fc_norm.0.weight" in names):
        raise facts.fail("fc_norm must be true when there are fc_norm.*.weight, and only then")
    if layer.tied and "output.weight" not in names:
        raise facts.fail("tie_word_embeddings is true, and a head without an lm_head.weight cannot be read, then")
    if spec.draft_vocab_size > layer.num_columns:
        raise facts.fail(f"draft_vocab_size is {spec.draft_vocab_size}, more than vocab_size, {layer.num_columns}")
    return spec, names


def _first(facts: Facts, layer: TransformerSpec, names: Mapping[str, str]) -> EagleSpec:
    architecture = facts.text("transformer_layer_architecture", default="LlamaDecoderLayer")
    if architecture != "LlamaDecoderLayer":
        raise facts.fail(f"the layer {architecture[:40]!r} cannot be computed, only LlamaDecoderLayer")
    if facts.has("layernorms") and facts.flag("layernorms") != ("token_embd_norm.weight" in names):
        raise facts.fail("layernorms must be true when there is an embedding_layernorm.weight, and only then")
    return EagleSpec(
        version=1, layer=layer, target_width=layer.width, features=None, draft_vocab_size=layer.num_columns
    )


def _short(theirs: str) -> str | None:
    name = theirs.removeprefix("model.")
    if found := _IN_LAYER.fullmatch(name):
        ours = _LAYER.get(found[2])
        return ours and f"blk.{found[1] or 0}.{ours}"
    if re.fullmatch(rf"fc_norm\.{NUMBER}\.weight", name):
        return name
    return _TOP.get(name)


def _layers(facts: Facts, nested: bool) -> TransformerSpec:
    """The head's own layers. Those of the EAGLE repository see all that came before, whatever the config says."""
    inner = _nested(facts, "transformer_layer_config") if nested else facts
    values = {"model_type": "llama", **{key: one for key, one in inner.values.items() if one is not None}}
    types = values.pop("layer_types", None)
    if nested and types is not None and types != ["full_attention"] * len(types if isinstance(types, list) else ()):
        raise facts.fail("layer_types must be full_attention; a head with a sliding window cannot be computed")
    values.update(sliding_window=None, use_sliding_window=False)
    family = Facts(facts.path, values).text("model_type")
    if family not in FAMILIES:
        raise facts.fail(f"the model_type {family[:40]!r} cannot be read, only {', '.join(FAMILIES)}")
    spec = read_spec(Facts(facts.path, values))
    assert not isinstance(spec, MambaSpec)
    return replace(spec, windows=(), family=spec.family if nested else "llama")  # the repository has one layer for all


def _nested(facts: Facts, key: str) -> Facts:
    inner = facts.values.get(key)
    if inner is None:
        inner = {}
    if not isinstance(inner, dict):
        raise facts.fail(f"{key} must be a set of keys")
    return Facts(facts.path, inner)


def _features(facts: Facts) -> tuple[int, ...] | None:
    """Hidden states it reads. In `eagle_config` a layer counts from 0 and its output is meant; elsewhere its number."""
    key = "eagle_aux_hidden_state_layer_ids"
    given, shift = facts.values.get(key), 0
    if not given:
        given, shift = _nested(facts, "eagle_config").values.get(key), 1
    if not given:
        return None
    if not isinstance(given, list) or len(given) > MAX_LAYERS or not all(_is_layer(one) for one in given):
        raise facts.fail(f"{key} must be a list of layers")
    return tuple(one + shift for one in given)


def _is_layer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_LAYERS


def eagle_shapes(spec: EagleSpec, present: Collection[str]) -> dict[str, Shape]:
    layer, width = spec.layer, spec.layer.width
    num_features = len(spec.features or (0, 0, 0))
    inputs = 2 * width if spec.version == 1 else num_features * spec.target_width
    shapes: dict[str, Shape] = {"fc.weight": (width, inputs)}
    optional: dict[str, Shape] = {
        "token_embd.weight": (layer.num_columns, width),
        "output.weight": (spec.draft_vocab_size, width),
        "fc.bias": (width,),
    }
    if spec.version == 3:
        optional["fc_norm.weight"] = (inputs,)
        shapes["output_norm.weight"] = (width,)
        if "fc_norm.0.weight" in present:
            shapes.update({f"fc_norm.{index}.weight": (spec.target_width,) for index in range(num_features)})
        if OFFSETS in present or spec.draft_vocab_size != layer.num_columns:
            shapes[OFFSETS] = (spec.draft_vocab_size,)
    shapes.update({name: shape for name, shape in optional.items() if name in present})
    norms = {"token_embd_norm.weight", "blk.0.attn_norm.weight", "output_norm.weight"}
    normed = spec.version == 1 and not norms.isdisjoint(present)
    if normed:
        shapes.update(dict.fromkeys(norms, (width,)))
    for index in range(layer.num_layers):
        shapes.update({f"blk.{index}.{name}": shape for name, shape in _layer_shapes(spec, index, present).items()})
    return shapes


def _layer_shapes(spec: EagleSpec, index: int, present: Collection[str]) -> dict[str, Shape]:
    """One layer; what is optional in it is there in every layer or in none."""
    layer, width = spec.layer, spec.layer.width
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    beside = spec.version == 3 and index == 0  # the embedding stands beside the hidden state
    parts = {"attn_q": queries, "attn_k": keys, "attn_v": keys}
    shapes: dict[str, Shape] = {f"{part}.weight": (rows, (1 + beside) * width) for part, rows in parts.items()}
    in_layers = {name.split(".", 2)[2] for name in present if name.startswith("blk.")}
    biases: dict[str, Shape] = {f"{part}.bias": (rows,) for part, rows in parts.items()}
    norms: dict[str, Shape] = {f"attn_{one}_norm.weight": (layer.head_dim,) for one in "qk"}
    if not biases.keys().isdisjoint(in_layers):
        shapes.update(biases)
    if layer.family == "qwen3" or not norms.keys().isdisjoint(in_layers):
        shapes.update(norms)
    if index > 0 or spec.version == 3:
        shapes["attn_norm.weight"] = (width,)
    if beside:
        shapes["hidden_norm.weight"] = (width,)
    shapes["attn_output.weight"] = (width, queries)
    shapes["ffn_norm.weight"] = (width,)
    shapes["ffn_gate.weight"] = shapes["ffn_up.weight"] = (layer.ffn_width, width)
    shapes["ffn_down.weight"] = (width, layer.ffn_width)
    return shapes
