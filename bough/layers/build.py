"""What every layer needs to know when it is made. An argument, never ambient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bough.config.experts import PLAIN_EXPERTS, ExpertPlan
from bough.distributed.mesh import SINGLE, Mesh
from bough.layers.adapters import Adapters, wrapped
from bough.layers.spread import TokenSpread
from bough.quantization.read import LayerKind
from bough.quantization.scheme import ExpertShape, ExpertWeights, Matrix, Part, Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Where and how a model is made."""

    scheme: Scheme
    dtype: torch.dtype
    device: torch.device
    context_length: int
    """Longest sequence that will be computed: rotary tables end there."""
    mesh: Mesh = SINGLE
    experts_plan: ExpertPlan = PLAIN_EXPERTS
    """Where experts are, and how tokens reach them."""
    first_layer: int = 0
    """Where the KV of the model's first layer lies in the cache: behind that of the model which it drafts for."""
    spread: TokenSpread | None = None
    """Ranks that hold different tokens; None: all ranks of a stage hold the same."""
    adapters: Adapters | None = None
    """None: the model has none."""

    def matrix(self, name: str, parts: Sequence[Part], kind: LayerKind = "linear") -> Matrix:
        """An empty matrix of the layer `name`, as the scheme stores it, with its adapters."""
        made = self.scheme.matrix(name, parts, kind=kind, dtype=self.dtype, device=self.device)
        return wrapped(made, name, parts, self.adapters, self.dtype, self.device)

    def experts(self, name: str, shape: ExpertShape) -> ExpertWeights:
        """Empty weights of the experts `name`, as the scheme stores them."""
        return self.scheme.experts(name, shape, dtype=self.dtype, device=self.device)
