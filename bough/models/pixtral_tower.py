"""The tower of Pixtral and Mistral 3, and the names of its tensors. T patches, D width, M positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bough.config.model_facts import Activation, NormFacts
from bough.config.pixtral import NORM, PixtralVision
from bough.layers.build import Build
from bough.layers.linear import ReplicatedLinear
from bough.layers.norm import make_norm
from bough.layers.projectors import TwoLinears
from bough.layers.tower import Normaliser, PatchEmbedding, Tower, TowerBlock, TowerInput, alone


class PatchMerger(nn.Module):
    """Squares of normed patches, through a product, as wide as one."""

    def __init__(self, facts: PixtralVision, norm: NormFacts, build: Build) -> None:
        super().__init__()
        hidden = facts.block.hidden
        self.by = facts.merge
        self.norm = make_norm(norm, hidden, build)
        self.linear = ReplicatedLinear(hidden * facts.merge**2, hidden, build)

    def forward(self, x_TD: Tensor, shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """[M, D]. `shapes`: rows and columns of patches of each image."""
        x_TD, by = self.norm(x_TD), self.by
        parts = []
        for image_TD, (h, w) in zip(torch.split(x_TD, [h * w for h, w in shapes]), shapes, strict=True):
            squares = image_TD.view(h // by, by, w // by, by, -1).permute(0, 2, 4, 1, 3)
            parts.append(squares.reshape(h // by * (w // by), -1))
        out_MD: Tensor = self.linear(torch.cat(parts))
        return out_MD


class PixtralTower(Tower):
    """A vision transformer over images of their own shapes."""

    def __init__(
        self,
        facts: PixtralVision,
        width: int,
        build: Build,
        *,
        activation: Activation,
        bias: bool,
        merger_norm: NormFacts | None,
    ) -> None:
        """`width`: of the language model; `activation`, `bias`: of the projector; `merger_norm` None: a
        patch is a position."""
        super().__init__()
        build = alone(build)
        self.facts = facts
        self.width = width
        self.device = build.device
        self.normalise = Normaliser(facts.image.mean, facts.image.std, facts.image.rescale, build)
        self.patches = PatchEmbedding(facts.kernel, facts.block.hidden, build, bias=False)
        self.pre_norm = make_norm(NORM, facts.block.hidden, build)
        self.blocks = nn.ModuleList(TowerBlock(facts.block, build) for _ in range(facts.depth))
        self.merger = None if merger_norm is None else PatchMerger(facts, merger_norm, build)
        self.project = TwoLinears((facts.block.hidden, width), build, activation=activation, bias=bias)

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        shapes = [item.grid for item in items]
        x_TD = self.pre_norm(self.patches(torch.cat([self._cut(item.features) for item in items])))
        lengths, cos_sin_TR = [h * w for h, w in shapes], self._angles(shapes)
        for block in self.blocks:
            x_TD = block(x_TD, lengths, cos_sin_TR)
        if self.merger is not None:
            x_TD = self.merger(x_TD, shapes)
        out_MW: Tensor = self.project(x_TD)
        return out_MW

    def _cut(self, pixels: Tensor) -> Tensor:
        """uint8 [1, height, width, channels] -> patches, row after row."""
        p = self.facts.patch
        values: Tensor = self.normalise(pixels)[0]
        h, w = values.shape[0] // p, values.shape[1] // p
        return values.view(h, p, w, p, -1).permute(0, 2, 4, 1, 3).reshape(h * w, -1)

    def _angles(self, shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """Even frequencies turn by row, odd ones by column."""
        width = self.facts.block.head_dim
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device=self.device) / width
        frequencies = 1.0 / self.facts.theta**exponents
        angles = []
        for h, w in shapes:
            sides = (torch.arange(size, device=self.device) for size in (h, w))
            rows, columns = torch.meshgrid(*sides, indexing="ij")
            turned = (rows.reshape(-1, 1) * frequencies[0::2], columns.reshape(-1, 1) * frequencies[1::2])
            angles.append(torch.cat(turned, -1))
        angles_TF = torch.cat(angles)
        return torch.cat((angles_TF.cos(), angles_TF.sin()), -1)
