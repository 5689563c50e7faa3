"""Feed-forward blocks that every token passes. T tokens, D width, F inner width."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import NormalDist
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.model_facts import Activation, Dense
from bough.layers.build import Build
from bough.layers.linear import ColumnLinear, GateUpLinear, RowLinear
from bough.layers.norm import fill
from bough.layers.stream import Input, Product, value_of
from bough.weights.slots import Slot
from bough.weights.stored import Stored

ACTIVATIONS: Final[dict[Activation, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


class XIELU(nn.Module):
    """alpha_p x^2 + beta x where x is positive, (exp(x) - 1 - x) alpha_n + beta x elsewhere; both alphas are learned."""

    BETA = 0.5
    EPS = -1e-6

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.alpha_p = _scalar(build)
        self.alpha_n = _scalar(build)

    def slots(self) -> dict[str, Slot]:
        # Checkpoints also hold the two constants.
        constants = {name: Slot((), _discard, optional=True) for name in ("beta", "eps")}
        parameters = {"alpha_p": self.alpha_p, "alpha_n": self.alpha_n}
        return {**constants, **{name: Slot((1,), partial(fill, each)) for name, each in parameters.items()}}

    def forward(self, x: Tensor) -> Tensor:
        up = F.softplus(self.alpha_p) * x * x + self.BETA * x
        small = x.clamp(max=self.EPS)
        down = (torch.expm1(small) - x) * (self.BETA + F.softplus(self.alpha_n)) + self.BETA * x
        return torch.where(x > 0, up, down)


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x))"""

    def __init__(self, facts: Dense, hidden: int, build: Build) -> None:
        super().__init__()
        self.gate_up = GateUpLinear(
            hidden,
            facts.intermediate,
            build,
            activation=facts.activation,
            bias=facts.bias,
            gate_scale=facts.gate_scale,
        )
        self.spread = build.spread
        self.down = RowLinear(facts.intermediate, hidden, build, bias=facts.bias, reduce=self.spread is None)
        if self.spread is not None:
            self.spread.blocks.append(self)

    def forward(self, x: Input) -> Product | Tensor:
        if self.spread is not None:
            return self.spread.through(value_of(x), lambda x_ND: self.down(self.gate_up(x_ND)).value())
        out: Product = self.down(self.gate_up(x))
        return out


class SparseMlp(nn.Module):
    """down(activation(relu(gate(x) - cut)) * up(x)): `cut` leaves the largest gates of a token, as many as there would be
    above it if they were normally distributed."""

    def __init__(self, facts: Dense, hidden: int, build: Build) -> None:
        super().__init__()
        self.gate_up = GateUpLinear(hidden, facts.intermediate, build, activation=facts.activation, bias=facts.bias)
        self.activation = ACTIVATIONS[facts.activation]
        self.axis, self.width = build.mesh.tp, facts.intermediate
        self.deviations = NormalDist().inv_cdf(facts.sparsity)
        self.spread = build.spread
        self.down = RowLinear(facts.intermediate, hidden, build, bias=facts.bias, reduce=self.spread is None)
        if self.spread is not None:
            self.spread.blocks.append(self)

    def forward(self, x: Input) -> Product | Tensor:
        if self.spread is not None:
            return self.spread.through(value_of(x), lambda x_ND: self.down(self._inner(x_ND)).value())
        out: Product = self.down(self._inner(value_of(x)))
        return out

    def _inner(self, x_TD: Tensor) -> Tensor:
        gate_TF, up_TF = self.gate_up.product(x_TD).chunk(2, -1)
        mean_T1 = self._mean(gate_TF)
        deviation_T1 = self._mean((gate_TF - mean_T1).square()).sqrt()
        return self.activation(F.relu(gate_TF - (mean_T1 + deviation_T1 * self.deviations))) * up_TF

    def _mean(self, x_TF: Tensor) -> Tensor:
        """[T, 1], over the inner units of all ranks."""
        total_T1 = x_TF.sum(-1, keepdim=True)
        return (total_T1 if self.axis.size == 1 else self.axis.talk.all_reduce(total_T1)) / self.width


class Mlp(nn.Module):
    """down(activation(up(x)))"""

    def __init__(self, facts: Dense, hidden: int, build: Build) -> None:
        super().__init__()
        self.up = ColumnLinear(hidden, facts.intermediate, build, bias=facts.bias)
        self.activation = XIELU(build) if facts.activation == "xielu" else ACTIVATIONS[facts.activation]
        self.spread = build.spread
        self.down = RowLinear(facts.intermediate, hidden, build, bias=facts.bias, reduce=self.spread is None)
        if self.spread is not None:
            self.spread.blocks.append(self)

    def forward(self, x: Input) -> Product | Tensor:
        if self.spread is not None:
            return self.spread.through(value_of(x), lambda x_ND: self.down(self.activation(self.up(x_ND))).value())
        out: Product = self.down(self.activation(self.up(x)))
        return out


def make_mlp(facts: Dense, hidden: int, build: Build) -> GatedMlp | SparseMlp | Mlp:
    """The feed-forward block that the facts describe."""
    if not facts.gated:
        return Mlp(facts, hidden, build)
    return SparseMlp(facts, hidden, build) if facts.sparsity else GatedMlp(facts, hidden, build)


def _scalar(build: Build) -> nn.Parameter:
    return nn.Parameter(torch.empty(1, dtype=build.dtype, device=build.device), requires_grad=False)


def _discard(stored: Stored) -> None:
    pass
