"""The frame of a decoder-only language model: embedding, a stack of blocks, a norm, an output head. T tokens, D width."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from bough.config.model_facts import ModelFacts
from bough.layers.attention import Attention
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.embedding import Head, VocabEmbedding
from bough.layers.fused import FusedBlocks
from bough.layers.linear import QKVLinear
from bough.layers.norm import RMSNorm

_TOKENS_AT_ONCE = 4096
"""Of the vocabulary, when the first layer's table is made."""


class _Projecting(Protocol):
    """How blocks begin: with a norm and attention."""

    attn_norm: RMSNorm
    qkv: QKVLinear
    attn: Attention


class Decoder(nn.Module):
    """A `Model`. A block takes (x_TD, residual_TD, batch) and returns the same pair: what it adds to the residual stream
    (perhaps as several addends, [P, T, D]), and the stream without it, so that the next norm can do the addition; or their
    sum and None, where a product made it."""

    def __init__(
        self,
        facts: ModelFacts,
        blocks: Iterable[nn.Module],
        build: Build,
        *,
        embed_scale: float | None = None,
        norm_offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed = VocabEmbedding(facts.vocab, facts.hidden, build, scale=embed_scale)
        self.layers = nn.ModuleList(blocks)
        self.fused = FusedBlocks(self.layers)
        self.norm = RMSNorm(facts.hidden, facts.norm_eps, build, offset=norm_offset)
        self.head = Head(
            facts.vocab,
            facts.hidden,
            build,
            tied_to=self.embed if facts.tie_embeddings else None,
            softcap=facts.logit_softcap,
        )
        _put_modules_at_hand(self)

    def forward(self, batch: Batch) -> Tensor:
        x_TD, residual_TD = self.embed(batch), None
        at_once = self.fused.forward(x_TD, batch.positions_T, batch.attention)
        if at_once is not None:
            return self.norm.last(*at_once, batch)
        for block in self.layers:
            x_TD, residual_TD = block(x_TD, residual_TD, batch)
        return self.norm.last(x_TD, residual_TD, batch)

    @torch.no_grad()
    def look_up_first_layer(self) -> bool:
        """From now on, what the first block projects is looked up by token: nothing comes before it but the embedding.
        Returns False where the block is of another kind.

        To be called once the weights are there, and again when they change.
        """
        if not all(hasattr(self.layers[0], part) for part in _Projecting.__annotations__):
            return False
        block = cast(_Projecting, self.layers[0])
        weight, vocab = block.attn_norm.weight, self.embed.shape[0]
        table_VO = weight.new_empty(vocab, block.qkv.width)
        for begin in range(0, vocab, _TOKENS_AT_ONCE):
            end = min(begin + _TOKENS_AT_ONCE, vocab)
            x_TD = self.embed.of(torch.arange(begin, end, device=weight.device))
            table_VO[begin:end] = block.qkv.product(block.attn_norm(x_TD))
        block.attn.by_token_VO = table_VO
        return True

    def logits(self, hidden_LD: Tensor) -> Tensor:
        out: Tensor = self.head(hidden_LD)
        return out


def _put_modules_at_hand(model: nn.Module) -> None:
    """Modules become ordinary attributes of those they belong to, beside what torch knows of them: it looks for them when
    all else has failed, a dozen times a layer, which is a tenth of what launching a layer takes.

    Torch forgets the attribute when another module is assigned, and then only: modules of a model are never deleted, set to
    None or registered anew. Parameters stay where they are: torch may replace them.
    """
    for module in model.modules():
        vars(module).update(module.named_children())
