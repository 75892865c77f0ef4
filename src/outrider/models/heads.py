"""Draft heads in their public layouts as a `HeadFile`: a spec and tensors by name, whatever the layout.

What Medusa's files mean is in `medusa.py`, EAGLE's in `eagle.py`. A tensor or a setting that would not be computed is
refused, never ignored. Whether a head fits a model, `check_fit` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from outrider.errors import ModelFileError, OutriderError
from outrider.jsonfile import read_json
from outrider.models.base import Shape
from outrider.models.eagle import eagle_shapes, read_eagle
from outrider.models.facts import Facts
from outrider.models.head_spec import IDS, OFFSETS, EagleSpec, HeadSpec, MedusaSpec
from outrider.models.head_tensors import FLOATS, INTEGERS, Tensors, open_tensors
from outrider.models.medusa import medusa_shapes, read_medusa
from outrider.models.own_heads import fingerprint_in, kept_in

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.models.head_tensors import Array

FILES = ("medusa_lm_head.safetensors", "model.safetensors", "medusa_lm_head.pt", "pytorch_model.bin")


class Host(NamedTuple):
    """What must be known of the model that a head is to sit on."""

    name: str
    width: int
    num_layers: int
    vocab_size: int
    num_columns: int


class HeadFile:
    """An opened head. Tensors stay in their file until they are read."""

    def __init__(self, path: Path, tensors: Tensors, spec: HeadSpec, names: Mapping[str, str]) -> None:
        self.path = path
        self.spec = spec
        self.shapes: Mapping[str, Shape] = {ours: tensors.shapes[theirs] for ours, theirs in names.items()}
        self.types: Mapping[str, str] = {ours: tensors.types[theirs] for ours, theirs in names.items()}
        self._tensors, self._names = tensors, names
        self.made_for: str | None = None  # the fingerprint of the model it was trained on, where it says
        self.kept: list[float] = []  # the share of its chains that were kept up to each place, where it says
        self._check()

    @property
    def name(self) -> str:
        """For people."""
        folder = (self.path if self.path.is_dir() else self.path.parent).resolve()
        if folder.parent.name == "snapshots":  # the hub's cache: models--owner--name/snapshots/hash
            return folder.parent.parent.name.rpartition("--")[2]
        return folder.name

    def read(self, name: str) -> Tensor:
        """One tensor in the precision it is stored in, for heads that torch computes."""
        return self._tensors.read(self._theirs(name))

    def numbers(self, name: str) -> Array:
        """The same for numpy, without torch: in single precision, whole numbers in 64 bits."""
        return self._tensors.numbers(self._theirs(name))

    def _theirs(self, name: str) -> str:
        if name not in self._names:
            raise ModelFileError(f"{self.path}: the head has no tensor {name}")
        return self._names[name]

    def _check(self) -> None:
        """Every tensor the spec asks for is there and no other, all of the right shape and type."""
        spec, shapes = self.spec, self.shapes
        wanted = medusa_shapes(spec, shapes) if isinstance(spec, MedusaSpec) else eagle_shapes(spec, shapes)
        for ours, shape in wanted.items():
            if ours not in shapes:
                raise ModelFileError(
                    f"{self.path}: the tensor {ours} is missing; the head is incomplete, fetch it again"
                )
            if shapes[ours] != shape:
                raise ModelFileError(
                    f"{self.path}: {ours} has shape {list(shapes[ours])}, the head needs {list(shape)}"
                )
        for ours, theirs in self._names.items():
            if ours not in wanted:
                raise ModelFileError(f"{self.path}: {theirs[:80]!r} does not belong to a head of this kind")
            known = INTEGERS if ours in (IDS, OFFSETS) else FLOATS
            if self.types[ours] not in known:
                raise ModelFileError(
                    f"{self.path}: the tensor {theirs[:80]!r} has the type {self.types[ours]}, "
                    f"only {', '.join(known)} can be read"
                )


def open_head(path: Path | str) -> HeadFile:
    """The head at `path`, a folder or the file of weights in it, with every tensor it needs; or a ModelFileError."""
    path = Path(path)
    if path.suffix == ".gguf":
        raise ModelFileError(f"{path} is a model, not a head; name it as the draft without eagle: or medusa:")
    try:
        folder, weights = (path, _weights_in(path)) if path.is_dir() else (path.parent, path)
        there = weights.is_file()
    except OSError as error:
        raise ModelFileError(f"{path}: this cannot be opened: {error.strerror}") from error
    if not there:
        raise ModelFileError(f"{path}: there is no such file or folder")
    facts = Facts(folder / "config.json", read_json(folder / "config.json"))
    tensors = open_tensors(weights)
    file = HeadFile(path, tensors, *(read_medusa if _is_medusa(facts) else read_eagle)(facts, tensors))
    file.made_for = fingerprint_in(facts.values.get("outrider"))
    file.kept = kept_in(facts.values.get("outrider"))
    return file


def head_kind(path: Path) -> str | None:
    """ "medusa" or "eagle" where a head lies, None elsewhere."""
    try:
        spec = open_head(path).spec
    except OutriderError:
        return None
    return "medusa" if isinstance(spec, MedusaSpec) else "eagle"


def _weights_in(folder: Path) -> Path:
    for name in FILES:
        if (folder / name).exists():
            return folder / name
    if any(folder.glob("*.index.json")):
        raise ModelFileError(f"{folder}: the head is cut into several files; save it as one, model.safetensors")
    raise ModelFileError(f"{folder}: there is no head, that is none of {', '.join(FILES)}")


def _is_medusa(facts: Facts) -> bool:
    kind = facts.text("speculators_model_type", default="")
    if kind not in ("", "eagle", "eagle3", "medusa"):
        raise facts.fail(f"speculators_model_type is {kind[:40]!r}; only eagle, eagle3 and medusa can be read")
    if kind:
        return kind == "medusa"
    return facts.has("medusa_num_heads") or facts.text("model_type", default="llama") == "medusa"


def check_fit(file: HeadFile, host: Host) -> None:
    """Whether the head was made for a model like this one; a ModelFileError says why not, with both numbers."""
    spec = file.spec
    width, vocab_size = _made_for(spec)
    reason = None
    if width != host.width:
        reason = f"it reads hidden states of width {width}, the model's have {host.width}"
    elif vocab_size is not None and not host.vocab_size <= vocab_size <= host.num_columns:
        padding = host.num_columns - host.vocab_size
        reason = f"it was made for {vocab_size} tokens, the model has {host.vocab_size}"
        reason += f" and {padding} of padding" if padding else ""
    elif isinstance(spec, EagleSpec):
        layers = spec.layers_of(host.num_layers)
        if sorted(set(layers)) != list(layers) or layers[0] < 0 or layers[-1] > host.num_layers + 1:
            count = host.num_layers
            reason = f"it reads hidden states after layers {list(layers)}, which must differ and be among {count}"
        missing = [name for name in ("token_embd.weight", "output.weight") if name not in file.shapes]
        if missing and spec.layer.width != host.width:
            reason = f"its width is {spec.layer.width}, the model's {host.width}, and it has no {missing[0]} of its own"
    if reason is not None:
        message = f"{file.path}: the head does not fit {host.name}: {reason}; take one made for it"
        raise ModelFileError(message, param="draft")


def _made_for(spec: HeadSpec) -> tuple[int, int | None]:
    """The width and the vocabulary (if it says) of the models this head is for."""
    if isinstance(spec, EagleSpec):
        return spec.target_width, spec.layer.num_columns
    return spec.width, None if spec.num_columns == spec.draft_vocab_size else spec.num_columns
