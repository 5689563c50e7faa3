"""MobileNet-V5: fused and universal inverted bottlenecks, mobile multi-query attention, and a fusion of the last two stages.

B images, Y rows and X columns of places, C channels. Channels lie side by side, so that a convolution of single places is a
product, and a norm over channels one over rows.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.mobilenet import (
    MOBILENET_NORM,
    FusedIbFacts,
    MobileBlockFacts,
    MobileMqaFacts,
    MobileNetFacts,
    UniversalIbFacts,
)
from bough.layers.build import Build
from bough.layers.norm import fill, make_norm
from bough.layers.tower import Learned, PatchEmbedding
from bough.weights.slots import Slot


class SpatialConv(nn.Module):
    """A convolution over squares of places, which leaves `1 / stride` of them along a side: of all channels, or of each by
    itself (`depthwise`). What is missing at the edges is zero; where it is odd, there is more at the end."""

    def __init__(
        self, channels: tuple[int, int], size: int, build: Build, *, stride: int = 1, depthwise: bool = False,
        bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.size, self.stride = size, stride
        self.groups = channels[0] if depthwise else 1
        self.weight = _parameter((channels[1], channels[0] // self.groups, size, size), build)
        self.bias = _parameter((channels[1],), build) if bias else None

    def slots(self) -> dict[str, Slot]:
        both = {"weight": self.weight, "bias": self.bias}
        return {name: Slot(tuple(each.shape), partial(fill, each)) for name, each in both.items() if each is not None}

    def forward(self, x_BYXC: Tensor) -> Tensor:
        top, bottom = self._missing(x_BYXC.shape[1])
        left, right = self._missing(x_BYXC.shape[2])
        x_BCYX = F.pad(x_BYXC, (0, 0, left, right, top, bottom)).permute(0, 3, 1, 2)
        out_BCYX = F.conv2d(x_BCYX, self.weight, self.bias, stride=self.stride, groups=self.groups)
        return out_BCYX.permute(0, 2, 3, 1).contiguous()

    def _missing(self, places: int) -> tuple[int, int]:
        """Before and behind."""
        total = max(0, (-(-places // self.stride) - 1) * self.stride + self.size - places)
        return total // 2, total - total // 2


def pointwise(given: int, out: int, build: Build) -> PatchEmbedding:
    """A convolution that sees one place."""
    return PatchEmbedding((given, 1, 1), out, build, bias=False)


class ConvNorm(nn.Module):
    """A convolution, the norm of its channels and, if it is `active`, the activation."""

    def __init__(self, conv: SpatialConv | PatchEmbedding, channels: int, build: Build, *, active: bool) -> None:
        super().__init__()
        self.conv = conv
        self.norm = make_norm(MOBILENET_NORM, channels, build)
        self.active = active

    def forward(self, x_BYXC: Tensor) -> Tensor:
        x_BYXC = self.norm(self.conv(x_BYXC))
        return F.gelu(x_BYXC, approximate="tanh") if self.active else x_BYXC


class FusedIb(nn.Module):
    """A fused inverted bottleneck."""

    def __init__(self, facts: FusedIbFacts, given: int, build: Build) -> None:
        super().__init__()
        inner = given * facts.expansion
        wide = SpatialConv((given, inner), facts.size, build, stride=facts.stride)
        self.expand = ConvNorm(wide, inner, build, active=True)
        self.project = ConvNorm(pointwise(inner, facts.channels, build), facts.channels, build, active=False)
        self.adds = facts.stride == 1 and given == facts.channels

    def forward(self, x_BYXC: Tensor) -> Tensor:
        out: Tensor = self.project(self.expand(x_BYXC))
        return x_BYXC + out if self.adds else out


class UniversalIb(nn.Module):
    """A universal inverted bottleneck."""

    def __init__(self, facts: UniversalIbFacts, given: int, build: Build) -> None:
        super().__init__()
        inner = given * facts.expansion
        self.first = self.middle = None
        if facts.first:
            stride = 1 if facts.middle else facts.stride
            conv = SpatialConv((given, given), facts.first, build, stride=stride, depthwise=True)
            self.first = ConvNorm(conv, given, build, active=False)
        self.expand = ConvNorm(pointwise(given, inner, build), inner, build, active=True)
        if facts.middle:
            conv = SpatialConv((inner, inner), facts.middle, build, stride=facts.stride, depthwise=True)
            self.middle = ConvNorm(conv, inner, build, active=True)
        self.project = ConvNorm(pointwise(inner, facts.channels, build), facts.channels, build, active=False)
        self.scale = Learned((facts.channels,), build) if facts.scaled else None
        self.adds = facts.scaled and facts.stride == 1 and given == facts.channels

    def forward(self, x_BYXC: Tensor) -> Tensor:
        out: Tensor = self.expand(x_BYXC if self.first is None else self.first(x_BYXC))
        if self.middle is not None:
            out = self.middle(out)
        out = self.project(out)
        if self.scale is not None:
            out = out * self.scale.weight
        return x_BYXC + out if self.adds else out


class SharedHead(nn.Module):
    """The keys, or the values, of all heads: [B, S places, H]."""

    def __init__(self, facts: MobileMqaFacts, given: int, build: Build) -> None:
        super().__init__()
        self.shrink: ConvNorm | None = None
        if facts.kv_stride > 1:
            conv = SpatialConv((given, given), facts.size, build, stride=facts.kv_stride, depthwise=True)
            self.shrink = ConvNorm(conv, given, build, active=False)
        self.project = pointwise(given, facts.head_dim, build)

    def forward(self, x_BYXC: Tensor) -> Tensor:
        out: Tensor = self.project(x_BYXC if self.shrink is None else self.shrink(x_BYXC))
        return out.flatten(1, 2)


class MobileMqa(nn.Module):
    """Mobile multi-query attention."""

    def __init__(self, facts: MobileMqaFacts, given: int, build: Build) -> None:
        super().__init__()
        heads = facts.num_heads * facts.head_dim
        self.head_dim = facts.head_dim
        self.norm = make_norm(MOBILENET_NORM, given, build)
        self.q = pointwise(given, heads, build)
        self.k, self.v = SharedHead(facts, given, build), SharedHead(facts, given, build)
        self.out = pointwise(heads, facts.channels, build)
        self.scale = Learned((facts.channels,), build)

    def forward(self, x_BYXC: Tensor) -> Tensor:
        """Heads that share keys and values are further queries of one head."""
        normed_BYXC = self.norm(x_BYXC)
        q_BYXN = self.q(normed_BYXC)
        q_BQH = q_BYXN.view(len(x_BYXC), -1, self.head_dim)
        k_BSH, v_BSH = self.k(normed_BYXC), self.v(normed_BYXC)
        read_BQH = F.scaled_dot_product_attention(q_BQH[:, None], k_BSH[:, None], v_BSH[:, None])
        out: Tensor = self.out(read_BQH.reshape(q_BYXN.shape))
        return x_BYXC + out * self.scale.weight


class StageFusion(nn.Module):
    """The last two stages side by side, the coarser one enlarged; means of squares of what is made of them, normed."""

    def __init__(self, facts: MobileNetFacts, build: Build) -> None:
        super().__init__()
        self.side = facts.side
        self.block = UniversalIb(facts.fusion, facts.fused_channels, build)
        self.norm = make_norm(MOBILENET_NORM, facts.out, build)

    def forward(self, fine_BYXC: Tensor, coarse_BYXC: Tensor) -> Tensor:
        times = fine_BYXC.shape[1] // coarse_BYXC.shape[1]
        enlarged = coarse_BYXC.repeat_interleave(times, 1).repeat_interleave(times, 2)
        out = self.block(torch.cat((fine_BYXC, enlarged), -1))
        by = out.shape[1] // self.side
        pooled = out.view(len(out), self.side, by, self.side, by, -1).mean((2, 4))
        normed: Tensor = self.norm(pooled)
        return normed


class MobileNetV5(nn.Module):
    """[B, Y, X, 3] of values from 0 to 1 -> [B, side, side, C]."""

    def __init__(self, facts: MobileNetFacts, build: Build) -> None:
        super().__init__()
        stem = SpatialConv((3, facts.stem), 3, build, stride=2, bias=True)
        self.stem = ConvNorm(stem, facts.stem, build, active=True)
        self.stages = nn.ModuleList()
        given = facts.stem
        for stage in facts.stages:
            blocks = []
            for block in stage:
                blocks.append(_block(block, given, build))
                given = block.channels
            self.stages.append(nn.Sequential(*blocks))
        self.fusion = StageFusion(facts, build)

    def forward(self, pixels_BYXC: Tensor) -> Tensor:
        x = self.stem(pixels_BYXC)
        ends = []
        for stage in self.stages:
            x = stage(x)
            ends.append(x)
        out: Tensor = self.fusion(*ends[-2:])
        return out


def _block(facts: MobileBlockFacts, given: int, build: Build) -> nn.Module:
    match facts:
        case FusedIbFacts():
            return FusedIb(facts, given, build)
        case UniversalIbFacts():
            return UniversalIb(facts, given, build)
        case MobileMqaFacts():
            return MobileMqa(facts, given, build)


def _parameter(shape: tuple[int, ...], build: Build) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=build.dtype, device=build.device), requires_grad=False)
