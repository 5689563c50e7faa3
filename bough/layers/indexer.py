"""What tokens are chosen by in sparse attention: DeepSeek V3.2's lightning indexer.

T tokens, D width of the stream, P width of what queries are made from, I heads, H width of a head.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from bough.config.model_facts import Indexer
from bough.kernels.rotary import apply_rope
from bough.layers.batch import Batch, IndexKeys, IndexQueries
from bough.layers.build import Build
from bough.layers.linear import ReplicatedLinear
from bough.layers.norm import LayerNorm
from bough.layers.rotary import Rope
from bough.quantization.unquantized import Unquantized

_EPS = 1e-6
"""Of the keys' norm: no config names it."""


class TokenIndexer(nn.Module):
    """Projects what a layer scores tokens with. Every rank has all heads: their scores are one sum.

    Scores are compared, never added to anything, so factors that all of them have are left out.
    """

    def __init__(self, facts: Indexer, hidden: int, q_rank: int, rope: Rope, build: Build) -> None:
        """`rope`: the table of the layer's attention; pairs may stand otherwise here."""
        super().__init__()
        self.facts = facts
        self.rope = rope
        self.kept = IndexKeys(facts.head_dim, facts.interleaved)
        self.queries = ReplicatedLinear(q_rank, facts.num_heads * facts.head_dim, build)
        self.keys = ReplicatedLinear(hidden, facts.head_dim, build)
        self.key_norm = LayerNorm(facts.head_dim, _EPS, build)
        # float32, as routers are: rounding it changes which tokens are chosen
        self.weigh = ReplicatedLinear(
            hidden, facts.num_heads, replace(build, scheme=Unquantized(), dtype=torch.float32)
        )

    def forward(self, x_TD: Tensor, query_TP: Tensor, batch: Batch) -> IndexQueries:
        q_TIH = self.queries(query_TP).view(len(x_TD), self.facts.num_heads, self.facts.head_dim)
        k_T1H = self.key_norm(self.keys(x_TD)).unsqueeze(1)
        q_TIH, k_T1H = apply_rope(q_TIH, k_T1H, *self.rope.at(batch), interleaved=self.facts.interleaved)
        return IndexQueries(q_TIH, self.weigh(x_TD.float()), k_T1H.squeeze(1))
