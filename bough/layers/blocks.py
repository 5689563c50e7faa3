"""The blocks that several families share. Each reads like the figure in a paper; what a family does otherwise is a block in
its own file."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bough.layers.batch import Batch
from bough.layers.parts import Parts
from bough.layers.stream import Product, Stream
from bough.layers.tower import Learned


class PreNormBlock(nn.Module):
    """Llama's: attention and feed-forward, each of the normed stream."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self.attn_norm = parts.norm()
        self.attn = parts.attention(layer)
        self.mlp_norm = parts.norm()
        self.mlp = parts.feed_forward(layer)
        self.scale = parts.facts.residual_scale

    def forward(self, stream: Stream, batch: Batch) -> None:
        stream.add(self.attn(stream.norm(self.attn_norm), batch), self.scale)
        stream.add(self.mlp(stream.norm(self.mlp_norm)), self.scale)


class CrossBlock(nn.Module):
    """Whisper's: attention, cross attention over media, and feed-forward, each of the normed stream."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self.attn_norm = parts.norm()
        self.attn = parts.mixer(layer, 0)
        self.cross_norm = parts.norm()
        self.cross = parts.mixer(layer, 1)
        self.mlp_norm = parts.norm()
        self.mlp = parts.feed_forward(layer)

    def forward(self, stream: Stream, batch: Batch) -> None:
        stream.add(self.attn(stream.norm(self.attn_norm), batch))
        stream.add(self.cross(stream.norm(self.cross_norm), batch))
        stream.add(self.mlp(stream.norm(self.mlp_norm)))


class GatedCrossBlock(nn.Module):
    """Llama 3.2 Vision's: cross attention over media in place of attention, and feed-forward, each of the normed stream and
    through a gate. Tokens that see no media pass it unchanged."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self.attn_norm = parts.norm()
        self.cross = parts.mixer(layer, 0)
        self.cross_gate = Learned((1,), parts.build)
        self.mlp_norm = parts.norm()
        self.mlp = parts.feed_forward(layer)
        self.mlp_gate = Learned((1,), parts.build)

    def forward(self, stream: Stream, batch: Batch) -> None:
        assert batch.cross is not None, "a runner of such a model brings it"
        sees_T1 = batch.cross.has_media_T1
        stream.add(_gated(self.cross(stream.norm(self.attn_norm), batch), self.cross_gate, sees_T1))
        stream.add(_gated(self.mlp(stream.norm(self.mlp_norm)), self.mlp_gate, sees_T1))


def _gated(added: Product, gate: Learned, sees_T1: Tensor) -> Tensor:
    return torch.where(sees_T1, added.value() * gate.weight.tanh(), 0)


class SandwichBlock(nn.Module):
    """Gemma's: what each half adds is normed, too."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self.attn_norm = parts.norm()
        self.attn = parts.attention(layer)
        self.after_attn_norm = parts.norm()
        self.mlp_norm = parts.norm()
        self.mlp = parts.feed_forward(layer)
        self.after_mlp_norm = parts.norm()
        self.scale = parts.facts.residual_scale

    def forward(self, stream: Stream, batch: Batch) -> None:
        stream.add(self.after_attn_norm(self.attn(stream.norm(self.attn_norm), batch)), self.scale)
        stream.add(self.after_mlp_norm(self.mlp(stream.norm(self.mlp_norm))), self.scale)


class PostNormBlock(nn.Module):
    """OLMo 2's: both halves read the stream as it is; what they add is normed."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self.attn = parts.attention(layer)
        self.after_attn_norm = parts.norm()
        self.mlp = parts.feed_forward(layer)
        self.after_mlp_norm = parts.norm()

    def forward(self, stream: Stream, batch: Batch) -> None:
        stream.add(self.after_attn_norm(self.attn(stream.plain(), batch)))
        stream.add(self.after_mlp_norm(self.mlp(stream.plain())))


class ParallelBlock(nn.Module):
    """GPT-J's: both halves read one norm of the stream, and their results are added together."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self.attn_norm = parts.norm()
        self.attn = parts.attention(layer)
        self.mlp = parts.feed_forward(layer)

    def forward(self, stream: Stream, batch: Batch) -> None:
        x = stream.norm(self.attn_norm).now()
        stream.add(self.attn(x, batch))
        stream.add(self.mlp(x))


class TwoNormParallelBlock(nn.Module):
    """GPT-NeoX's: both halves read the same stream, each through a norm of its own."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self.attn_norm = parts.norm()
        self.attn = parts.attention(layer)
        self.mlp_norm = parts.norm()
        self.mlp = parts.feed_forward(layer)

    def forward(self, stream: Stream, batch: Batch) -> None:
        x = stream.norm(self.mlp_norm).now()
        stream.add(self.attn(stream.norm(self.attn_norm), batch))
        stream.add(self.mlp(x))


class AfterNormBlock(nn.Module):
    """BERT's: after each half, the stream itself is normed."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self.attn = parts.attention(layer)
        self.attn_norm = parts.norm()
        self.mlp = parts.feed_forward(layer)
        self.mlp_norm = parts.norm()

    def forward(self, stream: Stream, batch: Batch) -> None:
        stream.add(self.attn(stream.plain(), batch))
        stream.replace(stream.norm(self.attn_norm))
        stream.add(self.mlp(stream.plain()))
        stream.replace(stream.norm(self.mlp_norm))


class OnePartBlock(nn.Module):
    """Mamba's and Nemotron-H's: one part, which mixes tokens or is a feed-forward block, of the normed stream."""

    def __init__(self, parts: Parts, layer: int) -> None:
        super().__init__()
        self.norm = parts.norm()
        self.mixes = bool(parts.layer(layer).mixers)
        self.part = parts.attention(layer) if self.mixes else parts.feed_forward(layer)

    def forward(self, stream: Stream, batch: Batch) -> None:
        x = stream.norm(self.norm)
        stream.add(self.part(x, batch) if self.mixes else self.part(x))
