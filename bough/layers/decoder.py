"""The frame of a decoder-only language model: embedding, a stack of blocks, a norm, an output head. T tokens, D width."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn

from bough.config.model_facts import ModelFacts
from bough.kernels.rows import take_rows
from bough.layers.altup import AltUpStream, StreamEnds
from bough.layers.attention import Attention
from bough.layers.batch import Batch, Taps
from bough.layers.build import Build
from bough.layers.elsewhere import Elsewhere
from bough.layers.embedding import Head, Table, VocabEmbedding
from bough.layers.linear import ReplicatedLinear
from bough.layers.norm import RMSNorm, make_norm
from bough.layers.parts import Parts
from bough.layers.per_layer import LayerInputs
from bough.layers.place import place_weights
from bough.layers.stream import Stream
from bough.layers.tower import Tower

MakeBlock = Callable[[Parts, int], nn.Module]
"""Makes the block of a layer: a module that is called with (`Stream`, `Batch`) and adds to the stream."""
RunBlocks = Callable[["Decoder", Stream, Batch], None]

_TOKENS_AT_ONCE = 4096
"""Of the vocabulary, when the first layer's table is made."""


@runtime_checkable
class BeginsWithAttention(Protocol):
    """A block whose attention reads the normed stream: in the first layer that depends on a token's id alone."""

    attn_norm: RMSNorm
    attn: Attention


class Embedding(nn.Module):
    """From token ids to the beginning of the stream."""

    def __init__(self, facts: ModelFacts, build: Build) -> None:
        super().__init__()
        self.tokens = VocabEmbedding(facts.vocab, facts.embed_dim or facts.hidden, build, scale=facts.embed_scale)
        self.project_in: ReplicatedLinear | None = None
        if facts.embed_dim is not None:
            self.project_in = ReplicatedLinear(facts.embed_dim, facts.hidden, build)
        self.positions: Table | None = None
        self.first_position = 0
        if facts.positions is not None:
            self.positions = Table(facts.positions.num_positions, facts.hidden, build)
            self.first_position = facts.positions.first
        self.norm = make_norm(facts.norm, facts.hidden, build) if facts.embed_norm else None

    @property
    def is_plain(self) -> bool:
        """Whether it depends on a token's id alone."""
        return self.project_in is None and self.positions is None and self.norm is None

    def forward(self, batch: Batch) -> Tensor:
        x_TD: Tensor = self.tokens(batch)
        if self.project_in is not None:
            x_TD = self.project_in(x_TD)
        if self.positions is not None:
            x_TD = x_TD + self.positions(batch.positions_T + self.first_position)
        return x_TD if self.norm is None else self.norm(x_TD)


class Decoder(nn.Module):
    """A `Model`."""

    def __init__(self, facts: ModelFacts, build: Build, block: MakeBlock) -> None:
        super().__init__()
        parts = Parts(facts, build)
        self.pp = build.mesh.pp
        self.like = torch.empty(0, facts.hidden, dtype=build.dtype, device=build.device)
        """What the stream is made of."""
        if build.spread is not None:
            build.spread.blank_1D = self.like.new_zeros(1, facts.hidden)
        is_last = self.is_last
        self.embed = _here(self.pp.rank == 0 or (is_last and facts.tie_embeddings), build, partial(Embedding, facts))
        self.layers = nn.ModuleList(
            block(parts, layer) if layer in parts.stage else Elsewhere(partial(_block, facts, block, layer), build)
            for layer in range(facts.num_layers)
        )
        self.norm = _here(is_last, build, partial(make_norm, facts.norm, facts.hidden)) if facts.last_norm else None
        self.project_out: ReplicatedLinear | None = None
        if facts.embed_dim is not None:
            self.project_out = _here(is_last, build, partial(ReplicatedLinear, facts.hidden, facts.embed_dim))
        self.head = _here(is_last, build, partial(_head, facts, self.embed))
        self.deepstack = facts.deepstack
        """Leading layers after which features of media are added."""
        self.tower: Tower | None = None
        """What turns media into embeddings, where the model has it and this rank computes it."""
        self.inputs: LayerInputs | None = None
        """What gives each layer an input of its own."""
        if facts.per_layer is not None:
            self.inputs = LayerInputs(facts, facts.per_layer, build)
        self.streams: StreamEnds | None = None
        """What makes several streams, and one of them again."""
        if facts.altup is not None:
            self.streams = StreamEnds(facts, facts.altup, build)
        self._first_VO: Tensor | None = None
        """As the first layer's `Attention.by_token_VO`."""
        self.adapters = build.adapters
        self.run_blocks: RunBlocks = one_by_one
        """A device may have a quicker way (`layers/cpu_stack.py`)."""

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last layers: it gives hidden states and logits, and others pass the stream on."""
        return self.pp.rank == self.pp.size - 1

    def forward(self, batch: Batch) -> Tensor:
        """What `end` gives; nothing on a stage that is not the last."""
        if self.adapters is None:
            return self._through(batch)
        self.adapters.under_way = batch.adapters
        try:
            return self._through(batch)
        finally:
            self.adapters.under_way = None

    def _through(self, batch: Batch) -> Tensor:
        if self.pp.rank == 0:
            x_TD = self._embedded(batch)
        else:
            x_TD = self.pp.talk.receive(self.like.new_empty(batch.num_tokens, self.like.shape[1]), self.pp.rank - 1)
        stream = self.begin(x_TD, batch)
        self.run_blocks(self, stream, batch)
        if self.is_last:
            return self.end(stream)
        self.pp.talk.send(stream.read(None), self.pp.rank + 1)
        return self.like

    def _embedded(self, batch: Batch) -> Tensor:
        """[T, D]: the stream's beginning. What the first layer looks up is looked up with it, where that is possible."""
        table_VO = self._first_VO
        if table_VO is not None and batch.media is None and batch.adapters is None:
            x_TD, at_T = self.embed.tokens.vectors(batch.ids_T)
            if at_T is not None:
                x_TD, batch.first_TO = take_rows(at_T, x_TD, table_VO)
            return x_TD
        out: Tensor = self.embed(batch)
        return out

    def begin(self, x_TD: Tensor, batch: Batch) -> Stream:
        """The stream of a pass. `x_TD`: the embeddings, or what the stage before has sent."""
        inputs_TLP = None if self.inputs is None else self.inputs(x_TD, batch)
        if self.streams is not None:
            return self.streams.open(x_TD, batch, inputs_TLP)
        return Stream(x_TD, batch, layer_inputs_TLP=inputs_TLP)

    def end(self, stream: Stream) -> Tensor:
        """The hidden states of the tokens that are read."""
        if self.streams is not None and isinstance(stream, AltUpStream):
            hidden_LD = self.streams.close(stream)
            return hidden_LD if self.norm is None else self.norm(hidden_LD)
        hidden_LD = stream.last(self.norm)
        return hidden_LD if self.project_out is None else self.project_out(hidden_LD)

    def logits(self, hidden_LD: Tensor) -> Tensor:
        out: Tensor = self.head(hidden_LD)
        return out

    @torch.no_grad()
    def look_up_first_layer(self) -> bool:
        """From now on, what the first block projects is looked up by token: nothing comes before it but the embedding.
        Returns False where the block is of another kind.

        To be called once the weights are there, and again when they change.
        """
        block, embed = self.layers[0], self.embed.tokens
        begins = isinstance(block, BeginsWithAttention) and isinstance(block.attn, Attention)
        if (
            not begins
            or self.streams is not None
            or not self.embed.is_plain
            or not isinstance(block.attn_norm, RMSNorm)
        ):
            return False
        assert isinstance(block.attn, Attention)
        weight, vocab = block.attn_norm.weight, embed.shape[0]
        table_VO = weight.new_empty(vocab, block.attn.qkv.width)
        for begin in range(0, vocab, _TOKENS_AT_ONCE):
            end = min(begin + _TOKENS_AT_ONCE, vocab)
            x_TD = embed.of(torch.arange(begin, end, device=weight.device))
            table_VO[begin:end] = block.attn.qkv.product(block.attn_norm(x_TD))
        block.attn.by_token_VO = self._first_VO = table_VO
        return True


def one_by_one(model: Decoder, stream: Stream, batch: Batch, only: frozenset[int] | None = None) -> None:
    """`only`: the layers that are run, where it doesn't matter what becomes of the stream; None: all."""
    if batch.taps is not None:
        _tapped(model, stream, batch, batch.taps)
        return
    deep = model.deepstack if batch.media is not None else 0
    for number, block in enumerate(model.layers):
        if not isinstance(block, Elsewhere) and (only is None or number in only):
            block(stream, batch)
            if number < deep:
                add_deep(model, stream, batch, number)


def add_deep(model: Decoder, stream: Stream, batch: Batch, layer: int) -> None:
    """Adds the features of media that follow a layer."""
    assert batch.media is not None, "there are none otherwise"
    width = model.like.shape[1]
    values_MD = batch.media.values_MW[:, (1 + layer) * width : (2 + layer) * width]
    stream.add_at(batch.media.at_M, values_MD)


def _tapped(model: Decoder, stream: Stream, batch: Batch, taps: Taps) -> None:
    """The same, with the stream read between some of the layers. There are no stages where it is."""
    for number, block in enumerate(model.layers):
        if number in taps.layers:
            taps.states.append(stream.tap())
        block(stream, batch)
        if batch.media is not None and number < model.deepstack:
            add_deep(model, stream, batch, number)
    if len(model.layers) in taps.layers:
        taps.states.append(stream.tap())


M = TypeVar("M", bound=nn.Module)


def _here(mine: bool, build: Build, make: Callable[[Build], M]) -> M:
    """The part, or what stands in its place where another stage has it."""
    return make(build) if mine else cast(M, Elsewhere(make, build))


def _block(facts: ModelFacts, block: MakeBlock, layer: int, build: Build) -> nn.Module:
    return block(Parts(facts, build), layer)


def _head(facts: ModelFacts, embed: Embedding, build: Build) -> Head:
    tied = embed if facts.tie_embeddings else None
    if tied is not None and build.device.type == "meta":
        tied = Embedding(facts, build)
        place_weights(tied)
    return Head(
        facts.vocab - facts.unspoken,
        facts.embed_dim or facts.hidden,
        build,
        tied_to=None if tied is None else tied.tokens,
        bias=facts.head_bias,
        scale=facts.logit_scale,
        softcap=facts.logit_softcap,
        unspoken=facts.unspoken,
    )
