"""From the config.json of a Hugging Face folder to a spec. Tensors are the business of `folder.py`.

Sizes, the context (but mamba's) and the norms' epsilon must be there. What else is absent counts as in transformers:
silu, untied (mamba: tied), rotary positions of base 10,000 over whole heads, mistral's window of 4096 tokens, phi3's
original context of 4096, no other windows. Two defaults are the same for all families: as many key heads as query
heads, and heads that share the width evenly. Where transformers has others (mistral: 8 key heads, qwen3: heads of 128),
the tensors do not fit and are refused.
"""

from __future__ import annotations

from typing import Any

from outrider.models import rope
from outrider.models.base import MambaSpec, Rope, Spec, TransformerSpec
from outrider.models.facts import MAX_CONTEXT, MAX_HEAD, MAX_LAYERS, MIN_CONTEXT, Facts

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "mamba")
CURE = "use --backend hf"
MISTRAL_WINDOW = 4096  # where a mistral config says nothing; a null says none
PHI3_ORIGINAL = 4096  # the context before it was stretched, where a phi3 config says nothing
MAMBA_CONTEXT = 2**20  # a config has none, and nothing breaks; llama.cpp's converter writes the same


def read_spec(facts: Facts) -> Spec:
    family = facts.text("model_type")
    if family not in FAMILIES:
        raise facts.fail(f"the model_type {family[:40]!r} cannot be read, only {', '.join(FAMILIES)}; {CURE}")
    activation = facts.text("hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        raise facts.fail(f"the activation {activation[:40]!r} cannot be computed, only silu; {CURE}")
    if facts.has("quantization_config"):
        raise facts.fail(
            f"the weights are quantised (quantization_config), which cannot be read; {CURE} or a GGUF file"
        )
    return _mamba(facts) if family == "mamba" else _transformer(facts, family)


def _mamba(facts: Facts) -> MambaSpec:
    if not facts.flag("use_conv_bias", default=True):
        raise facts.fail(f"use_conv_bias is false, and such models cannot be read; {CURE}")
    width = facts.whole("hidden_size")
    expand = facts.number("expand", default=2.0, high=64.0)
    values = facts.values if facts.values.get("time_step_rank") != "auto" else {}
    return MambaSpec(
        family="mamba",
        num_layers=facts.whole("num_hidden_layers", high=MAX_LAYERS),
        width=width,
        inner=facts.whole("intermediate_size", default=int(expand * width)),
        state=facts.whole("state_size"),
        conv=facts.whole("conv_kernel"),
        dt_rank=Facts(facts.path, values).whole("time_step_rank", default=-(-width // 16)),
        num_columns=facts.whole("vocab_size"),
        context=facts.whole("max_position_embeddings", default=MAMBA_CONTEXT, low=MIN_CONTEXT, high=MAX_CONTEXT),
        norm_eps=facts.number("layer_norm_epsilon", high=1.0),
        tied=facts.flag("tie_word_embeddings", default=True),
    )


def _transformer(facts: Facts, family: str) -> TransformerSpec:
    width, num_heads = facts.whole("hidden_size"), facts.whole("num_attention_heads")
    num_kv_heads = facts.whole("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise facts.fail(f"{num_heads} query heads cannot share {num_kv_heads} key heads evenly")
    if not facts.has("head_dim") and width % num_heads:
        raise facts.fail(f"the width {width} cannot be divided among {num_heads} heads")
    head_dim = facts.whole("head_dim", default=width // num_heads, high=MAX_HEAD)
    if head_dim % 2:
        raise facts.fail(f"heads must have an even number of dimensions, got {head_dim}; {CURE}")
    num_layers = facts.whole("num_hidden_layers", high=MAX_LAYERS)
    positions = _Positions(facts, family)
    context = positions.context()
    return TransformerSpec(
        family=family,
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_width=facts.whole("intermediate_size"),
        num_columns=facts.whole("vocab_size"),
        context=context,
        norm_eps=facts.number("rms_norm_eps", high=1.0),
        rope=positions.for_heads(head_dim),
        windows=_windows(facts, family, num_layers, context),
        tied=facts.flag("tie_word_embeddings", default=False),
    )


class _Positions:
    """Rotary positions, as transformers 5 writes them (rope_parameters) or older ones (rope_theta, rope_scaling).

    As in transformers, rope_scaling stands in for all of rope_parameters; keys outside of both fill in.
    """

    def __init__(self, facts: Facts, family: str) -> None:
        own = ("rope_theta", "partial_rotary_factor")
        values: dict[str, Any] = {key: facts.values[key] for key in own if facts.has(key)}
        key = "rope_scaling" if facts.values.get("rope_scaling") else "rope_parameters"
        if facts.has(key):
            given = facts.values[key]
            if not isinstance(given, dict) or any(isinstance(one, dict) for one in given.values()):
                raise facts.fail(f"{key} must be one set of keys for all layers; {CURE}")
            values.update(given)
        outside = "original_max_position_embeddings"  # phi3 keeps it there, and that one counts
        if facts.has(outside) or family == "phi3":
            values[outside] = facts.whole(outside, default=PHI3_ORIGINAL, low=MIN_CONTEXT, high=MAX_CONTEXT)
        self.facts = Facts(facts.path, values)
        self.kind = self.facts.text("rope_type", default=self.facts.text("type", default="default"))
        if family == "phi3" and self.kind in ("su", "yarn"):  # its older names
            self.kind = "longrope"
        self.length = facts.whole("max_position_embeddings", low=MIN_CONTEXT, high=MAX_CONTEXT)

    @property
    def original(self) -> int:
        """The context before it was stretched."""
        return self.facts.whole(
            "original_max_position_embeddings", default=self.length, low=MIN_CONTEXT, high=MAX_CONTEXT
        )

    def context(self) -> int:
        # Longrope has two sets of frequencies, and a cache filled with one cannot be used with the other. The short
        # ones hold up to the original length.
        return min(self.length, self.original) if self.kind == "longrope" else self.length

    def for_heads(self, head_dim: int) -> Rope:
        dims = int(head_dim * self.facts.number("partial_rotary_factor", default=1.0, high=1.0))
        if dims < 2 or dims % 2:
            raise self.facts.fail(f"rotary positions need an even number of dimensions of each head, got {dims}")
        base = self.facts.number("rope_theta", default=10_000.0, low=1.001)
        plain = rope.plain(dims, base)
        if self.kind == "default":
            return Rope(frequencies=plain, interleaved=False)
        if self.kind == "linear":
            return Rope(frequencies=rope.linear(plain, self.facts.number("factor")), interleaved=False)
        if self.kind == "llama3":
            return Rope(frequencies=self._llama3(plain), interleaved=False)
        if self.kind == "yarn":
            return self._yarn(dims, base)
        if self.kind == "longrope":
            return self._longrope(plain)
        raise self.facts.fail(f"the rope type {self.kind[:40]!r} cannot be computed; {CURE}")

    def _llama3(self, plain: rope.Frequencies) -> rope.Frequencies:
        number = self.facts.number
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if not low < high:
            raise self.facts.fail(f"low_freq_factor ({low}) must be below high_freq_factor ({high})")
        return rope.llama3(plain, factor=number("factor"), low=low, high=high, original=self.original)

    def _yarn(self, dims: int, base: float) -> Rope:
        number, has = self.facts.number, self.facts.has
        factor = number("factor", default=self.length / self.original)
        scale = rope.yarn_scale(factor)
        if has("mscale") and has("mscale_all_dim"):
            scale = rope.yarn_scale(factor, number("mscale")) / rope.yarn_scale(factor, number("mscale_all_dim"))
        frequencies = rope.yarn(
            dims,
            base,
            factor=factor,
            original=self.original,
            fast=number("beta_fast", default=32.0),
            slow=number("beta_slow", default=1.0),
            whole=self.facts.flag("truncate", default=True),
        )
        return Rope(frequencies=frequencies, interleaved=False, scale=number("attention_factor", default=scale))

    def _longrope(self, plain: rope.Frequencies) -> Rope:
        factors = self.facts.numbers("short_factor")
        if len(factors) != len(plain):
            raise self.facts.fail(f"short_factor must have {len(plain)} entries, got {len(factors)}")
        factor = self.facts.number("factor", default=self.length / self.original)
        scale = self.facts.number("attention_factor", default=rope.longrope_scale(factor, self.original))
        return Rope(frequencies=rope.divided(plain, factors), interleaved=False, scale=scale)


def _windows(facts: Facts, family: str, num_layers: int, context: int) -> tuple[int | None, ...]:
    """Keys each layer sees, or nothing when no layer has fewer than the context."""
    slides = [True] * num_layers
    if family in ("qwen2", "qwen3"):
        slides = _sliding_layers(facts, num_layers)
    elif family == "llama" or facts.values.get("sliding_window", MISTRAL_WINDOW) is None:
        return ()
    default = {"mistral": MISTRAL_WINDOW, "phi3": context}.get(family)
    if not any(slides):
        return ()
    window = facts.whole("sliding_window", default=default, high=MAX_CONTEXT)
    return tuple(window if layer else None for layer in slides) if window < context else ()


def _sliding_layers(facts: Facts, num_layers: int) -> list[bool]:
    if not facts.flag("use_sliding_window", default=False):
        return [False] * num_layers
    if not facts.has("layer_types"):
        first = facts.whole("max_window_layers", default=28, low=0)
        return [layer >= first for layer in range(num_layers)]
    types = facts.values["layer_types"]
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(one not in known for one in types):
        raise facts.fail(f"layer_types must name full_attention or sliding_attention for each of {num_layers} layers")
    return [one == "sliding_attention" for one in types]
