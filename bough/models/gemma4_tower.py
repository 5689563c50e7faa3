"""Gemma 4's tower. T patches, D width, N heads, H width of a head, M positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from bough.config.gemma4_vision import Gemma4Vision
from bough.config.model_facts import NormFacts
from bough.kernels.rotary import apply_rope
from bough.kernels.segment_attention import attend_segments
from bough.layers.build import Build
from bough.layers.head_norm import PlainHeadNorm
from bough.layers.linear import ReplicatedLinear
from bough.layers.mlp import ACTIVATIONS
from bough.layers.norm import make_norm
from bough.layers.tower import Learned, Normaliser, Tower, TowerInput, alone
from bough.weights.slots import Slot
from bough.weights.stored import Stored, read_all

_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class ClippedLinear(nn.Module):
    """A product whose inputs and outputs are kept within learned bounds, if the tower has them."""

    def __init__(self, in_dim: int, out_dim: int, build: Build, *, clipped: bool) -> None:
        super().__init__()
        self.linear = ReplicatedLinear(in_dim, out_dim, build)
        self.bounds: nn.Parameter | None = None
        if clipped:
            self.bounds = nn.Parameter(torch.empty(4, dtype=torch.float32, device=build.device), requires_grad=False)

    def slots(self) -> dict[str, Slot]:
        if self.bounds is None:
            return {}
        return {name: Slot((), partial(_fill_one, self.bounds, at)) for at, name in enumerate(_BOUNDS)}

    def forward(self, x_TF: Tensor) -> Tensor:
        if self.bounds is None:
            whole: Tensor = self.linear(x_TF)
            return whole
        low, high, least, most = self.bounds.to(x_TF.dtype)
        made: Tensor = self.linear(torch.clamp(x_TF, low, high))
        return torch.clamp(made, least, most)


class Gemma4TowerAttention(nn.Module):
    """Attention within an image, of normed heads: half of each is rotated by the patch's column, half by its row."""

    def __init__(self, facts: Gemma4Vision, build: Build) -> None:
        super().__init__()
        width = facts.num_heads * facts.head_dim
        self.head_dim = facts.head_dim
        self.q, self.k, self.v = (
            ClippedLinear(facts.hidden, width, build, clipped=facts.clipped) for _ in range(3)
        )  # fmt: skip
        self.out = ClippedLinear(width, facts.hidden, build, clipped=facts.clipped)
        self.q_norm = make_norm(facts.norm, facts.head_dim, build)
        self.k_norm = make_norm(facts.norm, facts.head_dim, build)
        self.v_norm = PlainHeadNorm(facts.norm.eps)

    def forward(self, x_TD: Tensor, lengths: Sequence[int], columns_TR: Tensor, rows_TR: Tensor) -> Tensor:
        q_TNH, k_TNH, v_TNH = (each(x_TD).view(len(x_TD), -1, self.head_dim) for each in (self.q, self.k, self.v))
        q_TNH, k_TNH = self.q_norm(q_TNH), self.k_norm(k_TNH)
        places_T, half = torch.arange(len(x_TD), device=x_TD.device), self.head_dim // 2
        by_column = apply_rope(q_TNH[..., :half], k_TNH[..., :half], places_T, columns_TR)
        by_row = apply_rope(q_TNH[..., half:], k_TNH[..., half:], places_T, rows_TR)
        q_TNH, k_TNH = (torch.cat(halves, -1) for halves in zip(by_column, by_row, strict=True))
        out: Tensor = self.out(attend_segments(q_TNH, k_TNH, self.v_norm(v_TNH), lengths, 1.0))
        return out


class Gemma4TowerMlp(nn.Module):
    """down(activation(gate(x)) * up(x))"""

    def __init__(self, facts: Gemma4Vision, build: Build) -> None:
        super().__init__()
        self.gate, self.up = (
            ClippedLinear(facts.hidden, facts.intermediate, build, clipped=facts.clipped) for _ in range(2)
        )  # fmt: skip
        self.down = ClippedLinear(facts.intermediate, facts.hidden, build, clipped=facts.clipped)
        self.activation = ACTIVATIONS[facts.activation]

    def forward(self, x_TD: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.gate(x_TD)) * self.up(x_TD))
        return out


class Gemma4TowerBlock(nn.Module):
    """Gemma's sandwich."""

    def __init__(self, facts: Gemma4Vision, build: Build) -> None:
        super().__init__()
        self.attn_norm = make_norm(facts.norm, facts.hidden, build)
        self.attn = Gemma4TowerAttention(facts, build)
        self.after_attn_norm = make_norm(facts.norm, facts.hidden, build)
        self.mlp_norm = make_norm(facts.norm, facts.hidden, build)
        self.mlp = Gemma4TowerMlp(facts, build)
        self.after_mlp_norm = make_norm(facts.norm, facts.hidden, build)

    def forward(self, x_TD: Tensor, lengths: Sequence[int], columns_TR: Tensor, rows_TR: Tensor) -> Tensor:
        x_TD = x_TD + self.after_attn_norm(self.attn(self.attn_norm(x_TD), lengths, columns_TR, rows_TR))
        out: Tensor = x_TD + self.after_mlp_norm(self.mlp(self.mlp_norm(x_TD)))
        return out


class Gemma4Tower(Tower):
    """A vision transformer over images of their own shapes; means of squares of patches are positions."""

    def __init__(self, facts: Gemma4Vision, width: int, build: Build) -> None:
        """`width`: of the language model."""
        super().__init__()
        build = alone(build)
        self.facts, self.width, self.device = facts, width, build.device
        self.normalise = Normaliser(facts.image.mean, facts.image.std, facts.image.rescale, build)
        self.patches = ReplicatedLinear(3 * facts.patch**2, facts.hidden, build)
        self.positions = Learned((2, facts.num_positions, facts.hidden), build)
        self.blocks = nn.ModuleList(Gemma4TowerBlock(facts, build) for _ in range(facts.depth))
        self.shift, self.stretch = (
            Learned((facts.hidden,), build) if facts.standardised else None for _ in range(2)
        )  # fmt: skip
        self.norm = make_norm(NormFacts(eps=facts.norm.eps, weight=False), facts.hidden, build)
        self.project = ReplicatedLinear(facts.hidden, width, build)

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        shapes = [item.grid for item in items]
        rows_T, columns_T = self._places(shapes)
        across, down = self.positions.weight
        cut = torch.cat([self._cut(item.features) for item in items]).to(across.dtype)
        x_TD = self.patches(cut) + (across[columns_T] + down[rows_T])
        angles = [self._turned(places_T) for places_T in (columns_T, rows_T)]
        lengths = [h * w for h, w in shapes]
        for block in self.blocks:
            x_TD = block(x_TD, lengths, *angles)
        out_MW: Tensor = self.project(self.norm(self._pooled(x_TD, shapes)))
        return out_MW

    def _cut(self, pixels: Tensor) -> Tensor:
        """uint8 [1, height, width, channels] -> patches, row after row, of values from -1 to 1."""
        p = self.facts.patch
        values: Tensor = 2 * (self.normalise(pixels)[0] - 0.5)
        h, w = values.shape[0] // p, values.shape[1] // p
        return values.view(h, p, w, p, -1).transpose(1, 2).reshape(h * w, -1)

    def _places(self, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        """int64 [T]: rows and columns."""
        grids = [torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij") for h, w in shapes]
        rows, columns = (torch.cat([grid[axis].reshape(-1) for grid in grids]) for axis in range(2))
        return rows.to(self.device), columns.to(self.device)

    def _turned(self, places_T: Tensor) -> Tensor:
        """float32 [T, H / 2]: cosines and sines for half a head."""
        width = self.facts.head_dim // 2
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device=self.device) / width
        angles = places_T[:, None].float() / self.facts.theta**exponents
        return torch.cat((angles.cos(), angles.sin()), -1)

    def _pooled(self, x_TD: Tensor, shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """[M, D]: means of squares, in float32 until they have been standardised: they are large."""
        by, parts = self.facts.pool, []
        for image_TD, (h, w) in zip(torch.split(x_TD, [h * w for h, w in shapes]), shapes, strict=True):
            squares = image_TD.float().view(h // by, by, w // by, by, -1)
            parts.append(squares.mean((1, 3)).to(x_TD.dtype).flatten(0, 1))
        pooled_MD: Tensor = torch.cat(parts).float() * self.facts.hidden**0.5
        if self.shift is not None and self.stretch is not None:
            pooled_MD = (pooled_MD - self.shift.weight.float()) * self.stretch.weight.float()
        return pooled_MD.to(x_TD.dtype)


def _fill_one(target: Tensor, at: int, stored: Stored) -> None:
    target[at].copy_(read_all(stored).reshape(()))
