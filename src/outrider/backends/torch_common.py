"""What the torch backends share: the arrays they hand over, and the memory they may use."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from outrider.backends.memory import free_host_memory
from outrider.native.sampling import cpu_sampling
from outrider.sampling.ops import SamplingOps
from outrider.types import Array


def sampling_for(device: torch.device) -> SamplingOps:
    """On the CPU rows are numpy's: sharing memory is free, and native code samples from them."""
    if device.type == "cpu":
        return cpu_sampling()
    if find_spec("triton") is not None:
        from outrider.backends.cuda.sampling import DeviceSampling

        return DeviceSampling(device)
    import array_api_compat.torch as xp

    return SamplingOps(xp, device)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels and events go to the current device, which is the first one unless somebody says otherwise."""
    return torch.cuda.device(device) if device.type == "cuda" and device.index else nullcontext()


def sent(values: Any, dtype: Any, device: torch.device) -> torch.Tensor:
    """A few numbers on their way to the device. (`torch.tensor` waits until everything queued there is done.)"""
    return torch.from_numpy(np.asarray(values, dtype=dtype)).to(device, non_blocking=True)


def dtype_for(device: torch.device) -> torch.dtype:
    """What weights are kept in. torch has no quick half precision on a CPU."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def array_of(tensor: torch.Tensor) -> Array:
    """A tensor as `sampling_for` wants it, without a copy."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def tensor_of(array: Array) -> torch.Tensor:
    """What a model file read, as a tensor. Views of the file are copied: torch cannot promise not to write to them."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        array = array.copy()
    return torch.as_tensor(array)


def free_memory(device: torch.device) -> int:
    """Bytes nobody uses."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_host_memory()
