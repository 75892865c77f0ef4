"""A Hugging Face folder as a `ModelFile`: config.json and safetensors, whole or in shards. Pickles are never read.

What config.json means is in `folder_config.py`; here are the files, the names and the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import MissingPackageError, ModelFileError
from outrider.jsonfile import read_json
from outrider.models.base import Shape, Spec, expected_shapes
from outrider.models.facts import Facts
from outrider.models.folder_config import CURE, read_spec
from outrider.types import Array

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = ("F64", "F32", "F16", "BF16")

# Theirs -> ours, first outside of the layers, then within `model.layers.N.` or `backbone.layers.N.`.
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "backbone.embeddings.weight": "token_embd.weight",
    "backbone.embedding.weight": "token_embd.weight",  # as early mamba folders have it
    "backbone.norm_f.weight": "output_norm.weight",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.qkv_proj.weight": "attn_qkv.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.gate_up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "norm.weight": "attn_norm.weight",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.x_proj.weight": "ssm_x.weight",
    "mixer.dt_proj.weight": "ssm_dt.weight",
    "mixer.dt_proj.bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.out_proj.weight": "ssm_out.weight",
}
_IN_LAYER = re.compile(r"(?:model|backbone)\.layers\.(\d{1,4})\.(.+)", re.ASCII)
_UNUSED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # old folders store what the config says


class FolderFile:
    """An opened folder. Tensors stay in their files until they are read."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        config = read_json(self.path / "config.json")
        self.spec: Spec = read_spec(Facts(self.path / "config.json", config))
        self.eos_ids = self._eos_ids(config)
        self._shards = [_Shard(file) for file in self._files()]
        self._places: dict[str, tuple[_Shard, str]] = {}
        self.shapes: Mapping[str, Shape] = self._find()

    @property
    def name(self) -> str:
        folder = self.path.resolve()
        if folder.parent.name == "snapshots":  # the hub's cache: models--owner--name/snapshots/hash
            return folder.parent.parent.name.rpartition("--")[2]
        return folder.name

    @property
    def types(self) -> dict[str, str]:
        """How each tensor is stored."""
        return {name: shard.type_of(theirs) for name, (shard, theirs) in self._places.items()}

    def read(self, name: str) -> Array:
        """One tensor in the precision it is stored in: torch for bfloat16, else numpy."""
        if name not in self._places:
            raise ModelFileError(f"{self.path}: the model has no tensor {name}, or was closed")
        shard, theirs = self._places[name]
        tensor = shard.read(theirs)
        if name.endswith(".ssm_a"):
            tensor = -tensor.float().exp()  # stored is the logarithm of the decay
        elif name.endswith(".ssm_conv1d.weight"):
            tensor = tensor.squeeze(1)
        return tensor if str(tensor.dtype) == "torch.bfloat16" else tensor.numpy()

    def close(self) -> None:
        """Let the files go. Tensors read before stay valid."""
        self._shards.clear()
        self._places.clear()

    def _eos_ids(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """What generation_config.json says, then config.json: chat models often name their end of turn in only one."""
        files = {"config.json": config}
        if (self.path / "generation_config.json").exists():
            generation = read_json(self.path / "generation_config.json")
            files = {"generation_config.json": generation, **files}
        ids: list[int] = []
        for name, values in files.items():
            given = values.get("eos_token_id")
            many = given if isinstance(given, list) else [] if given is None else [given]
            for one in many:
                facts = Facts(self.path / name, {"eos_token_id": one})
                ids.append(facts.whole("eos_token_id", low=0, high=self.spec.num_columns - 1))
        return tuple(dict.fromkeys(ids))

    def _files(self) -> list[Path]:
        """The files the weights are in."""
        single, index = self.path / "model.safetensors", self.path / "model.safetensors.index.json"
        if single.exists():
            return [single]
        if index.exists():
            return _shard_files(index)
        if any(self.path.glob("*.bin")) or any(self.path.glob("*.pt*")):
            raise ModelFileError(
                f"{self.path}: the weights are pickles, which are never executed; convert the model to safetensors"
            )
        raise ModelFileError(f"{self.path}: there is neither {single.name} nor {index.name}")

    def _find(self) -> dict[str, Shape]:
        """Shapes by our names. A tensor nobody would read means a model this is not."""
        stored: dict[str, Shape] = {}
        for shard in self._shards:
            for theirs, shape in shard.shapes.items():
                ours = _short(theirs)
                if _UNUSED.fullmatch(theirs):
                    continue
                if ours is None or ours in stored:
                    problem = "is of a kind that cannot be computed" if ours is None else "is there twice"
                    raise ModelFileError(f"{shard.path}: the tensor {theirs[:80]!r} {problem}; {CURE}")
                self._places[ours] = (shard, theirs)
                stored[ours] = shape
                if ours.endswith("ssm_conv1d.weight") and len(shape) == 3 and shape[1] == 1:
                    stored[ours] = (shape[0], shape[2])
        if "output.weight" in stored:  # then it is used whatever the config says, as in transformers
            self.spec = replace(self.spec, tied=False)
        wanted = expected_shapes(self.spec, stored)
        for ours, (shard, theirs) in self._places.items():
            if ours not in wanted:
                raise ModelFileError(
                    f"{shard.path}: {theirs!r} does not belong to a {self.spec.family} model that can be read; {CURE}"
                )
        return {name: stored[name] for name in wanted if name in stored}


class _Shard:
    """One safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise _missing_package() from error
        self._errors: tuple[type[Exception], ...] = (SafetensorError, OSError, ValueError, RuntimeError)
        try:
            self._file: Any = safe_open(path, framework="pt")
            self.shapes = self._shapes()
        except ImportError as error:  # torch
            raise _missing_package() from error
        except self._errors as error:
            raise ModelFileError(f"{path}: the safetensors file is damaged, fetch it again: {error}") from error

    def read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except self._errors as error:
            raise ModelFileError(f"{self.path}: the tensor {name!r} cannot be read: {error}") from error
        return tensor

    def type_of(self, name: str) -> str:
        return str(self._file.get_slice(name).get_dtype())

    def _shapes(self) -> dict[str, Shape]:
        return {name: self._shape(name) for name in self._file.keys()}  # noqa: SIM118 it is not a dict

    def _shape(self, name: str) -> Shape:
        stored = self._file.get_slice(name)
        if stored.get_dtype() not in FLOATS:
            raise ModelFileError(
                f"{self.path}: the tensor {name[:80]!r} has the type {stored.get_dtype()}, only floating point "
                f"({', '.join(FLOATS)}) can be read; {CURE}"
            )
        return tuple(stored.get_shape())


def _shard_files(index: Path) -> list[Path]:
    """The shards an index names. Only the names: which tensors are in a shard, it says itself."""
    given = read_json(index).get("weight_map")
    if not isinstance(given, dict) or not given or not all(isinstance(one, str) for one in given.values()):
        raise ModelFileError(f"{index}: weight_map must give a file name for each tensor")
    names = sorted(set(given.values()))
    present = {entry.name for entry in index.parent.iterdir()}
    for name in names:
        # Also a guard: an index must not lead out of its folder.
        if "/" in name or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
            raise ModelFileError(f"{index}: {name[:80]!r} is not the name of a safetensors file in this folder")
        if name not in present:
            raise ModelFileError(f"{index}: the file {name[:80]} is missing; the model is incomplete, fetch it again")
    return [index.parent / name for name in names]


def _short(theirs: str) -> str | None:
    """Our name of a tensor, if it has one."""
    if match := _IN_LAYER.fullmatch(theirs):
        ours = _LAYER.get(match[2])
        return ours and f"blk.{match[1]}.{ours}"
    return _TOP.get(theirs)


def _missing_package() -> MissingPackageError:
    return MissingPackageError("reading a model folder needs torch and safetensors: pip install 'outrider[torch]'")
