"""Vision transformers over tiles of one size. N tiles, S tokens of each, P patches of each, D width, W width of features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bough.config.tower_facts import VitFacts
from bough.layers.build import Build
from bough.layers.norm import make_norm
from bough.layers.tower import Learned, Normaliser, PatchEmbedding, Tower, TowerBlock, TowerInput, alone


class Vit(nn.Module):
    """From pixels to features of patches."""

    def __init__(self, facts: VitFacts, build: Build) -> None:
        super().__init__()
        hidden = facts.block.hidden
        self.facts = facts
        dtype = torch.bfloat16 if facts.coarse_pixels else torch.float32
        self.normalise = Normaliser(facts.image.mean, facts.image.std, facts.image.rescale, build, dtype=dtype)
        self.patches = PatchEmbedding(facts.kernel, hidden, build, bias=facts.patch_bias)
        self.class_token = Learned((hidden,), build) if facts.class_token else None
        self.positions = Learned((facts.tokens, hidden), build)
        self.pre_norm = None if facts.pre_norm is None else make_norm(facts.pre_norm, hidden, build)
        self.blocks = nn.ModuleList(TowerBlock(facts.block, build) for _ in range(facts.depth))
        self.post_norm = None if facts.post_norm is None else make_norm(facts.post_norm, hidden, build)

    def forward(self, pixels: Tensor) -> Tensor:
        """uint8 [N, height, width, channels] -> [N, P, D], row after row of patches."""
        facts = self.facts
        first = int(facts.class_token and not facts.class_last)
        return self.tokens(pixels)[:, first : first + facts.side**2]

    def tokens(self, pixels: Tensor) -> Tensor:
        """The same with the class token, where there is one: [N, S, D]."""
        facts = self.facts
        side, patch, hidden = facts.side, facts.patch, facts.block.hidden
        count = len(pixels)
        cut = self.normalise(pixels).view(count, side, patch, side, patch, -1).permute(0, 1, 3, 5, 2, 4)
        x_NSD = self.patches(cut.reshape(count * side**2, -1)).view(count, side**2, hidden)
        if self.class_token is not None:
            both = (self.class_token.weight.expand(count, 1, -1), x_NSD)
            x_NSD = torch.cat(both[::-1] if facts.class_last else both, 1)
        x_TD: Tensor = (x_NSD + self.positions.weight).view(-1, hidden)
        if self.pre_norm is not None:
            x_TD = self.pre_norm(x_TD)
        cos_sin_TR = self._angles(pixels.device).repeat(count, 1) if facts.theta else None
        for block in self.blocks[: facts.used]:
            x_TD = block(x_TD, [facts.tokens] * count, cos_sin_TR)
        if self.post_norm is not None and facts.post_used:
            x_TD = self.post_norm(x_TD)
        return x_TD.view(count, facts.tokens, hidden)

    def embed(self, patches: Tensor, places_T: Tensor) -> Tensor:
        """uint8 [T, patch, patch, channels] -> [T, D]: patches of images of their own shapes at learned positions."""
        values: Tensor = self.patches(self.normalise(patches).permute(0, 3, 1, 2).flatten(1))
        return values + self.positions.weight[places_T]

    def _angles(self, device: torch.device) -> Tensor:
        """[tokens of a tile, width of a head]: columns and rows count from one; the class token is not turned."""
        facts, width = self.facts, self.facts.block.head_dim // 2
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
        places = torch.arange(facts.side**2, device=device)
        columns, rows = places % facts.side + 1, places // facts.side + 1
        angles_PF = torch.cat([each[:, None] * facts.theta**-exponents for each in (columns, rows)], -1)
        if facts.class_token:
            still = torch.zeros_like(angles_PF[:1])
            angles_PF = torch.cat([angles_PF, still] if facts.class_last else [still, angles_PF])
        return torch.cat((angles_PF.cos(), angles_PF.sin()), -1)


class TiledTower(Tower):
    """A vision transformer and what makes embeddings of its features. An item's features are its tiles."""

    def __init__(self, facts: VitFacts, project: nn.Module, width: int, build: Build) -> None:
        """`project`: [N, P, D] -> [N, positions of a tile, width]."""
        super().__init__()
        self.width = width
        self.vit = Vit(facts, alone(build))
        self.project = project

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        tiles = torch.cat([item.features for item in items])
        features_NMW: Tensor = self.project(self.vit(tiles))
        return self.pack(features_NMW, items)

    def pack(self, features_NMW: Tensor, items: Sequence[TowerInput]) -> Tensor:
        """Embeddings of all items, one after the other."""
        return features_NMW.flatten(0, 1)


def nearest_places(h: int, w: int, side: int, device: torch.device, *, by_step: bool = False) -> Tensor:
    """[h, w]: of `side x side` learned positions that which lies where each patch begins. `by_step`: its place is that many
    steps, which rounds otherwise."""
    bounds = torch.arange(1 / side, 1.0, 1 / side, device=device)

    def nearest(size: int) -> Tensor:
        numbers = torch.arange(size, dtype=torch.float32, device=device)
        step = 1.0 / torch.full((), float(size), device=device)  # divided there, in float32
        places = numbers * step if by_step else numbers / size
        return torch.bucketize(places, bounds, right=True)

    return nearest(h)[:, None] * side + nearest(w)


def shuffled(x_NPD: Tensor, side: int, by: int) -> Tensor:
    """[N, P / by^2, by^2 x D]: squares of `by x by` neighbours together, row after row."""
    count, _, hidden = x_NPD.shape
    squares = x_NPD.view(count, side // by, by, side // by, by, hidden).transpose(2, 3)
    return squares.reshape(count, (side // by) ** 2, by * by * hidden)
