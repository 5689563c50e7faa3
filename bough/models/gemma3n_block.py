"""Gemma 3n's block."""

from __future__ import annotations

from torch import Tensor, nn

from bough.layers.altup import AltUpStream, StreamMixer
from bough.layers.batch import Batch
from bough.layers.linear import ReplicatedLinear
from bough.layers.parts import Parts

_HALF = 2.0**-0.5


class Laurel(nn.Module):
    """A learned product of low rank beside the identity: x + norm(up(down(x)))."""

    def __init__(self, parts: Parts, rank: int) -> None:
        super().__init__()
        self.down = ReplicatedLinear(parts.facts.hidden, rank, parts.build)
        self.up = ReplicatedLinear(rank, parts.facts.hidden, parts.build)
        self.norm = parts.norm()

    def forward(self, x_TD: Tensor) -> Tensor:
        out: Tensor = x_TD + self.norm(self.up(self.down(x_TD)))
        return out


class AltUpBlock(nn.Module):
    """Gemma's sandwich over the active stream, between a prediction of all streams and its correction."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        altup = parts.facts.altup
        assert altup is not None, "the reader of the config says so"
        self.layer = layer
        self.streams = StreamMixer(parts.facts, altup, parts.build)
        self.laurel = Laurel(parts, altup.laurel_rank)
        self.attn_norm = parts.norm()
        self.attn = parts.attention(layer)
        self.after_attn_norm = parts.norm()
        self.mlp_norm = parts.norm()
        self.mlp = parts.feed_forward(layer)
        self.after_mlp_norm = parts.norm()
        self.input = parts.layer_input_gate()

    def forward(self, stream: AltUpStream, batch: Batch) -> None:
        stream.predict(self.streams)
        x = stream.norm(self.attn_norm).now()
        laurel_TD = self.laurel(x.value())
        stream.add(self.after_attn_norm(self.attn(x, batch)))
        stream.add(laurel_TD)
        stream.scale(_HALF)
        stream.add(self.after_mlp_norm(self.mlp(stream.norm(self.mlp_norm))))
        stream.correct(self.streams)
        active_TD = self.streams.scaled(stream.read(None))
        stream.add_to_others(self.input(active_TD, stream.layer_input(self.layer)))
