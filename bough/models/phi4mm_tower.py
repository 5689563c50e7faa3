"""The towers of Phi-4-multimodal: SigLIP over tiles of an image, and a conformer over sound.

T tokens, D width of a tower, N heads, H width of a head, M positions, W width of the language model, L frames of a spectrum,
C bands.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.phi4mm import BESIDE_IMAGES, CHUNK, NORM, POOL, ConformerFacts, Phi4Facts
from bough.kernels.segment_attention import attend_segments
from bough.layers.build import Build
from bough.layers.linear import QKVLinear, ReplicatedLinear
from bough.layers.norm import fill, make_norm
from bough.layers.stream import Product
from bough.layers.tower import Learned, PatchEmbedding, Tower, TowerBlock, TowerInput, alone
from bough.layers.vit import Vit, nearest_places
from bough.weights.slots import Slot

_AT_ONCE: Final = 64
"""Tokens of a sound whose spectrum is shrunk together: inside, each is as wide as thousands of values."""


class Phi4Tower(Tower):
    """An image's features are its pixels on a canvas of whole tiles, its grid says how many rows and columns of tiles there
    are, and of patches that are not empty. A sound's are frames of its spectrum, its grid their number, and whether it is
    alone (`config.phi4mm`)."""

    def __init__(self, facts: Phi4Facts, build: Build) -> None:
        super().__init__()
        build = alone(build)
        self.facts, self.width = facts, facts.out
        self.vit = Vit(facts.vit, build)
        hidden = facts.vit.block.hidden
        self.row_mark = Learned((1, 1, 1, hidden), build)
        self.whole_mark = Learned((1, 1, hidden), build)
        self.see = TwoSteps(hidden, facts.out, build)
        self.ear = Conformer(facts.hearing, build)
        self.hear_alone = TwoSteps(facts.hearing.hidden, facts.out, build)
        self.hear_seeing = TwoSteps(facts.hearing.hidden, facts.out, build)

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        seen = iter(self._seen([item for item in items if len(item.grid) > 2]))
        return torch.cat([next(seen) if len(item.grid) > 2 else self._heard(item) for item in items])

    def _heard(self, item: TowerInput) -> Tensor:
        project = self.hear_seeing if item.grid[1] == BESIDE_IMAGES else self.hear_alone
        out_MW: Tensor = project(self.ear(item.features[: item.grid[0]]))
        return out_MW

    def _seen(self, items: Sequence[TowerInput]) -> list[Tensor]:
        """[M, W] of each image."""
        if not items:
            return []
        tiles = [tile for item in items for tile in self._tiles(item)]
        # Tiles without an edge are computed together, those with one by one.
        order = sorted(range(len(tiles)), key=lambda at: tiles[at].length > tiles[at].valid)
        x_TD = torch.cat([tiles[at].tokens_TD for at in order])
        ordered = [tiles[at] for at in order]
        blocks = self.vit.blocks[: self.facts.vit.used]
        for block in blocks:
            assert isinstance(block, TowerBlock)
            x_TD = _through(block, x_TD, ordered)
        parts = torch.split(x_TD, [tile.length for tile in ordered])
        pooled = dict(zip(order, (_pooled(*each) for each in zip(parts, ordered, strict=True)), strict=True))
        made, at = [], 0
        for item in items:
            rows, columns = item.grid[:2]
            whole, cut = pooled[at], [pooled[at + 1 + number] for number in range(rows * columns)]
            made.append(self._joined(whole, cut, columns))
            at += 1 + rows * columns
        joined = torch.split(self.see(torch.cat(made)), [len(each) for each in made])
        return list(joined)

    def _joined(self, whole: Tensor, tiles: Sequence[Tensor], columns: int) -> Tensor:
        """[M, D]: the tiles as one image, then a mark, then the whole image; a mark ends each row."""
        rows = [
            torch.cat(list(tiles[at : at + columns]), 1) for at in range(0, len(tiles), columns) if tiles[at].numel()
        ]
        return torch.cat([self._marked(torch.cat(rows)), self.whole_mark.weight.view(1, -1), self._marked(whole)])

    def _marked(self, grid: Tensor) -> Tensor:
        marks = self.row_mark.weight.view(1, 1, -1).expand(grid.shape[0], 1, -1)
        return torch.cat([grid, marks], 1).flatten(0, 1)

    def _tiles(self, item: TowerInput) -> list[PictureTile]:
        """The whole image, then its tiles row after row."""
        side, edge = self.facts.vit.side, self.facts.tile
        rows, columns, high, wide = item.grid
        canvas = self.vit.normalise(item.features).permute(2, 0, 1)
        whole = F.interpolate(canvas[None], (edge, edge), mode="bicubic")[0]
        made = [self._tile(whole, side, side)]
        for row in range(rows):
            for column in range(columns):
                cut = canvas[:, row * edge : (row + 1) * edge, column * edge : (column + 1) * edge]
                made.append(self._tile(cut, _left(high, row, side), _left(wide, column, side)))
        return made

    def _tile(self, pixels: Tensor, high: int, wide: int) -> PictureTile:
        """`high`, `wide`: rows and columns of patches that are not empty. Empty ones are left out, but for those that a
        square of neighbours needs: they see the others, and are not seen."""
        facts, device = self.facts.vit, pixels.device
        if not high or not wide:
            return PictureTile(self.row_mark.weight.new_empty(0, facts.block.hidden), 0, 0, 0, torch.empty(0))
        rows, columns = -(-high // POOL) * POOL, -(-wide // POOL) * POOL
        cut = pixels[:, : rows * facts.patch, : columns * facts.patch]
        patches = cut.reshape(-1, rows, facts.patch, columns, facts.patch).permute(1, 3, 0, 2, 4).flatten(2)
        places = torch.zeros(rows, columns, dtype=torch.int64, device=device)
        places[:high, :wide] = nearest_places(high, wide, facts.side, device, by_step=True)
        tokens = self.vit.patches(patches.flatten(0, 1)) + self.vit.positions.weight[places.flatten()]
        if rows * columns == high * wide:
            return PictureTile(tokens, high * wide, rows, columns, None)
        empty = torch.ones(rows, columns, dtype=torch.int8, device=device)
        empty[:high, :wide].zero_()
        order = empty.flatten().argsort(stable=True)
        return PictureTile(tokens[order], high * wide, rows, columns, order)


class TwoSteps(nn.Module):
    """Linear, activation, linear."""

    def __init__(self, inner: int, out: int, build: Build) -> None:
        super().__init__()
        self.steps = nn.ModuleDict(
            {"0": ReplicatedLinear(inner, out, build, bias=True), "2": ReplicatedLinear(out, out, build, bias=True)}
        )
        """By the numbers that the original checkpoint gives them."""

    def forward(self, x_MD: Tensor) -> Tensor:
        out_MW: Tensor = self.steps["2"](F.gelu(self.steps["0"](x_MD)))
        return out_MW


class PictureTile(NamedTuple):
    """Patches of a tile, those that are not empty first."""

    tokens_TD: Tensor
    valid: int
    """Patches that are seen."""
    rows: int
    columns: int
    order_T: Tensor | None
    """The place of each in the tile, row after row; None: they are in order."""

    @property
    def length(self) -> int:
        return len(self.tokens_TD)


def _left(total: int, number: int, side: int) -> int:
    """Patches that a tile has along a side."""
    return max(0, min(side, total - number * side))


def _through(block: TowerBlock, x_TD: Tensor, tiles: Sequence[PictureTile]) -> Tensor:
    """A block of the tower, over tiles of which those with an edge come last."""
    q_TNH, k_TNH, v_TNH = block.attn.qkv(block.attn_norm(x_TD))
    lengths = [tile.length for tile in tiles if tile.length == tile.valid]
    at, scale = sum(lengths), block.attn.scale
    read = [attend_segments(q_TNH[:at], k_TNH[:at], v_TNH[:at], [each for each in lengths if each], scale)]
    for tile in tiles[len(lengths) :]:
        q_NTH, k_NSH, v_NSH = (
            each[at : at + count].transpose(0, 1)
            for each, count in ((q_TNH, tile.length), (k_TNH, tile.valid), (v_TNH, tile.valid))
        )
        made = F.scaled_dot_product_attention(q_NTH[None], k_NSH[None], v_NSH[None], scale=scale)[0]
        read.append(made.transpose(0, 1).flatten(1))
        at += tile.length
    normed_TD, x_TD = block.mlp_norm.add(block.attn.out.product(torch.cat(read)), x_TD)
    product: Product = block.mlp(normed_TD)
    return x_TD + product.value()


def _pooled(x_TD: Tensor, tile: PictureTile) -> Tensor:
    """[rows / 2, columns / 2, D]: means of squares."""
    if not tile.length:
        return x_TD.new_empty(0, 0, x_TD.shape[1])
    if tile.order_T is not None:
        x_TD = torch.empty_like(x_TD).index_copy_(0, tile.order_T, x_TD)
    grid = x_TD.view(tile.rows, tile.columns, -1).permute(2, 0, 1)
    return F.avg_pool2d(grid[None], POOL)[0].permute(1, 2, 0)


class ConvWeights(nn.Module):
    """The weight and bias of a convolution."""

    def __init__(self, shape: tuple[int, ...], build: Build) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=build.dtype, device=build.device), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(shape[0], dtype=build.dtype, device=build.device), requires_grad=False)

    def slots(self) -> dict[str, Slot]:
        named = {"weight": self.weight, "bias": self.bias}
        return {name: Slot(tuple(each.shape), partial(fill, each)) for name, each in named.items()}


class HalvedForward(nn.Module):
    """Half of down(up(x) * silu(gate(x))), of the normed stream."""

    def __init__(self, facts: ConformerFacts, build: Build) -> None:
        super().__init__()
        self.norm = make_norm(NORM, facts.hidden, build)
        self.up_gate = ReplicatedLinear(facts.hidden, 2 * facts.intermediate, build, bias=True)
        self.down = ReplicatedLinear(facts.intermediate, facts.hidden, build, bias=True)

    def forward(self, x_TD: Tensor) -> Tensor:
        up_TF, gate_TF = self.up_gate(self.norm(x_TD)).chunk(2, -1)
        out_TD: Tensor = self.down(up_TF * F.silu(gate_TF))
        return out_TD * 0.5


class SoundConvolution(nn.Module):
    """Gated values of a token and of a few before it, each channel by itself, then all channels."""

    def __init__(self, facts: ConformerFacts, build: Build) -> None:
        super().__init__()
        hidden, wide = facts.hidden, facts.hidden * facts.multiplier
        self.kernel = facts.kernel
        self.norm = make_norm(NORM, hidden, build)
        self.gates = PatchEmbedding((hidden, 1), 2 * hidden, build, bias=True)
        self.value_bias = Learned((1, hidden, 1), build)
        self.gate_bias = Learned((1, hidden, 1), build)
        self.along = ConvWeights((wide, 1, facts.kernel), build)
        self.across = PatchEmbedding((wide, 1), hidden, build, bias=True)
        self.out = PatchEmbedding((hidden, 1), hidden, build, bias=True)

    def forward(self, x_TD: Tensor, length: int) -> Tensor:
        """Of chunks of `length` tokens, which see nothing of one another."""
        value_TD, gate_TD = self.gates(self.norm(x_TD)).chunk(2, -1)
        value_TD = value_TD + self.value_bias.weight.view(-1)
        value_TD = value_TD * F.silu(gate_TD + self.gate_bias.weight.view(-1))
        chunks = F.pad(value_TD.view(-1, length, value_TD.shape[1]).transpose(1, 2), (self.kernel - 1, 0))
        made = F.conv1d(chunks, self.along.weight, self.along.bias, groups=value_TD.shape[1])
        out_TD: Tensor = self.out(F.silu(self.across(made.transpose(1, 2).flatten(0, 1))))
        return out_TD


class SpeechBlock(nn.Module):
    def __init__(self, facts: ConformerFacts, build: Build) -> None:
        super().__init__()
        hidden, heads = facts.hidden, facts.num_heads
        self.before = HalvedForward(facts, build)
        self.attn_norm = make_norm(NORM, hidden, build)
        self.qkv = QKVLinear(hidden, heads, heads, hidden // heads, build, bias=True)
        self.out = ReplicatedLinear(hidden, hidden, build, bias=True)
        self.conv = SoundConvolution(facts, build)
        self.behind = HalvedForward(facts, build)
        self.norm = make_norm(NORM, hidden, build)

    def forward(self, x_TD: Tensor, bias_NSS: Tensor) -> Tensor:
        """`bias_NSS`: what is added to the scores of a chunk."""
        length = bias_NSS.shape[-1]
        x_TD = x_TD + self.before(x_TD)
        q, k, v = (
            each.view(-1, length, *each.shape[1:]).transpose(1, 2) for each in self.qkv(self.attn_norm(x_TD))
        )  # fmt: skip
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=bias_NSS)
        x_TD = x_TD + self.out(read.transpose(1, 2).reshape(len(x_TD), -1))
        x_TD = x_TD + self.conv(x_TD, length)
        x_TD = x_TD + self.behind(x_TD)
        out_TD: Tensor = self.norm(x_TD)
        return out_TD


class Conformer(nn.Module):
    """Of one sound. Tokens of a long one see those of their chunk; the last chunk is filled up with zeros, which count, as
    they did in training."""

    def __init__(self, facts: ConformerFacts, build: Build) -> None:
        super().__init__()
        self.facts = facts
        channels = facts.channels
        self.mean = Learned((facts.mels,), build)
        self.inverse = Learned((facts.mels,), build)
        self.shrink = nn.ModuleDict({"0": ConvWeights((channels, 1, 3, 3), build)})
        """By the numbers that checkpoints give them."""
        for number in range(1, facts.shrinks):
            self.shrink[str(3 * number - 1)] = ConvWeights((channels, 1, 3, 3), build)
            self.shrink[str(3 * number)] = ConvWeights((channels, channels, 1, 1), build)
        self.out = ReplicatedLinear(channels * facts.bands, facts.hidden, build, bias=True)
        self.bias = Learned((2 * facts.distances, facts.num_heads), build)
        self.blocks = nn.ModuleList(SpeechBlock(facts, build) for _ in range(facts.depth))

    def forward(self, features_LC: Tensor) -> Tensor:
        x_TD = self._begin(features_LC.to(self.mean.weight.dtype))
        count = len(x_TD)
        length = min(count, CHUNK)
        x_TD = F.pad(x_TD, (0, 0, 0, -count % length))
        bias_NSS = self._bias(length)
        for block in self.blocks:
            x_TD = block(x_TD, bias_NSS)
        return x_TD[:count]

    def _begin(self, features_LC: Tensor) -> Tensor:
        """[T, D]. Pieces overlap by what a token sees of the frames before its own."""
        per_token = self.facts.frames_per_token
        normed_LC = (features_LC - self.mean.weight) * self.inverse.weight
        made = []
        for first in range(0, self.facts.tokens(len(features_LC)), _AT_ONCE):
            before = min(first, 1)
            piece = normed_LC[(first - before) * per_token : (first + _AT_ONCE) * per_token]
            made.append(self._shrunk(piece)[before:])
        return torch.cat(made)

    def _shrunk(self, x_LC: Tensor) -> Tensor:
        x = x_LC[None, None]
        channels = self.facts.channels
        for name, conv in self.shrink.items():
            assert isinstance(conv, ConvWeights)
            wide = conv.weight.shape[-1] == 3
            groups = channels if wide and name != "0" else 1
            x = F.conv2d(x, conv.weight, conv.bias, 2 if wide else 1, 1 if wide else 0, groups=groups)
            if not wide or name == "0":
                x = F.relu(x)
        out_TD: Tensor = self.out(x[0].transpose(0, 1).flatten(1))
        return out_TD

    def _bias(self, length: int) -> Tensor:
        """[N, S, S]: by how far a token stands behind the one that looks."""
        most, device = self.facts.distances, self.bias.weight.device
        places = torch.arange(length, device=device)
        apart = (places[None, :] - places[:, None]).clamp(-most, most - 1)
        return self.bias.weight[apart + most].permute(2, 0, 1)
