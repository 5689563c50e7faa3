"""Whisper's encoder as a tower: two convolutions, then blocks, then what a model makes of its tokens.

L frames of the spectrum, T tokens, M positions, D width, W width of a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.audio import NORM, POOLED, HearingFacts, merged_tokens
from bough.config.model_facts import Activation
from bough.layers.build import Build
from bough.layers.linear import ReplicatedLinear
from bough.layers.norm import fill, make_norm
from bough.layers.projectors import TwoLinears
from bough.layers.tower import Learned, Tower, TowerBlock, TowerInput, alone
from bough.weights.slots import Slot


class Convolution(nn.Module):
    """Over three neighbouring frames, or (with two `axes`) over squares of neighbours."""

    def __init__(self, channels: tuple[int, int], build: Build, *, stride: int, axes: int = 1) -> None:
        super().__init__()
        self.stride = stride
        self.convolve = F.conv1d if axes == 1 else F.conv2d
        self.weight = _parameter((channels[1], channels[0], *(3,) * axes), build)
        self.bias = _parameter((channels[1],), build)

    def slots(self) -> dict[str, Slot]:
        named = {"weight": self.weight, "bias": self.bias}
        return {name: Slot(tuple(each.shape), partial(fill, each)) for name, each in named.items()}

    def forward(self, x_CL: Tensor) -> Tensor:
        """`x_CL`: or several of them."""
        return F.gelu(self.convolve(x_CL, self.weight, self.bias, stride=self.stride, padding=1))


class HearingTower(Tower):
    """Whisper's own: each token is a position.

    An item's features are frames of a spectrum, float32 [L, mels], as many as its grid says or a few more: the silence
    behind them, which the convolutions reach into. Its grid is its tokens."""

    def __init__(self, facts: HearingFacts, build: Build) -> None:
        super().__init__()
        build = alone(build)
        hidden = facts.block.hidden
        self.width = hidden
        self.conv1 = Convolution((facts.mels, hidden), build, stride=1)
        self.conv2 = Convolution((hidden, hidden), build, stride=2)
        self.positions = Learned((facts.positions, hidden), build)
        self.blocks = nn.ModuleList(TowerBlock(facts.block, build) for _ in range(facts.depth))
        self.norm = make_norm(NORM, hidden, build)

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        lengths = [item.grid[0] for item in items]
        x_TD = torch.cat([self._begin(item.features, length) for item, length in zip(items, lengths, strict=True)])
        for block in self.blocks:
            x_TD = block(x_TD, lengths, None)
        return self._positions(x_TD, lengths)

    def _positions(self, x_TD: Tensor, lengths: list[int]) -> Tensor:
        """[M, W] of the tokens of all items; `lengths` says how many each has."""
        out_TD: Tensor = self.norm(x_TD)
        return out_TD

    def _begin(self, features_LC: Tensor, length: int) -> Tensor:
        x_CL = features_LC.to(self.conv1.weight.dtype).transpose(0, 1)
        x_TD: Tensor = self.conv2(self.conv1(x_CL)).transpose(0, 1)[:length]
        return x_TD + self.positions.weight[:length]


class PooledHearing(HearingTower):
    """Qwen2-Audio's: means of pairs, normed and projected."""

    def __init__(self, facts: HearingFacts, width: int, build: Build) -> None:
        super().__init__(facts, build)
        self.width = width
        self.project = ReplicatedLinear(facts.block.hidden, width, alone(build), bias=True)

    def _positions(self, x_TD: Tensor, lengths: list[int]) -> Tensor:
        parts = [self._pooled(part) for part in torch.split(x_TD, lengths)]
        out_MW: Tensor = self.project(self.norm(torch.cat(parts)))
        return out_MW

    def _pooled(self, x_TD: Tensor) -> Tensor:
        pairs = len(x_TD) // POOLED
        return x_TD[: pairs * POOLED].view(pairs, POOLED, -1).mean(1)


class MergedHearing(HearingTower):
    """Voxtral's: neighbours side by side, then linear, activation, linear."""

    def __init__(self, facts: HearingFacts, width: int, activation: Activation, build: Build) -> None:
        super().__init__(facts, build)
        self.width = width
        self.merged = merged_tokens(facts)
        widths = (self.merged * facts.block.hidden, width)
        self.project = TwoLinears(widths, alone(build), activation=activation, bias=False)

    def _positions(self, x_TD: Tensor, lengths: list[int]) -> Tensor:
        assert all(length % self.merged == 0 for length in lengths), "windows are whole"
        out_MW: Tensor = self.project(self.norm(x_TD).view(len(x_TD) // self.merged, -1))
        return out_MW


def _parameter(shape: tuple[int, ...], build: Build) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=build.dtype, device=build.device), requires_grad=False)
