"""The tower of Idefics 2. T patches, D width of the tower, W width of the language model, Q queries of an image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.idefics2 import Idefics2Vision
from bough.layers.build import Build
from bough.layers.linear import ReplicatedLinear
from bough.layers.mlp import ACTIVATIONS, GatedMlp
from bough.layers.norm import make_norm
from bough.layers.stream import Product
from bough.layers.tower import Learned, Tower, TowerInput, alone
from bough.layers.vit import Vit, nearest_places


class GatedProjection(nn.Module):
    """A gated feed-forward block that leaves another width than it takes."""

    def __init__(self, facts: Idefics2Vision, build: Build) -> None:
        super().__init__()
        hidden = facts.vit.block.hidden
        self.gate = ReplicatedLinear(hidden, facts.inner, build)
        self.up = ReplicatedLinear(hidden, facts.inner, build)
        self.down = ReplicatedLinear(facts.inner, facts.out, build)
        self.activation = ACTIVATIONS[facts.activation]

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TW: Tensor = self.down(self.activation(self.gate(x_TD)) * self.up(x_TD))
        return out_TW


class Reader(nn.Module):
    """Queries read an image's patches and one another."""

    def __init__(self, facts: Idefics2Vision, build: Build) -> None:
        super().__init__()
        self.facts = facts
        out, head = facts.out, facts.head_dim
        self.query_norm = make_norm(facts.norm, out, build)
        self.patch_norm = make_norm(facts.norm, out, build)
        self.q = ReplicatedLinear(out, facts.num_heads * head, build)
        self.k = ReplicatedLinear(out, facts.num_kv_heads * head, build)
        self.v = ReplicatedLinear(out, facts.num_kv_heads * head, build)
        self.out = ReplicatedLinear(facts.num_heads * head, out, build)
        self.mlp_norm = make_norm(facts.norm, out, build)
        self.mlp = GatedMlp(facts.mlp, out, build)

    def forward(self, queries_QW: Tensor, patches_TW: Tensor) -> Tensor:
        """Of one image."""
        facts, normed_QW = self.facts, self.query_norm(queries_QW)
        read = torch.cat([self.patch_norm(patches_TW), normed_QW])
        q_NQH = self.q(normed_QW).view(-1, facts.num_heads, facts.head_dim).transpose(0, 1)
        k_NSH, v_NSH = (
            each(read).view(-1, facts.num_kv_heads, facts.head_dim).transpose(0, 1) for each in (self.k, self.v)
        )
        seen = F.scaled_dot_product_attention(q_NQH[None], k_NSH[None], v_NSH[None], enable_gqa=True)[0]
        queries_QW = queries_QW + self.out(seen.transpose(0, 1).flatten(1))
        product: Product = self.mlp(self.mlp_norm(queries_QW))
        return queries_QW + product.value()


class Idefics2Tower(Tower):
    """An item's features are patches [rows x columns, patch, patch, 3], its grid is (rows, columns)."""

    def __init__(self, facts: Idefics2Vision, build: Build) -> None:
        super().__init__()
        build = alone(build)
        self.facts = facts
        self.width = facts.out
        self.device = build.device
        self.vit = Vit(facts.vit, build)
        self.project = GatedProjection(facts, build)
        self.queries = Learned((facts.queries, facts.out), build)
        self.readers = nn.ModuleList(Reader(facts, build) for _ in range(facts.depth))
        self.post_norm = make_norm(facts.norm, facts.out, build)

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        side = self.facts.vit.side
        grids = [(item.grid[0], item.grid[1]) for item in items]
        places = [nearest_places(*grid, side, self.device, by_step=True).flatten() for grid in grids]
        x_TD = self.vit.embed(torch.cat([item.features for item in items]), torch.cat(places))
        lengths = [len(each) for each in places]
        for block in self.vit.blocks:
            x_TD = block(x_TD, lengths, None)
        assert self.vit.post_norm is not None, "SigLIP has one"
        read: list[Tensor] = []
        for patches_TW in torch.split(self.project(self.vit.post_norm(x_TD)), lengths):
            queries_QW: Tensor = self.queries.weight
            for reader in self.readers:
                queries_QW = reader(queries_QW, patches_TW)
            read.append(queries_QW)
        out_MW: Tensor = self.post_norm(torch.cat(read))
        return out_MW
