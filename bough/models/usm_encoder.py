"""The encoder of the Universal Speech Model: a spectrum thinned out by convolutions, then conformer blocks.

L frames, Q bands, T tokens, D width, N heads, H width of a head, K neighbours that a token sees. Tokens of all sounds of a
step lie one behind the other, with blank ones between them, which nothing sees: as many as reach from one to the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.model_facts import NormFacts
from bough.config.usm import UsmFacts
from bough.layers.build import Build
from bough.layers.linear import ReplicatedLinear
from bough.layers.norm import fill, make_norm
from bough.layers.tower import Learned
from bough.weights.slots import Slot

_NORM = NormFacts(eps=1e-6)


class ThinningConv(nn.Module):
    """A convolution over frames, which it does not look behind, and bands. Behind it, each frame is normed by the mean and
    deviation of all values up to it."""

    def __init__(self, facts: UsmFacts, number: int, given: int, build: Build) -> None:
        super().__init__()
        self.stride, self.eps = facts.strides[number], facts.group_eps
        self.behind = facts.sizes[number][0] - 1
        channels = facts.channels[number]
        self.weight = _parameter((channels, given, *facts.sizes[number]), build)
        self.norm = Learned((channels,), build)

    def slots(self) -> dict[str, Slot]:
        return {"weight": Slot(tuple(self.weight.shape), partial(fill, self.weight))}

    def forward(self, x_CLQ: Tensor) -> Tensor:
        x_CLQ = F.conv2d(F.pad(x_CLQ, (1, 1, 0, self.behind))[None], self.weight, stride=self.stride)[0]
        values = x_CLQ.float()
        count = values[:, 0].numel() * torch.arange(1, values.shape[1] + 1, device=values.device)[None, :, None]
        mean = values.sum((0, 2), keepdim=True).cumsum(1) / count
        square = (values - mean).square().sum((0, 2), keepdim=True).cumsum(1) / count
        normed = (values - mean) * torch.rsqrt(square + self.eps) * self.norm.weight.float()[:, None, None]
        return F.relu(normed.to(x_CLQ.dtype))


class Thinning(nn.Module):
    """Both convolutions, and a product over channels and bands: [L, Q] -> [T, D]."""

    def __init__(self, facts: UsmFacts, build: Build) -> None:
        super().__init__()
        self.dtype = build.dtype
        self.convs = nn.ModuleList(
            ThinningConv(facts, number, given, build) for number, given in enumerate((1, facts.channels[0]))
        )
        self.project = ReplicatedLinear(facts.bands * facts.channels[1], facts.hidden, build)

    def forward(self, spectrum_LQ: Tensor) -> Tensor:
        x = spectrum_LQ.to(self.dtype)[None]
        for conv in self.convs:
            x = conv(x)
        out_TD: Tensor = self.project(x.permute(1, 2, 0).flatten(1))
        return out_TD


class ConformerFeedForward(nn.Module):
    """A feed-forward block of which a part is added (a half, as published)."""

    def __init__(self, facts: UsmFacts, build: Build) -> None:
        super().__init__()
        self.clip, self.part = facts.clip, facts.half
        self.norm = make_norm(_NORM, facts.hidden, build)
        self.up = ReplicatedLinear(facts.hidden, 4 * facts.hidden, build)
        self.down = ReplicatedLinear(4 * facts.hidden, facts.hidden, build)
        self.after_norm = make_norm(_NORM, facts.hidden, build)

    def forward(self, x_TD: Tensor) -> Tensor:
        made_TD = self.down(F.silu(self.up(self.norm(clipped(x_TD, self.clip)))))
        out_TD: Tensor = x_TD + self.after_norm(clipped(made_TD, self.clip)) * self.part
        return out_TD


class NeighbourAttention(nn.Module):
    """Attention of the tokens around each: scores are of contents and of how far apart they are, soft-capped."""

    def __init__(self, facts: UsmFacts, build: Build) -> None:
        super().__init__()
        hidden = facts.hidden
        self.facts = facts
        self.norm = make_norm(_NORM, hidden, build)
        self.q, self.k, self.v, self.apart, self.out = (ReplicatedLinear(hidden, hidden, build) for _ in range(5))
        self.scale = Learned((facts.head_dim,), build)
        self.after_norm = make_norm(_NORM, hidden, build)
        self.places_KD: Tensor
        distances = torch.arange(facts.left, -facts.right - 1, -1, dtype=torch.float32)
        places = _waves(distances, hidden).to(device=build.device, dtype=build.dtype)
        self.register_buffer("places_KD", places, persistent=False)

    def forward(self, x_TD: Tensor, heard_T: Tensor) -> Tensor:
        facts = self.facts
        normed_TD = self.norm(clipped(x_TD, facts.clip))
        q_TNH, k_TNH, v_TNH = (each(normed_TD).view(len(x_TD), -1, facts.head_dim) for each in (self.q, self.k, self.v))
        usual = facts.head_dim**-0.5 / math.log(2)  # one, where the learned scale is zero
        q_TNH = q_TNH * (usual * F.softplus(self.scale.weight.float())).to(x_TD.dtype)
        k_TNHK, v_TNHK = self._around(k_TNH), self._around(v_TNH)
        apart_NHK = self.apart(self.places_KD).view(-1, facts.num_heads, facts.head_dim).permute(1, 2, 0)
        content_TNK = (q_TNH[:, :, None] @ k_TNHK)[:, :, 0]
        scores_TNK = content_TNK + (q_TNH.transpose(0, 1) @ apart_NHK).transpose(0, 1)
        scores_TNK = torch.tanh(scores_TNK / facts.cap) * facts.cap
        seen_TK = self._around(heard_T)
        scores_TNK = scores_TNK.masked_fill(~seen_TK[:, None], torch.finfo(scores_TNK.dtype).min)
        shares_TNK = scores_TNK.softmax(-1, dtype=torch.float32).to(x_TD.dtype)
        read_TD = (v_TNHK @ shares_TNK[..., None]).flatten(1)
        out_TD: Tensor = x_TD + self.after_norm(clipped(self.out(read_TD), facts.clip))
        return out_TD

    def _around(self, x_T: Tensor) -> Tensor:
        """[T, ..., K]: of each token, what its neighbours have."""
        pads = (0, 0) * (x_T.dim() - 1)
        return F.pad(x_T, (*pads, self.facts.left, self.facts.right)).unfold(
            0, self.facts.left + self.facts.right + 1, 1
        )


class LightConv(nn.Module):
    """A gated product, a convolution of each channel over the last tokens, and another product."""

    def __init__(self, facts: UsmFacts, build: Build) -> None:
        super().__init__()
        hidden, norm = facts.hidden, NormFacts(eps=facts.eps)
        self.clip, self.kernel = facts.clip, facts.kernel
        self.norm = make_norm(norm, hidden, build)
        self.gated = ReplicatedLinear(hidden, 2 * hidden, build)
        self.weight = _parameter((hidden, 1, facts.kernel), build)
        self.conv_norm = make_norm(norm, hidden, build)
        self.out = ReplicatedLinear(hidden, hidden, build)

    def slots(self) -> dict[str, Slot]:
        return {"weight": Slot(tuple(self.weight.shape), partial(fill, self.weight))}

    def forward(self, x_TD: Tensor) -> Tensor:
        made_DT = F.pad(F.glu(self.gated(self.norm(x_TD)), -1).transpose(0, 1), (self.kernel - 1, 0))
        made_TD = F.conv1d(made_DT, self.weight, groups=len(made_DT)).transpose(0, 1).contiguous()
        made_TD = F.silu(self.conv_norm(clipped(made_TD, self.clip)))
        out_TD: Tensor = x_TD + self.out(made_TD)
        return out_TD


class ConformerBlock(nn.Module):
    """Half a feed-forward block, attention, a convolution, and the other half."""

    def __init__(self, facts: UsmFacts, build: Build) -> None:
        super().__init__()
        self.clip = facts.clip
        self.first = ConformerFeedForward(facts, build)
        self.attn = NeighbourAttention(facts, build)
        self.conv = LightConv(facts, build)
        self.last = ConformerFeedForward(facts, build)
        self.norm = make_norm(_NORM, facts.hidden, build)

    def forward(self, x_TD: Tensor, heard_T: Tensor) -> Tensor:
        x_TD = self.attn(self.first(x_TD), heard_T)
        x_TD = self.last(self.conv(x_TD * heard_T[:, None]))
        out: Tensor = self.norm(clipped(x_TD, self.clip))
        return out


class UsmEncoder(nn.Module):
    """Spectra, float32 [L, Q] each -> positions of each, [ceil(T / reduction), D]."""

    def __init__(self, facts: UsmFacts, build: Build) -> None:
        super().__init__()
        self.facts = facts
        self.between = max(facts.left + facts.right, facts.kernel - 1)
        """Blank tokens before each sound."""
        self.thin = Thinning(facts, build)
        self.blocks = nn.ModuleList(ConformerBlock(facts, build) for _ in range(facts.depth))

    def forward(self, spectra: Sequence[Tensor]) -> list[Tensor]:
        sounds = [self.thin(each) for each in spectra]
        heard_T = torch.cat([F.pad(each.new_ones(len(each)), (self.between, 0)) for each in sounds]) > 0
        x_TD = torch.cat([F.pad(each, (0, 0, self.between, 0)) for each in sounds])
        for block in self.blocks:
            x_TD = block(x_TD, heard_T)
        parts = torch.split(x_TD, [self.between + len(each) for each in sounds])
        return [part[self.between :: self.facts.reduction] for part in parts]


def clipped(x: Tensor, most: float) -> Tensor:
    """Within what the encoder was trained with, or what the dtype holds."""
    most = min(most, torch.finfo(x.dtype).max)
    return x.clamp(-most, most)


def _waves(places_K: Tensor, width: int) -> Tensor:
    """[K, width]: sines of places, then cosines."""
    rates = torch.exp(-math.log(10_000.0) / max(1, width // 2 - 1) * torch.arange(width // 2, dtype=torch.float32))
    angles = places_K[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), -1)


def _parameter(shape: tuple[int, ...], build: Build) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=build.dtype, device=build.device), requires_grad=False)
