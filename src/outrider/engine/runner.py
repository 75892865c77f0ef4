"""Which of our own backends runs a model, and where: native kernels on a CPU, or torch."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from outrider.config import ModelConfig
from outrider.errors import ConfigError, MissingPackageError
from outrider.models.base import ModelFile, TransformerSpec
from outrider.models.gguf import GGUFFile
from outrider.native.library import library, why_not

TORCH = "pip install 'outrider[torch]'"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")  # that run natively
# What drivers of graphics cards leave in /dev: NVIDIA's, also on small boards, Windows's below Linux, AMD's.
DEVICE_FILES = ("nvidia*", "nvhost*", "nvgpu*", "dxg", "kfd")


class Runner(NamedTuple):
    """What runs a model. `reason` says why it is not the native backend."""

    backend: Literal["native", "torch"]
    device: str  # cpu, cuda or cuda:N
    reason: str = ""
    is_loss: bool = False  # the native backend would have run it


def choose(file: ModelFile, config: ModelConfig) -> Runner:
    """For one model. "auto" takes the native backend for every GGUF file on a CPU."""
    if config.backend == "native":
        return _native(file, config)
    device = device_name(config)
    if config.backend == "torch":
        return Runner("torch", device, "asked for")
    if device != "cpu":
        return Runner("torch", device, f"on {device}")
    unfit = why_unfit(file)
    if unfit is not None:
        return Runner("torch", device, unfit)
    missing = why_not()
    return Runner("native", device) if missing is None else Runner("torch", device, missing, is_loss=True)


def _native(file: ModelFile, config: ModelConfig) -> Runner:
    if config.device not in ("auto", "cpu"):
        raise ConfigError(
            f"the native backend runs on the CPU, not on {config.device}; leave the device or the backend out",
            param="device",
        )
    unfit = why_unfit(file)
    if unfit is not None:
        raise ConfigError(f"{file.name} does not run natively: {unfit}; leave the backend out", param="backend")
    library()
    return Runner("native", "cpu")


def why_unfit(file: ModelFile) -> str | None:
    """Why a model does not run natively on any machine; None where it does."""
    if not isinstance(file, GGUFFile):
        return "it is no GGUF file"
    if not isinstance(file.spec, TransformerSpec) or file.spec.family not in FAMILIES:
        return f"{file.spec.family} models run on torch only"
    return None


def has_torch() -> bool:
    return find_spec("torch") is not None


def require_torch(what: str, runner: Runner | None = None) -> None:
    """An error with every cure, where torch is not installed."""
    if has_torch():
        return
    if runner is not None and runner.is_loss:
        raise MissingPackageError(f"{what} cannot run: {runner.reason}, or torch with {TORCH}")
    raise MissingPackageError(f"{what} needs torch; install it with {TORCH}")


def device_name(config: ModelConfig) -> str:
    """Where models run: cpu, cuda or cuda:N. torch is asked only where there may be a graphics card."""
    name = config.device
    if name == "auto":
        return "cuda" if may_have_cuda() and has_torch() and _torch_sees_cuda() else "cpu"
    if name == "cpu":
        return name
    require_torch(f"the device {name}")
    if not _torch_sees_cuda():
        raise ConfigError(f"device {name} was asked for, but torch sees no CUDA device; use cpu", param="device")
    return name


def second_gpu(config: ModelConfig) -> str | None:
    """Where a draft that runs ahead does not share a GPU with its target; None where there is one GPU, or none."""
    name = device_name(config)
    if name == "cpu":
        return None
    import torch

    taken = torch.device(name).index or 0
    return next((f"cuda:{number}" for number in range(torch.cuda.device_count()) if number != taken), None)


def may_have_cuda() -> bool:
    """Whether importing torch to look for a device can be worth its time. On Linux a driver shows in /dev."""
    if "torch" in sys.modules:
        return True
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):  # all are hidden
        return False
    if not sys.platform.startswith("linux") or "CUDA_VISIBLE_DEVICES" in os.environ:
        return True
    return any(next(Path("/dev").glob(pattern), None) is not None for pattern in DEVICE_FILES)


def _torch_sees_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
