"""A GGUF file as a `ModelFile`: the spec from its keys, tensors decoded one at a time from the mapped file.

The layout of the file is in `gguf_header.py`; quantised values are decoded by the gguf package, imported only then.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import ModelFileError
from outrider.models import rope
from outrider.models.base import MambaSpec, Rope, Shape, Spec, TransformerSpec, expected_shapes
from outrider.models.facts import MAX_CONTEXT, MAX_HEAD, MAX_LAYERS, MIN_CONTEXT, Facts
from outrider.models.gguf_header import Header, StoredTensor, read_header
from outrider.types import Array

# Interleaved or not is a convention of each architecture, it stands in no key: llama's converter reorders the rows.
INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False, "phi3": False}

# Values at once in a decoder: its temporaries are several times as large, and this keeps them in the cache.
DECODE_VALUES = 2**18

# Tensors that are facts about positions and not weights; attn_rot_embd is what old converters left in.
_POSITIONS = re.compile(r"rope_freqs\.weight|rope_factors_(short|long)\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")

# Keys that change the computation in a way `TransformerSpec` does not know, with the value that changes nothing.
_FOREIGN = {
    "attention.scale": (0.0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.temperature_length": (0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0, -1.0),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "ssm.dt_b_c_rms": (False,),
}

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Tokens that end a turn whatever the keys say; llama.cpp goes by their text as well. Many files name only the end of a
# document as EOS, and a chat would run on.
_END_TEXTS = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>")
)
_CONTROL, _USER_DEFINED = 3, 4  # the token types they have; some converters know only the second


class GGUFFile:
    """An opened GGUF file. Tensors of type F32 and F16 are views of the file and keep it mapped after `close`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._data: mmap.mmap | None = _map(self.path)
        header = read_header(self.path, self._data)
        self.metadata: Mapping[str, Any] = header.metadata
        self._tensors = header.tensors
        self.spec: Spec = _Translator(self.path, self._data, header).spec()
        self.shapes: Mapping[str, Shape] = self._used()
        self.types: Mapping[str, str] = {name: self._tensors[name].storage.name for name in self.shapes}
        self.eos_ids = end_tokens(self.path, header.metadata, self.spec.num_columns)

    @property
    def name(self) -> str:
        # Not general.name: converters fill it with anything, and the file's own name has the quantisation in it.
        return self.path.stem

    def read(self, name: str) -> Array:
        """One tensor: F16 stays, everything else is float32."""
        if self._data is None:
            raise ModelFileError(f"{self.path}: the file was closed; open it again")
        if name not in self.shapes:
            raise ModelFileError(f"{self.path}: the model has no tensor {name}")
        return _decode(self._data, self._tensors[name])

    def stored(self, name: str) -> Array:
        """One tensor as the file has it: bytes, a view of the file."""
        import numpy

        if self._data is None:
            raise ModelFileError(f"{self.path}: the file was closed; open it again")
        tensor = self._tensors[name]
        return numpy.frombuffer(self._data, numpy.uint8, tensor.num_bytes, tensor.start)

    def let_go(self, name: str) -> None:
        """What was read of a tensor need not stay in memory."""
        tensor = self._tensors[name]
        start, end = -(-tensor.start // mmap.PAGESIZE), (tensor.start + tensor.num_bytes) // mmap.PAGESIZE
        if self._data is not None and end > start and hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED, start * mmap.PAGESIZE, (end - start) * mmap.PAGESIZE)

    def close(self) -> None:
        """Give up the mapping. Views handed out before stay valid: the last of them unmaps the file."""
        self._data = None

    def _used(self) -> dict[str, Shape]:
        """Shapes of what the model is made of. A tensor nobody would read means a model this is not."""
        wanted = expected_shapes(self.spec, self._tensors)
        for name in self._tensors:
            if name not in wanted and not _POSITIONS.fullmatch(name):
                raise ModelFileError(
                    f"{self.path}: {name!r} does not belong to a {self.spec.family} model that can be read"
                )
        return {name: self._tensors[name].shape for name in wanted if name in self._tensors}


class _Translator:
    """From the keys of one file to a spec."""

    def __init__(self, path: Path, data: mmap.mmap, header: Header) -> None:
        self.facts = Facts(path, header.metadata)
        self.data = data
        self.tensors = header.tensors
        self.family = self.facts.text("general.architecture")

    def spec(self) -> Spec:
        if self.family != "mamba" and self.family not in INTERLEAVED:
            known = ", ".join([*INTERLEAVED, "mamba"])
            raise self.facts.fail(f"the architecture {self.family[:40]!r} cannot be read, only {known}")
        for name, harmless in _FOREIGN.items():
            value = self.facts.values.get(self.key(name))
            if value is not None and value not in harmless:
                raise self.facts.fail(f"{self.key(name)} is set, and such models cannot be read")
        return self._mamba() if self.family == "mamba" else self._transformer()

    def key(self, name: str) -> str:
        return f"{self.family}.{name}"

    def _mamba(self) -> MambaSpec:
        whole, key = self.facts.whole, self.key
        if not any(name.endswith("ssm_conv1d.bias") for name in self.tensors):
            raise self.facts.fail("its convolutions have no bias (ssm_conv1d.bias), and such models cannot be read")
        return MambaSpec(
            family=self.family,
            num_layers=whole(key("block_count"), high=MAX_LAYERS),
            width=whole(key("embedding_length")),
            inner=whole(key("ssm.inner_size")),
            state=whole(key("ssm.state_size")),
            conv=whole(key("ssm.conv_kernel")),
            dt_rank=whole(key("ssm.time_step_rank")),
            num_columns=self._num_columns(),
            context=whole(key("context_length"), low=MIN_CONTEXT, high=MAX_CONTEXT),
            norm_eps=self.facts.number(key("attention.layer_norm_rms_epsilon"), high=1.0),
            tied="output.weight" not in self.tensors,
        )

    def _transformer(self) -> TransformerSpec:
        whole, key = self.facts.whole, self.key
        width, num_heads = whole(key("embedding_length")), whole(key("attention.head_count"))
        num_kv_heads = whole(key("attention.head_count_kv"), default=num_heads)
        if num_heads % num_kv_heads:
            raise self.facts.fail(f"{num_heads} query heads cannot share {num_kv_heads} key heads evenly")
        num_layers, context = whole(key("block_count"), high=MAX_LAYERS), self._context()
        head_dim = self._head_dim(width, num_heads)
        return TransformerSpec(
            family=self.family,
            num_layers=num_layers,
            width=width,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            ffn_width=whole(key("feed_forward_length")),
            num_columns=self._num_columns(),
            context=context,
            norm_eps=self.facts.number(key("attention.layer_norm_rms_epsilon"), high=1.0),
            rope=self._rope(head_dim),
            windows=self._windows(num_layers, context),
            tied="output.weight" not in self.tensors,
        )

    def _num_columns(self) -> int:
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None:
            raise self.facts.fail("the tensor token_embd.weight is missing; the file is incomplete, fetch it again")
        return embedding.shape[0]

    def _head_dim(self, width: int, num_heads: int) -> int:
        key, values = self.key("attention.key_length"), self.key("attention.value_length")
        if not self.facts.has(key) and width % num_heads:
            raise self.facts.fail(f"the width {width} cannot be divided among {num_heads} heads")
        head_dim = self.facts.whole(key, default=width // num_heads, high=MAX_HEAD)
        if head_dim % 2:
            raise self.facts.fail(f"heads must have an even number of dimensions, got {head_dim}")
        if self.facts.whole(values, default=head_dim) != head_dim:
            raise self.facts.fail(f"{values} differs from {key}, and such models cannot be read")
        return head_dim

    def _context(self) -> int:
        context = self.facts.whole(self.key("context_length"), low=MIN_CONTEXT, high=MAX_CONTEXT)
        if "rope_factors_short.weight" not in self.tensors:
            return context
        # Longrope has two sets of frequencies, and a cache filled with one cannot be used with the other. The short
        # ones hold up to the original length.
        return min(context, self._original(context))

    def _original(self, context: int) -> int:
        return self.facts.whole(
            self.key("rope.scaling.original_context_length"), default=context, low=MIN_CONTEXT, high=MAX_CONTEXT
        )

    def _rope(self, head_dim: int) -> Rope:
        facts, key = self.facts, self.key
        dims = facts.whole(key("rope.dimension_count"), default=head_dim, high=head_dim)
        if dims % 2:
            raise facts.fail(f"{key('rope.dimension_count')} must be even, got {dims}")
        base = facts.number(key("rope.freq_base"), default=10_000.0, low=1.001)
        kind = facts.text(key("rope.scaling.type"), default="linear")  # a factor alone is linear, as in llama.cpp
        factor = facts.number(key("rope.scale_linear"), default=1.0)
        factor = facts.number(key("rope.scaling.factor"), default=factor)
        scale = facts.number(key("rope.scaling.attn_factor"), default=1.0)
        frequencies = rope.plain(dims, base)
        if kind == "linear":
            frequencies = rope.linear(frequencies, factor)
        elif kind == "yarn":
            frequencies = self._yarn(dims, base, factor)
            scale *= rope.yarn_scale(factor)
        elif kind not in ("none", "longrope"):  # longrope's factors are tensors
            raise facts.fail(f"{key('rope.scaling.type')} is {kind[:40]!r}, which is unknown")
        if kind == "longrope" or "rope_factors_long.weight" in self.tensors:
            self._check_short_factors()
        for name in ("rope_freqs.weight", "rope_factors_short.weight"):
            if name in self.tensors:
                frequencies = rope.divided(frequencies, self._factors(name, dims // 2))
        return Rope(frequencies=frequencies, interleaved=INTERLEAVED[self.family], scale=scale)

    def _check_short_factors(self) -> None:
        if "rope_factors_short.weight" not in self.tensors:
            raise self.facts.fail("its positions are longrope's, but rope_factors_short.weight is missing")

    def _yarn(self, dims: int, base: float, factor: float) -> rope.Frequencies:
        number, key = self.facts.number, self.key
        return rope.yarn(
            dims,
            base,
            factor=factor,
            original=self._original(self._context()),
            fast=number(key("rope.scaling.yarn_beta_fast"), default=32.0),
            slow=number(key("rope.scaling.yarn_beta_slow"), default=1.0),
        )

    def _factors(self, name: str, count: int) -> tuple[float, ...]:
        tensor = self.tensors[name]
        if tensor.storage.name != "F32" or tensor.shape != (count,):
            raise self.facts.fail(f"{name} must be {count} F32 values, got {list(tensor.shape)} {tensor.storage.name}")
        factors = struct.unpack_from(f"<{count}f", self.data, tensor.start)
        if not all(1e-6 < factor < 1e6 for factor in factors):
            raise self.facts.fail(f"{name} has a factor that is not a positive number; the file is damaged")
        return factors

    def _windows(self, num_layers: int, context: int) -> tuple[int | None, ...]:
        window = self.facts.whole(self.key("attention.sliding_window"), default=0, low=0, high=MAX_CONTEXT)
        if window == 0 or window >= context:
            return ()
        pattern = self.facts.values.get(self.key("attention.sliding_window_pattern"), [True] * num_layers)
        if not isinstance(pattern, list) or len(pattern) != num_layers or any(one not in (0, 1) for one in pattern):
            raise self.facts.fail(
                f"{self.key('attention.sliding_window_pattern')} must be a list of {num_layers}, a flag for each layer"
            )
        return tuple(window if slides else None for slides in pattern)


def read_metadata(path: Path) -> Mapping[str, Any]:
    """The keys of a file whatever its architecture."""
    return read_header(path, _map(path)).metadata


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:  # nothing to map
                raise ModelFileError(f"{path}: the file is empty; fetch it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: the file cannot be opened: {error}") from error


def end_tokens(path: Path, metadata: Mapping[str, Any], num_columns: int) -> tuple[int, ...]:
    """The end tokens the keys name, then those known to end a turn by their text."""
    facts = Facts(path, metadata)
    keys = [f"tokenizer.ggml.{name}" for name in _END_KEYS]
    ids = [facts.whole(key, low=0, high=num_columns - 1) for key in keys if facts.has(key)]
    texts, types = (facts.values.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if isinstance(texts, list) and isinstance(types, list):
        for index, (text, kind) in enumerate(zip(texts, types, strict=False)):
            if kind in (_CONTROL, _USER_DEFINED) and text in _END_TEXTS and index < num_columns:
                ids.append(index)
    return tuple(dict.fromkeys(ids))


def _decode(data: mmap.mmap, tensor: StoredTensor) -> Array:
    import numpy

    kind = tensor.storage.name
    if kind in ("F32", "F16"):
        dtype = numpy.dtype("<f4" if kind == "F32" else "<f2")
        count = tensor.num_bytes // dtype.itemsize
        return numpy.frombuffer(data, dtype, count, tensor.start).reshape(tensor.shape)
    if kind == "BF16":  # the upper half of a float32
        halves = numpy.frombuffer(data, "<u2", tensor.num_bytes // 2, tensor.start)
        wide = halves.astype("<u4")
        wide <<= 16
        return wide.view("<f4").reshape(tensor.shape)
    from gguf import quants
    from gguf.constants import GGMLQuantizationType

    columns = tensor.shape[-1]
    raw = numpy.frombuffer(data, numpy.uint8, tensor.num_bytes, tensor.start)
    raw = raw.reshape(-1, columns // tensor.storage.block * tensor.storage.size)
    decoded = numpy.empty((len(raw), columns), numpy.float32)
    step = max(1, DECODE_VALUES // columns)
    with numpy.errstate(all="ignore"):  # a damaged scale may overflow: the values are then infinite, nothing is hidden
        for start in range(0, len(raw), step):
            rows = slice(start, start + step)
            decoded[rows] = quants.dequantize(raw[rows], GGMLQuantizationType[kind])
    return decoded.reshape(tensor.shape)
