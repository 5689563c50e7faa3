"""What makes embeddings of a language model of a tower's features. N tiles, P patches, M positions, D and W widths."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.model_facts import Activation, NormFacts
from bough.layers.build import Build
from bough.layers.linear import ReplicatedLinear
from bough.layers.mlp import ACTIVATIONS
from bough.layers.norm import make_norm
from bough.layers.tower import Learned
from bough.layers.vit import shuffled


class TwoLinears(nn.Module):
    """Squares of neighbours together (`by` > 1), normed if there is a norm; then linear, activation, linear."""

    def __init__(
        self,
        widths: tuple[int, int],
        build: Build,
        *,
        activation: Activation = "gelu",
        bias: bool = True,
        norm: NormFacts | None = None,
        side: int = 0,
        by: int = 1,
        between: int = 0,
    ) -> None:
        """`widths`: of a patch and of the language model. `side`: patches along a side of a tile. `between`: width between
        the products, if it is not that of the language model."""
        super().__init__()
        inner, between = widths[0] * by * by, between or widths[1]
        self.side, self.by = side, by
        self.mlp = nn.ModuleDict({"0": make_norm(norm, inner, build)} if norm is not None else {})
        """By the numbers that some checkpoints give them."""
        self.mlp["1"] = ReplicatedLinear(inner, between, build, bias=bias)
        self.mlp["3"] = ReplicatedLinear(between, widths[1], build, bias=bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x_NPD: Tensor) -> Tensor:
        x_NMF = x_NPD if self.by == 1 else shuffled(x_NPD, self.side, self.by)
        if "0" in self.mlp:
            x_NMF = self.mlp["0"](x_NMF.flatten(0, -2)).view(x_NMF.shape)
        out_NMW: Tensor = self.mlp["3"](self.activation(self.mlp["1"](x_NMF)))
        return out_NMW


class ShuffledLinear(nn.Module):
    """Squares of neighbours together, then one product."""

    def __init__(self, widths: tuple[int, int], build: Build, *, side: int, by: int) -> None:
        super().__init__()
        self.side, self.by = side, by
        self.linear = ReplicatedLinear(widths[0] * by * by, widths[1], build)

    def forward(self, x_NPD: Tensor) -> Tensor:
        out_NMW: Tensor = self.linear(shuffled(x_NPD, self.side, self.by))
        return out_NMW


class ThreeLinears(nn.Module):
    """Squares of neighbours together, then three products without biases, with GELU between them (Llama 4)."""

    def __init__(self, widths: tuple[int, int, int], build: Build, *, side: int, by: int) -> None:
        """`widths`: of a patch, between the products, and of the language model."""
        super().__init__()
        self.side, self.by = side, by
        self.first = ReplicatedLinear(widths[0] * by * by, widths[1], build)
        self.second = ReplicatedLinear(widths[1], widths[1], build)
        self.third = ReplicatedLinear(widths[1], widths[2], build)

    def forward(self, x_NPD: Tensor) -> Tensor:
        x_NMF = F.gelu(self.first(shuffled(x_NPD, self.side, self.by)))
        out_NMW: Tensor = self.third(F.gelu(self.second(x_NMF)))
        return out_NMW


class ShuffledGate(nn.Module):
    """Squares of neighbours together, then a product of which one half gates the other, and another product (Cohere)."""

    def __init__(self, widths: tuple[int, int, int], build: Build, *, side: int, by: int) -> None:
        """`widths`: of a patch, of both halves together, and of the language model."""
        super().__init__()
        self.side, self.by = side, by
        self.up = ReplicatedLinear(widths[0] * by * by, widths[1], build, bias=True)
        self.down = ReplicatedLinear(widths[1] // 2, widths[2], build, bias=True)

    def forward(self, x_NPD: Tensor) -> Tensor:
        x_NMF, gate_NMF = self.up(shuffled(x_NPD, self.side, self.by)).chunk(2, -1)
        out_NMW: Tensor = self.down(F.silu(gate_NMF) * x_NMF)
        return out_NMW


class PooledLinear(nn.Module):
    """Means of squares, normed, then a product whose weight is stored inputs first."""

    def __init__(self, widths: tuple[int, int], build: Build, *, side: int, by: int, norm: NormFacts) -> None:
        super().__init__()
        self.side, self.by = side, by
        self.norm = make_norm(norm, widths[0], build)
        self.matrix = Learned(widths, build)

    def forward(self, x_NPD: Tensor) -> Tensor:
        count, _, hidden = x_NPD.shape
        grid = x_NPD.transpose(1, 2).reshape(count, hidden, self.side, self.side)
        pooled_MD = F.avg_pool2d(grid, self.by).flatten(2).transpose(1, 2).reshape(-1, hidden)
        out_MW = torch.matmul(self.norm(pooled_MD), self.matrix.weight)
        return out_MW.view(count, -1, out_MW.shape[-1])
