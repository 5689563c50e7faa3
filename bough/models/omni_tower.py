"""The towers of Qwen's Omni models: one that sees, and beside it one that hears, in segments that don't see one another.

L frames of the spectrum, C bands, N chunks, T tokens, M positions, D width, W width of a position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bough.config.audio import NORM, POOLED
from bough.config.omni import OmniHearing
from bough.layers.build import Build
from bough.layers.linear import ReplicatedLinear
from bough.layers.mlp import ACTIVATIONS
from bough.layers.norm import make_norm
from bough.layers.tower import Tower, TowerBlock, TowerInput, alone
from bough.models.hearing_tower import Convolution
from bough.models.qwen_tower import QwenTower


class SeeingAndHearing(Tower):
    """Grids of sounds are one number, those of images more. What hears leaves nothing for deeper layers."""

    def __init__(self, seeing: QwenTower, hearing: OmniTower) -> None:
        super().__init__()
        self.width = seeing.width
        self.seeing, self.hearing = seeing, hearing

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        heard = [item for item in items if len(item.grid) == 1]
        seen = [item for item in items if len(item.grid) > 1]
        made: dict[bool, list[Tensor]] = {True: [], False: []}
        if heard:
            out_MW = self.hearing(heard)
            out_MW = nn.functional.pad(out_MW, (0, self.width - out_MW.shape[1]))
            made[True] = list(torch.split(out_MW, [self.hearing.facts.positions(item.grid[0]) for item in heard]))
        if seen:
            merge = self.seeing.facts.merge**2
            made[False] = list(torch.split(self.seeing(seen), [math.prod(item.grid[:3]) // merge for item in seen]))
        parts = {kind: iter(each) for kind, each in made.items()}
        return torch.cat([next(parts[len(item.grid) == 1]) for item in items])


class OmniTower(Tower):
    """Qwen2.5-Omni's: Whisper's encoder over segments of two seconds, means of pairs of its tokens.

    An item is a segment: frames of its spectrum, float32 [L, C], as many as its grid says, or more that are silence."""

    def __init__(self, facts: OmniHearing, build: Build) -> None:
        super().__init__()
        build = alone(build)
        self.facts, self.width = facts, facts.out
        hidden = facts.block.hidden
        self._make_convolutions(build)
        self.blocks = nn.ModuleList(TowerBlock(facts.block, build) for _ in range(facts.depth))
        self.norm = make_norm(NORM, hidden, build)
        self.project = ReplicatedLinear(hidden, facts.out, build, bias=True)
        self.places_TD: Tensor
        places = _sinusoids(facts.tokens(facts.chunk), hidden).to(device=build.device, dtype=build.dtype)
        self.register_buffer("places_TD", places, persistent=False)

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        lengths = [self.facts.tokens(item.grid[0]) for item in items]
        x_TD = torch.cat([tokens[:length] for tokens, length in zip(self._begin(items), lengths, strict=True)])
        for block in self.blocks:
            x_TD = block(x_TD, lengths, None)
        return self._positions(x_TD, lengths)

    def _begin(self, items: Sequence[TowerInput]) -> list[Tensor]:
        """The tokens of each item, or more: chunks of all items that are equally long are convolved together."""
        chunks: dict[int, list[Tensor]] = {}
        places: list[tuple[int, int, int]] = []
        for item in items:
            length = min(len(item.features), self.facts.chunk)
            group = chunks.setdefault(length, [])
            first = sum(map(len, group))
            group.append(item.features.view(-1, length, self.facts.mels))
            places.append((length, first, first + len(group[-1])))
        convolved = {length: self._convolved(torch.cat(group)) for length, group in chunks.items()}
        return [convolved[length][first:last].flatten(0, 1) for length, first, last in places]

    def _convolved(self, x_NLC: Tensor) -> Tensor:
        """[N, tokens of a chunk, D] with their places."""
        x_NTD = self._tokens(x_NLC.to(self.places_TD.dtype))
        return x_NTD + self.places_TD[: x_NTD.shape[1]]

    def _make_convolutions(self, build: Build) -> None:
        hidden = self.facts.block.hidden
        self.conv1 = Convolution((self.facts.mels, hidden), build, stride=1)
        self.conv2 = Convolution((hidden, hidden), build, stride=2)

    def _tokens(self, x_NLC: Tensor) -> Tensor:
        x_NTD: Tensor = self.conv2(self.conv1(x_NLC.transpose(1, 2))).transpose(1, 2)
        return x_NTD

    def _positions(self, x_TD: Tensor, lengths: list[int]) -> Tensor:
        """[M, W] of the tokens of all items."""
        parts = [
            x[: len(x) // POOLED * POOLED].view(-1, POOLED, x.shape[1]).mean(1) for x in torch.split(x_TD, lengths)
        ]
        out_MW: Tensor = self.project(self.norm(torch.cat(parts)))
        return out_MW


class ShrinkingTower(OmniTower):
    """Qwen3-Omni's: three convolutions over frames and bands; eight frames are about a token, and each is a position."""

    def __init__(self, facts: OmniHearing, build: Build) -> None:
        super().__init__(facts, build)
        hidden = facts.block.hidden
        self.before = ReplicatedLinear(hidden, hidden, alone(build), bias=True)
        self.activation = ACTIVATIONS[facts.activation]

    def _make_convolutions(self, build: Build) -> None:
        channels = self.facts.channels
        self.convs = nn.ModuleList(
            Convolution((inner, channels), build, stride=2, axes=2) for inner in (1, channels, channels)
        )
        self.conv_out = ReplicatedLinear(channels * self.facts.bands, self.facts.block.hidden, build)

    def _tokens(self, x_NLC: Tensor) -> Tensor:
        x = x_NLC.transpose(1, 2)[:, None]
        for conv in self.convs:
            x = conv(x)
        count, _, _, tokens = x.shape
        x_TD: Tensor = self.conv_out(x.permute(0, 3, 1, 2).reshape(count * tokens, -1))
        return x_TD.view(count, tokens, -1)

    def _positions(self, x_TD: Tensor, lengths: list[int]) -> Tensor:
        out_MW: Tensor = self.project(self.activation(self.before(self.norm(x_TD))))
        return out_MW


def _sinusoids(length: int, width: int) -> Tensor:
    """[length, width]: sines of places, then cosines."""
    rates = torch.exp(-math.log(10_000) / (width // 2 - 1) * torch.arange(width // 2, dtype=torch.float32))
    angles = torch.arange(length, dtype=torch.float32)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)
