"""A weight scheme for calibration: plain weights whose layers add up the Gram matrices of what they are multiplied with.

T tokens, D width, F inner units of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bough.config.model_facts import Activation
from bough.kernels.moe import Routing
from bough.quantization.read import LayerKind
from bough.quantization.scheme import ExpertShape, ExpertWeights, Matrix, Part
from bough.quantization.unquantized import GATES, DenseExperts, DenseMatrix, dense_experts


class Grams:
    """Gram matrices by the name of the slot that they belong to, `layers.0.attn.qkv.q`. Nothing is added while `wanted` is
    empty."""

    def __init__(self) -> None:
        self.wanted: set[str] = set()
        """Prefixes of layers' names."""
        self._sums: dict[str, Tensor] = {}

    def wants(self, name: str) -> bool:
        return any(name.startswith(prefix) for prefix in self.wanted)

    def add(self, names: Sequence[str], x_TD: Tensor) -> None:
        """Adds to the sum that all of `names` share."""
        x = x_TD.reshape(-1, x_TD.shape[-1]).float()
        shared = self._sums.get(names[0])
        if shared is None:
            shared = x.new_zeros(x.shape[1], x.shape[1])
            self._sums |= dict.fromkeys(names, shared)
        shared.addmm_(x.T, x)

    def take(self) -> dict[str, Tensor]:
        """What was added up; it is not kept here any longer."""
        sums, self._sums = self._sums, {}
        return sums


class RecordingMatrix(DenseMatrix):
    """Products are computed one by one, so that each input is seen."""

    def __init__(
        self, name: str, grams: Grams, parts: Sequence[Part], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(parts, dtype, device)
        self._grams = grams
        self._names = [f"{name}.{part.name}" if part.name else name for part in parts]

    def forward(self, x_TD: Tensor, bias_O: Tensor | None = None) -> Tensor:
        if self._grams.wants(self._names[0]):
            self._grams.add(self._names, x_TD)
        return super().forward(x_TD, bias_O)

    def some_rows(self, x_TD: Tensor, rows: slice, bias: Tensor | None = None) -> Tensor:
        return Matrix.some_rows(self, x_TD, rows, bias)

    def after_norm(
        self, x_TD: Tensor, residual_TD: Tensor, norm_D: Tensor, eps: float, offset: float, bias_O: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return Matrix.after_norm(self, x_TD, residual_TD, norm_D, eps, offset, bias_O)

    def onto(self, x_TD: Tensor, stream_TO: Tensor) -> tuple[Tensor, Tensor | None]:
        return Matrix.onto(self, x_TD, stream_TO)

    def gated(self, x_TD: Tensor, activation: Activation, bias_O: Tensor | None = None) -> Tensor:
        return GATES[activation](self(x_TD, bias_O))


class RecordingExperts(DenseExperts):
    """Experts one after the other; each adds up the inputs of its tokens."""

    def __init__(self, name: str, grams: Grams, shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        self._grams = grams
        self._name = name

    def forward(self, x_TD: Tensor, weights_Tk: Tensor, ids_Tk: Tensor) -> Tensor:
        if self._grams.wants(self._name):
            for expert in range(self.shape.num_experts):
                token = (ids_Tk == expert).any(1).nonzero()[:, 0]
                if len(token):
                    here = f"{self._name}.{expert}"
                    self._grams.add([f"{here}.gate", f"{here}.up"], x_TD[token])
                    inner = GATES[self.shape.activation](x_TD[token] @ self.gate_up_E2FD[expert].T)
                    self._grams.add([f"{here}.down"], inner)
        return super().forward(x_TD, weights_Tk, ids_Tk)

    def routed(self, x_TD: Tensor, residual_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        return ExpertWeights.routed(self, x_TD, residual_TD, routing)


class Recording:
    """The scheme. Embeddings and output heads are plain."""

    def __init__(self) -> None:
        self.grams = Grams()

    def matrix(
        self,
        name: str,
        parts: Sequence[Part],
        *,
        kind: LayerKind = "linear",
        dtype: torch.dtype,
        device: torch.device,
    ) -> Matrix:
        if kind != "linear":
            return DenseMatrix(parts, dtype, device)
        return RecordingMatrix(name, self.grams, parts, dtype, device)

    def experts(self, name: str, shape: ExpertShape, *, dtype: torch.dtype, device: torch.device) -> ExpertWeights:
        if shape.clamped is not None or not shape.gated:
            return dense_experts(shape, dtype, device)
        return RecordingExperts(name, self.grams, shape, dtype, device)
