"""Layers that keep a state of each row instead of something of each token: what they have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.weights.slots import Slot
from bough.weights.stored import copy_into

Scan = Callable[[slice, tuple[Tensor, ...]], Tensor]
"""Takes tokens of one row, and its state, which it advances in place: [L, ...]."""
Steps = Callable[[Tensor, tuple[Tensor, ...], Tensor], Tensor]
"""Takes indices of tokens of as many rows, all states, and which of them are the rows'; advances them: [N, ...]."""


def over_rows(layer: StateLayer, batch: Batch, out_TF: Tensor, scan: Scan, steps: Steps) -> Tensor:
    """Fills `out_TF`, part by part, so that each row goes on from its state of the layer."""
    states = batch.states
    if states is None:
        out_TF[:] = scan(slice(0, len(out_TF)), layer.fresh(out_TF.device))
        return out_TF
    held = states.layers[layer.state_place]
    for phase in states.phases:
        if len(phase.ones_N):
            out_TF[phase.ones_at_N] = steps(phase.ones_at_N, held, phase.ones_N)
        for tokens, state in phase.longs:
            out_TF[tokens] = scan(tokens, tuple(each[state] for each in held))
        if phase.saves is not None:
            source, target = phase.saves
            for each in held:
                each[target] = each[source]
    return out_TF


class StateLayer(nn.Module):
    """A layer that keeps a state."""

    def __init__(self, place: int, shapes: tuple[tuple[int, ...], ...]) -> None:
        """`place`: among the layers that keep one. `shapes`: of what is kept of a row."""
        super().__init__()
        self.state_place = place
        self.state_shapes = shapes

    def fresh(self, device: torch.device) -> tuple[Tensor, ...]:
        """The state of a row that begins."""
        return tuple(torch.zeros(each, dtype=torch.float32, device=device) for each in self.state_shapes)


def state_shapes(model: nn.Module) -> list[tuple[tuple[int, ...], ...]]:
    """What each layer that keeps a state keeps of a row, by place."""
    layers = [module for module in model.modules() if isinstance(module, StateLayer)]
    return [layer.state_shapes for layer in sorted(layers, key=lambda layer: layer.state_place)]


class CausalConv(nn.Module):
    """A convolution of each channel over a token and those before it, then SiLU. In float32."""

    def __init__(self, channels: int, width: int, build: Build, *, bias: bool = False) -> None:
        super().__init__()
        kept = torch.empty(channels, width, dtype=torch.float32, device=build.device)
        self.weight = nn.Parameter(kept, requires_grad=False)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(kept.new_empty(channels), requires_grad=False)

    def slots(self) -> dict[str, Slot]:
        channels, width = self.weight.shape
        slots = {"weight": Slot((channels, 1, width), partial(copy_into, self.weight.unsqueeze(1)))}
        if self.bias is not None:
            slots["bias"] = Slot((channels,), partial(copy_into, self.bias))
        return slots

    def row(self, x_LC: Tensor, state_CW: Tensor) -> Tensor:
        """[L, C] of the tokens of a row; the state, its last inputs, moves on."""
        seen_CL = torch.cat((state_CW, x_LC.float().T), 1)
        state_CW.copy_(seen_CL[:, seen_CL.shape[1] - state_CW.shape[1] :])
        return F.silu(F.conv1d(seen_CL, self.weight[:, None], self.bias, groups=len(seen_CL))).T

    def ones(self, x_NC: Tensor, states_SCW: Tensor, at_N: Tensor) -> Tensor:
        """[N, C] of one token of each row."""
        seen_NCW = torch.cat((states_SCW[at_N], x_NC.float()[:, :, None]), 2)
        states_SCW[at_N] = seen_NCW[:, :, 1:]
        out_NC = (seen_NCW * self.weight).sum(2)
        return F.silu(out_NC if self.bias is None else out_NC + self.bias)


class PerHead(nn.Module):
    """Numbers by head, in float32."""

    def __init__(self, count: int, build: Build) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, dtype=torch.float32, device=build.device), requires_grad=False)

    def slots(self) -> dict[str, Slot]:
        return {"weight": Slot(tuple(self.weight.shape), partial(copy_into, self.weight))}
