"""Networks that draft from a target's states. T tokens (or the R rows that a pass narrows to), D their own width, E that of
the target, V tokens that they can draft.

A head turns what the target has computed into *states* of its own (`features`), from which and a token's embedding `run`
makes the state behind that token; `logits` says which token may follow it, and `carried` is what takes the place of a
target's state for the next one.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from bough.config.draft_facts import DraftFacts, Eagle3, Fused
from bough.layers.attention import Attention
from bough.layers.batch import Batch, rotates
from bough.layers.blocks import PreNormBlock
from bough.layers.build import Build
from bough.layers.decoder import MakeBlock
from bough.layers.embedding import Head, VocabEmbedding
from bough.layers.linear import ReplicatedLinear
from bough.layers.norm import RMSNorm
from bough.layers.parts import Parts
from bough.layers.stream import Stream
from bough.weights.slots import Slot
from bough.weights.stored import Stored, read_all


class StateHead(Protocol):
    """What `speculative.heads` drives."""

    num_layers: int
    """Layers that keep KV."""
    last_layer: int
    """The place of the last of them in the cache."""

    def embed(self, ids_T: Tensor) -> Tensor: ...

    def features(self, states: list[Tensor]) -> Tensor:
        """[T, D]: its own state for each token of the target's pass."""
        ...

    def run(self, embeds_TD: Tensor, states_TD: Tensor, batch: Batch) -> Tensor:
        """The state behind each token, [T, D], or [R, D] of the tokens that `batch.logits_at` names."""
        ...

    def carried(self, states_RD: Tensor) -> Tensor:
        """What the next `run` reads in place of a state of the target."""
        ...

    def logits(self, states_RD: Tensor) -> Tensor:
        """[R, V]"""
        ...

    target_ids_V: Tensor | None
    """int64 [V]: the target's tokens that it can draft, ascending; None: all, under the same ids."""


class TargetEnds(Protocol):
    """What heads may share with the target."""

    def embed(self, ids_T: Tensor) -> Tensor: ...

    def logits(self, hidden_LD: Tensor) -> Tensor: ...


class DraftVocabulary(nn.Module):
    """The target's tokens that a head can draft. Checkpoints store by how much each id differs from its place."""

    def __init__(self, count: int, build: Build) -> None:
        super().__init__()
        self.ids_V = torch.arange(count, dtype=torch.int64, device=build.device)

    def slots(self) -> dict[str, Slot]:
        # One that is left out maps each id to itself.
        return {"d2t": Slot((len(self.ids_V),), self._put, optional=True)}

    def _put(self, stored: Stored) -> None:
        self.ids_V += read_all(stored).to(self.ids_V.device, torch.int64)


class Eagle3Block(nn.Module):
    """The first block of an EAGLE-3 head: its attention reads the embedding beside the state, each through a norm."""

    def __init__(self, parts: Parts, *, norm_before_residual: bool) -> None:
        super().__init__()
        hidden = parts.facts.hidden
        self.attn_norm = parts.norm()
        """Of embeddings."""
        self.hidden_norm = parts.norm()
        attention = parts.attention(0, in_dim=2 * hidden)
        assert isinstance(attention, Attention), "read_draft knows no other"
        self.attn = attention
        self.mlp_norm = parts.norm()
        self.mlp = parts.feed_forward(0)
        self.norm_before_residual = norm_before_residual

    def forward(self, embeds_TD: Tensor, stream: Stream, batch: Batch) -> None:
        state_TD = self.hidden_norm(stream.read(None))
        both = torch.cat((self.attn_norm(embeds_TD), state_TD), -1)
        if self.norm_before_residual:
            stream.replace(state_TD)
        queries_at_L = batch.attention.queries_at(self.attn.spec) if rotates(batch.attention) else None
        added = self.attn(both, batch)
        if queries_at_L is not None:
            stream.narrow(queries_at_L)
        stream.add(added)
        stream.add(self.mlp(stream.norm(self.mlp_norm)))


class Eagle3Head(nn.Module):
    """EAGLE-3: states from between the target's layers, joined by one product."""

    def __init__(self, facts: DraftFacts, build: Build, target: TargetEnds) -> None:
        super().__init__()
        assert isinstance(facts.kind, Eagle3)
        kind, model = facts.kind, facts.model
        parts = Parts(model, build)
        hidden, eps = model.hidden, model.norm.eps
        self.kind = kind
        self.fc = ReplicatedLinear(kind.num_taps * kind.target_hidden, hidden, build, bias=kind.fc_bias)
        self.feature_norm: nn.ModuleList | None = None
        if kind.feature_norms:
            count = kind.num_taps if kind.feature_norms == "each" else 1
            width = kind.num_taps * kind.target_hidden // count
            self.feature_norm = nn.ModuleList(RMSNorm(width, eps, build) for _ in range(count))
        self.own_embed: VocabEmbedding | None = None
        if hidden != kind.target_hidden:
            self.own_embed = VocabEmbedding(model.vocab, hidden, build)
        first = Eagle3Block(parts, norm_before_residual=kind.norm_before_residual)
        self.layers = nn.ModuleList([first, *(PreNormBlock(parts, layer) for layer in range(1, model.num_layers))])
        self.num_layers = model.num_layers
        self.last_layer = build.first_layer + model.num_layers - 1
        self.norm = parts.norm()
        self.head = Head(kind.vocab, hidden, build) if kind.vocab is not None else None
        self.vocabulary = DraftVocabulary(kind.vocab, build) if kind.vocab is not None else None
        self.target_ids_V = None if self.vocabulary is None else self.vocabulary.ids_V
        self._target = (target,)  # in a tuple: not a part of this one

    def embed(self, ids_T: Tensor) -> Tensor:
        return self._target[0].embed(ids_T) if self.own_embed is None else self.own_embed.of(ids_T)

    def features(self, states: list[Tensor]) -> Tensor:
        if self.feature_norm is not None and self.kind.feature_norms == "each":
            states = [norm(state) for norm, state in zip(self.feature_norm, states, strict=True)]
        joined = torch.cat(states, -1)
        if self.feature_norm is not None and self.kind.feature_norms == "all":
            joined = self.feature_norm[0](joined)
        out: Tensor = self.fc(joined)
        return out

    def run(self, embeds_TD: Tensor, states_TD: Tensor, batch: Batch) -> Tensor:
        stream = Stream(states_TD.clone(), batch)  # which may be overwritten
        first, *others = self.layers
        first(embeds_TD, stream, batch)
        for block in others:
            block(stream, batch)
        return stream.last(None)

    def carried(self, states_RD: Tensor) -> Tensor:
        out: Tensor = self.norm(states_RD) if self.kind.carries_normed else states_RD
        return out

    def logits(self, states_RD: Tensor) -> Tensor:
        normed: Tensor = self.norm(states_RD)
        return self._target[0].logits(normed) if self.head is None else self.head(normed)


class UnnormedBlock(nn.Module):
    """The first block of an EAGLE head: its attention reads the stream as it is."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self.attn = parts.attention(layer)
        self.mlp_norm = parts.norm()
        self.mlp = parts.feed_forward(layer)

    def forward(self, stream: Stream, batch: Batch) -> None:
        stream.add(self.attn(stream.plain(), batch))
        stream.add(self.mlp(stream.norm(self.mlp_norm)))


class FusedHead(nn.Module):
    """EAGLE, EAGLE-2 and NextN: the embedding and the state become one vector, which passes ordinary blocks."""

    def __init__(self, facts: DraftFacts, build: Build, target: TargetEnds, block: MakeBlock, first: int = 0) -> None:
        """`block` makes the blocks, `first` is the number of the first of them in the checkpoint."""
        super().__init__()
        assert isinstance(facts.kind, Fused)
        kind, model = facts.kind, facts.model
        parts = Parts(model, build)
        hidden = model.hidden
        self.kind = kind
        self.embed_norm = parts.norm() if kind.norms else None
        self.hidden_norm = parts.norm() if kind.norms else None
        self.fc = ReplicatedLinear(hidden + kind.target_hidden, hidden, build, bias=kind.bias)
        self.own_embed: VocabEmbedding | None = None
        if hidden != kind.target_hidden:
            self.own_embed = VocabEmbedding(model.vocab, hidden, build)
        makes = block if kind.first_norm else UnnormedBlock
        self.layers = nn.ModuleDict(
            {str(first + layer): (block if layer else makes)(parts, layer) for layer in range(model.num_layers)}
        )
        self.norm = parts.norm() if kind.last_norm else None
        self.num_layers = model.num_layers
        self.last_layer = build.first_layer + model.num_layers - 1
        self.target_ids_V: Tensor | None = None
        self._target = (target,)  # in a tuple: not a part of this one

    def embed(self, ids_T: Tensor) -> Tensor:
        return self._target[0].embed(ids_T) if self.own_embed is None else self.own_embed.of(ids_T)

    def features(self, states: list[Tensor]) -> Tensor:
        (state_TE,) = states
        return state_TE

    def run(self, embeds_TD: Tensor, states_TD: Tensor, batch: Batch) -> Tensor:
        if self.embed_norm is not None and self.hidden_norm is not None:
            embeds_TD, states_TD = self.embed_norm(embeds_TD), self.hidden_norm(states_TD)
        both = (states_TD, embeds_TD) if self.kind.hidden_first else (embeds_TD, states_TD)
        stream = Stream(self.fc(torch.cat(both, -1)), batch)
        for block in self.layers.values():
            block(stream, batch)
        return stream.last(self.norm)

    def carried(self, states_RD: Tensor) -> Tensor:
        return states_RD

    def logits(self, states_RD: Tensor) -> Tensor:
        return self._target[0].logits(states_RD)
