"""Medusa's heads: each guesses one more token behind the next from the target's last state. R rows, D width, V tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.draft_facts import DraftFacts, Medusa
from bough.layers.build import Build
from bough.layers.draft_heads import DraftVocabulary, TargetEnds
from bough.layers.embedding import Head
from bough.layers.linear import ReplicatedLinear


class ResidualBlock(nn.Module):
    """x + silu(W x + b)"""

    def __init__(self, hidden: int, build: Build) -> None:
        super().__init__()
        self.linear = ReplicatedLinear(hidden, hidden, build, bias=True)

    def forward(self, x_RD: Tensor) -> Tensor:
        out: Tensor = x_RD + F.silu(self.linear(x_RD))
        return out


class MedusaHeads(nn.Module):
    """Head k guesses the token k + 2 behind the one whose state it reads: the target itself gives the next."""

    def __init__(self, facts: DraftFacts, build: Build, target: TargetEnds) -> None:
        super().__init__()
        assert isinstance(facts.kind, Medusa)
        kind, hidden = facts.kind, facts.model.hidden
        vocab = kind.vocab or facts.model.vocab
        self.blocks = nn.ModuleList(
            nn.ModuleList(ResidualBlock(hidden, build) for _ in range(kind.num_layers)) for _ in range(kind.num_heads)
        )
        self.heads: nn.ModuleList | None = None
        if kind.own_heads:
            self.heads = nn.ModuleList(Head(vocab, hidden, build) for _ in range(kind.num_heads))
        self.vocabulary = DraftVocabulary(vocab, build) if kind.vocab is not None else None
        self.target_ids_V = None if self.vocabulary is None else self.vocabulary.ids_V
        self._target = (target,)  # in a tuple: not a part of this one

    def logits(self, states_RD: Tensor, number: int) -> Tensor:
        """[R, V], of one head."""
        x_RD = states_RD
        stack = self.blocks[number]
        assert isinstance(stack, nn.ModuleList)
        for block in stack:
            x_RD = block(x_RD)
        return self._target[0].logits(x_RD) if self.heads is None else self.heads[number](x_RD)
