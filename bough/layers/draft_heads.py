"""Networks that draft from a target's states. T tokens (or the R rows that a pass narrows to), D their own width, E that of
the target, V tokens that they can draft.

A head turns what the target has computed into *states* of its own (`features`), from which and a token's embedding `run`
makes the state behind that token, in two forms: `logits` reads one, and the other takes the place of a target's state for
the next token.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from bough.config.draft_facts import DraftFacts, Eagle3, Fused
from bough.kernels.draft_chain import ChainSide, side_by_side
from bough.layers.attention import Attention
from bough.layers.batch import Batch, rotates
from bough.layers.blocks import PreNormBlock
from bough.layers.build import Build
from bough.layers.decoder import MakeBlock
from bough.layers.embedding import Head, VocabEmbedding
from bough.layers.linear import ReplicatedLinear
from bough.layers.norm import RMSNorm
from bough.layers.parts import Parts
from bough.layers.stream import Norm, Stream
from bough.weights.slots import Slot
from bough.weights.stored import Stored, read_all

Vectors = tuple[Tensor, Tensor | None]
"""Of tokens: [T, D], or a table and the row of each, as `VocabEmbedding.vectors` gives them."""


class Made(NamedTuple):
    """States behind tokens, [T, D], or [R, D] of the tokens that `Batch.logits_at` names."""

    carried: Tensor
    """What the next `run` reads in place of states of the target."""
    ready: Tensor
    """What `logits` reads: perhaps the same."""


class StateHead(Protocol):
    """What `speculative.heads` drives."""

    num_layers: int
    """Layers that keep KV."""
    last_layer: int
    """The place of the last of them in the cache."""

    def features(self, states: list[Tensor]) -> Tensor:
        """[T, D]: its own state for each token of the target's pass."""
        ...

    def run(self, ids_T: Tensor, states_TD: Tensor, batch: Batch) -> Made:
        """`states_TD` may be overwritten."""
        ...

    def logits(self, ready_RD: Tensor) -> Tensor:
        """[R, V]"""
        ...

    target_ids_V: Tensor | None
    """int64 [V]: the target's tokens that it can draft, ascending; None: all, under the same ids."""


class TargetHead(Protocol):
    """The target's output head."""

    def logits(self, hidden_LD: Tensor) -> Tensor: ...


class TargetEnds(TargetHead, Protocol):
    """What heads may share with the target."""

    def embed(self, ids_T: Tensor) -> Tensor: ...

    def vectors(self, ids_T: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `VocabEmbedding.vectors`."""
        ...


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

    def forward(self, embeds: Vectors, stream: Stream, batch: Batch) -> None:
        both = joined(embeds, self.attn_norm, (stream.read(None), None), self.hidden_norm)
        if self.norm_before_residual:
            stream.replace(both[:, both.shape[1] // 2 :].contiguous())
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

    def _vectors(self, ids_T: Tensor) -> Vectors:
        return self._target[0].vectors(ids_T) if self.own_embed is None else self.own_embed.vectors(ids_T)

    def features(self, states: list[Tensor]) -> Tensor:
        if self.feature_norm is not None and self.kind.feature_norms == "each":
            states = [norm(state) for norm, state in zip(self.feature_norm, states, strict=True)]
        joined = torch.cat(states, -1)
        if self.feature_norm is not None and self.kind.feature_norms == "all":
            joined = self.feature_norm[0](joined)
        out: Tensor = self.fc(joined)
        return out

    def run(self, ids_T: Tensor, states_TD: Tensor, batch: Batch) -> Made:
        stream = Stream(states_TD, batch)
        first, *others = self.layers
        first(self._vectors(ids_T), stream, batch)
        for block in others:
            block(stream, batch)
        normed_RD = stream.last(self.norm)
        return Made(normed_RD if self.kind.carries_normed else stream.read(None), normed_RD)

    def logits(self, ready_RD: Tensor) -> Tensor:
        return self._target[0].logits(ready_RD) if self.head is None else self.head(ready_RD)


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

    def _vectors(self, ids_T: Tensor) -> Vectors:
        return self._target[0].vectors(ids_T) if self.own_embed is None else self.own_embed.vectors(ids_T)

    def features(self, states: list[Tensor]) -> Tensor:
        (state_TE,) = states
        return state_TE

    def run(self, ids_T: Tensor, states_TD: Tensor, batch: Batch) -> Made:
        given = (self._vectors(ids_T), self.embed_norm), ((states_TD, None), self.hidden_norm)
        (left, left_norm), (right, right_norm) = reversed(given) if self.kind.hidden_first else given
        stream = Stream(self.fc(joined(left, left_norm, right, right_norm)), batch)
        for block in self.layers.values():
            block(stream, batch)
        states_RD = stream.last(self.norm)
        return Made(states_RD, states_RD)

    def logits(self, ready_RD: Tensor) -> Tensor:
        return self._target[0].logits(ready_RD)


def joined(left: Vectors, left_norm: Norm | None, right: Vectors, right_norm: Norm | None) -> Tensor:
    """[T, W + W']: two vectors of each token side by side, each through its norm."""
    return side_by_side(_side(left, left_norm), _side(right, right_norm))


def _side(vectors: Vectors, norm: Norm | None) -> ChainSide:
    x, at_T = vectors
    if isinstance(norm, RMSNorm):
        return ChainSide(x, at_T, norm.weight, norm.eps, norm.offset)
    if norm is None:
        return ChainSide(x, at_T)
    return ChainSide(norm(x if at_T is None else embedding(at_T, x)))
