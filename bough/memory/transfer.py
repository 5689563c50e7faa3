"""Copies between host and device that never make the host wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A device tensor with the array's values. On a GPU the copy is queued from pinned memory; on a CPU it may share the
    array's memory, unless that is read-only."""
    if device.type == "cpu":
        # Torch warns of memory that it could not write to.
        return torch.from_numpy(np.ascontiguousarray(array) if array.flags.writeable else array.copy())
    pinned = torch.empty(array.shape, dtype=numpy_dtype(array.dtype), pin_memory=True)
    np.copyto(pinned.numpy(), array)
    return pinned.to(device, non_blocking=True)


def numpy_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Torch's name of a dtype."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def download(tensor: Tensor) -> Tensor:
    """A host tensor that holds the values once the device has reached this point of its stream."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host
