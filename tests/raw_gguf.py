"""GGUF files written byte by byte, so that each field can be made wrong on purpose; no code of the reader is used."""

from __future__ import annotations

import math
import random
import struct
from dataclasses import dataclass, field

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

U32, FLOAT, STRING, ARRAY = 4, 6, 8, 9


@dataclass(kw_only=True)
class RawTensor:
    name: bytes
    shape: tuple[int, ...]  # rows first; the file has them last
    kind: int = 0
    offset: int | None = None  # None: right behind the one before

    @property
    def size(self) -> int:
        known = self.kind in list(GGMLQuantizationType)
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self.kind)] if known else (1, 4)
        return math.prod(self.shape) // block * size


@dataclass(kw_only=True)
class RawGGUF:
    keys: list[tuple[bytes, int, bytes]] = field(default_factory=list)  # name, value type, value
    tensors: list[RawTensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    num_keys: int | None = None  # None: as many as there are
    num_tensors: int | None = None
    order: str = "<"

    def index(self, name: str) -> int:
        return [tensor.name for tensor in self.tensors].index(name.encode())

    def change(self, name: str, **changes: object) -> None:
        for attribute, value in changes.items():
            setattr(self.tensors[self.index(name)], attribute, value)

    def set(self, name: str, kind: int, value: bytes) -> None:
        self.keys = [key for key in self.keys if key[0] != name.encode()] + [(name.encode(), kind, value)]

    def remove(self, name: str) -> None:
        assert any(key[0] == name.encode() for key in self.keys) or name.encode() in [one.name for one in self.tensors]
        self.keys = [key for key in self.keys if key[0] != name.encode()]
        self.tensors = [tensor for tensor in self.tensors if tensor.name != name.encode()]

    def header(self) -> bytes:
        keys = list(self.keys)
        if self.alignment != 32:
            keys.append((b"general.alignment", U32, u32(self.alignment)))
        num_keys = len(keys) if self.num_keys is None else self.num_keys
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        parts = [self.magic, struct.pack(self.order + "IQQ", self.version, num_tensors, num_keys)]
        parts += [text(name) + u32(kind) + value for name, kind, value in keys]
        end = 0
        for tensor in self.tensors:
            offset = end if tensor.offset is None else tensor.offset
            dimensions = struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
            parts += [
                text(tensor.name),
                u32(len(tensor.shape)),
                dimensions,
                struct.pack("<IQ", tensor.kind, offset % 2**64),
            ]
            end = self._aligned(offset + tensor.size)
        return b"".join(parts)

    def build(self, *, with_data: bool = True) -> bytes:
        """The whole file with random data, ending with the last tensor."""
        header = self.header()
        if not with_data:
            return header
        end = 0
        for tensor in self.tensors:
            start = self._aligned(end) if tensor.offset is None else tensor.offset
            end = start + tensor.size
        padding = b"\0" * (self._aligned(len(header)) - len(header))
        return header + padding + random.Random(0).randbytes(min(end, 10_000_000))

    def _aligned(self, position: int) -> int:
        alignment = self.alignment if 0 < self.alignment <= 4096 else 32
        return -(-position // alignment) * alignment


def small_llama(*, width: int = 8) -> RawGGUF:
    """One layer, five tokens, two heads that share their keys."""
    raw = RawGGUF()
    raw.set("general.architecture", STRING, text(b"llama"))
    numbers = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": width,
        "feed_forward_length": width,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
    }
    for name, number in numbers.items():
        raw.set(f"llama.{name}", U32, u32(number))
    raw.set("llama.attention.layer_norm_rms_epsilon", FLOAT, struct.pack("<f", 1e-5))
    raw.set(
        "tokenizer.ggml.tokens", ARRAY, u32(STRING) + u64(5) + b"".join(text(bytes([97 + one])) for one in range(5))
    )
    raw.set("tokenizer.ggml.token_type", ARRAY, u32(5) + u64(5) + struct.pack("<5i", 3, 1, 1, 1, 1))
    raw.set("tokenizer.ggml.eos_token_id", U32, u32(2))
    shapes = {
        "token_embd": (5, width),
        "output_norm": (width,),
        "blk.0.attn_norm": (width,),
        "blk.0.attn_q": (width, width),
        "blk.0.attn_k": (width // 2, width),
        "blk.0.attn_v": (width // 2, width),
        "blk.0.attn_output": (width, width),
        "blk.0.ffn_norm": (width,),
        "blk.0.ffn_gate": (width, width),
        "blk.0.ffn_up": (width, width),
        "blk.0.ffn_down": (width, width),
    }
    raw.tensors = [RawTensor(name=f"{name}.weight".encode(), shape=shape) for name, shape in shapes.items()]
    return raw


def text(value: bytes) -> bytes:
    return u64(len(value)) + value


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)
