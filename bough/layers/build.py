"""What every layer needs to know when it is made. An argument, never ambient."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bough.distributed.mesh import SINGLE, Mesh
from bough.quantization.scheme import Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Where and how a model is made."""

    scheme: Scheme
    dtype: torch.dtype
    device: torch.device
    context_length: int
    """Longest sequence that will be computed: rotary tables end there."""
    mesh: Mesh = SINGLE
