"""Models that are nothing but a shape: random weights of a known model's sizes, to measure speed without fetching it.

`random:llama-3.1-8b` may stand wherever a model may. What it says means nothing; it has no tokenizer, so it takes
token ids only. `random:llama-3.1-8b:counting` counts: after token 7 it says 8, so that what it will say is known.
"""

from __future__ import annotations

import math
from pathlib import Path
from zlib import crc32

from outrider.errors import ModelSourceError
from outrider.models.base import Rope, Shape, TransformerSpec, expected_shapes
from outrider.types import Array

PREFIX = "random:"


def build_shape(
    family: str,
    num_layers: int,
    width: int,
    heads: tuple[int, int, int],  # of queries, of keys, their size
    ffn_width: int,
    num_columns: int,
    *,
    context: int = 131_072,
    theta: float = 500_000.0,
    tied: bool = False,
) -> TransformerSpec:
    num_heads, num_kv_heads, head_dim = heads
    frequencies = tuple(theta ** (-pair / head_dim) for pair in range(0, head_dim, 2))
    return TransformerSpec(
        family=family,
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_width=ffn_width,
        num_columns=num_columns,
        context=context,
        norm_eps=1e-5,
        rope=Rope(frequencies=frequencies, interleaved=True),
        tied=tied,
    )


SHAPES = {
    "llama-3.1-8b": build_shape("llama", 32, 4096, (32, 8, 128), 14_336, 128_256),
    "llama-3.2-3b": build_shape("llama", 28, 3072, (24, 8, 128), 8192, 128_256, tied=True),
    "llama-3.2-1b": build_shape("llama", 16, 2048, (32, 8, 64), 8192, 128_256, tied=True),
    "qwen3-8b": build_shape("qwen3", 36, 4096, (32, 8, 128), 12_288, 151_936, context=40_960, theta=1e6),
    "qwen3-0.6b": build_shape("qwen3", 28, 1024, (16, 8, 128), 3072, 151_936, context=40_960, theta=1e6, tied=True),
    "qwen2.5-7b": build_shape("qwen2", 28, 3584, (28, 4, 128), 18_944, 152_064, context=32_768, theta=1e6),
    "qwen2.5-1.5b": build_shape("qwen2", 28, 1536, (12, 2, 128), 8960, 151_936, context=32_768, theta=1e6, tied=True),
    "qwen2.5-0.5b": build_shape("qwen2", 24, 896, (14, 2, 64), 4864, 151_936, context=32_768, theta=1e6, tied=True),
    "tinyllama-1.1b": build_shape("llama", 22, 2048, (32, 4, 64), 5632, 32_000, context=2048, theta=1e4),
    "smollm2-135m": build_shape("llama", 30, 576, (9, 3, 64), 1536, 49_152, context=8192, theta=1e5, tied=True),
}


class RandomFile:
    """A model of a shape. The same weights every time; drawn where they are needed, tensor by tensor."""

    eos_ids: tuple[int, ...] = ()

    def __init__(self, name: str, device: str = "cpu") -> None:
        shape, colon, manner = name.partition(":")
        if shape not in SHAPES:
            raise ModelSourceError(f"there is no shape {shape!r}; choose one of {', '.join(SHAPES)}")
        if colon and manner != "counting":
            raise ModelSourceError(
                f"random weights cannot be {manner!r}; write random:{shape} or random:{shape}:counting"
            )
        self.name, self.path, self.spec, self.counts = name, Path(PREFIX + name), SHAPES[shape], bool(colon)
        if self.counts and self.spec.tied:
            able = ", ".join(other for other, spec in SHAPES.items() if not spec.tied)
            raise ModelSourceError(
                f"{shape} has one matrix for input and output, so it cannot count; choose one of {able}"
            )
        self.shapes: dict[str, Shape] = expected_shapes(self.spec, {"blk.0.ffn_gate.weight"})
        self.types = dict.fromkeys(self.shapes, "random")
        self._device = device

    def on(self, device: str) -> RandomFile:
        """The same model, whose tensors are drawn on a device: billions of them take seconds there."""
        return RandomFile(self.name, device)

    def read(self, name: str) -> Array:
        import torch

        shape = self.shapes[name]
        if self.counts and name == "output.weight":
            return self.read("token_embd.weight").roll(1, 0)  # after a token comes the next
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device)
        generator = torch.Generator(self._device).manual_seed(crc32(f"{self.name} {name}".encode()))
        values = torch.randn(shape, generator=generator, device=self._device, dtype=torch.float32)
        if name == "token_embd.weight":
            return values
        # Layers that say little leave the last token's embedding as it is, which is what counting needs.
        quiet = 0.1 if self.counts and name.endswith(("attn_output.weight", "ffn_down.weight")) else 1.0
        return values.mul_(quiet / math.sqrt(shape[-1]))
