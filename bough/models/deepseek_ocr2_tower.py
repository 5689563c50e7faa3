"""The tower of DeepSeek-OCR 2. N squares (tiles, or a whole image), S tokens of each, D width, Q queries, W width of the
language model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.deepseek_ocr2 import NECK_NORM, TILE_QUERIES, WHOLE_QUERIES, OcrVision, QueryFacts, SamFacts
from bough.kernels.rotary import apply_rope
from bough.layers.build import Build
from bough.layers.linear import QKVLinear, ReplicatedLinear
from bough.layers.mlp import GatedMlp, Mlp
from bough.layers.norm import make_norm
from bough.layers.stream import Product
from bough.layers.tower import Learned, Normaliser, PatchEmbedding, Tower, TowerInput, alone


class SamAttention(nn.Module):
    """Attention within squares of patches; what a query adds to a key depends on the rows and columns between them."""

    def __init__(self, facts: SamFacts, side: int, build: Build) -> None:
        """`side`: patches along a side of the largest square."""
        super().__init__()
        hidden, head = facts.block.hidden, facts.block.head_dim
        self.heads = facts.block.num_heads
        self.qkv = ReplicatedLinear(hidden, 3 * hidden, build, bias=facts.block.qkv_bias)
        self.out = ReplicatedLinear(hidden, hidden, build, bias=True)
        self.rows = Learned((2 * side - 1, head), build)
        self.columns = Learned((2 * side - 1, head), build)

    def forward(self, x_NABD: Tensor) -> Tensor:
        count, side = x_NABD.shape[:2]
        q, k, v = self.qkv(x_NABD.flatten(0, 2)).view(count, side * side, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        by_place = q.unflatten(2, (side, side))
        rows = torch.einsum("nhabd,akd->nhabk", by_place, _apart(self.rows.weight, side))
        columns = torch.einsum("nhabd,bkd->nhabk", by_place, _apart(self.columns.weight, side))
        added = (rows[..., :, None] + columns[..., None, :]).flatten(4).flatten(2, 3)
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=added)
        out: Tensor = self.out(read.transpose(1, 2).reshape(count * side * side, -1))
        return out.view(x_NABD.shape)


def _apart(table_LH: Tensor, side: int) -> Tensor:
    """[side, side, H]: for a query and a key along an axis, the table's line of how far they are apart; the table is
    stretched to the lines that there are."""
    lines = 2 * side - 1
    if len(table_LH) != lines:
        stretched = F.interpolate(table_LH.float().T[None], size=lines, mode="linear")
        table_LH = stretched[0].T.to(table_LH.dtype)
    place = torch.arange(side, device=table_LH.device)
    return table_LH[place[:, None] - place + side - 1]


class SamBlock(nn.Module):
    """Attention within windows, or all of a square, then a feed-forward block, each of the normed stream."""

    def __init__(self, facts: SamFacts, number: int, build: Build) -> None:
        super().__init__()
        self.window = 0 if number in facts.full else facts.window
        self.attn_norm = make_norm(facts.block.norm, facts.block.hidden, build)
        self.attn = SamAttention(facts, self.window or facts.side, build)
        self.mlp_norm = make_norm(facts.block.norm, facts.block.hidden, build)
        self.mlp = Mlp(facts.block.mlp, facts.block.hidden, build)

    def forward(self, x_NABD: Tensor) -> Tensor:
        normed = self.attn_norm(x_NABD)
        x_NABD = x_NABD + (self._in_windows(normed) if self.window else self.attn(normed))
        added: Product = self.mlp(self.mlp_norm(x_NABD).flatten(0, 2))
        return x_NABD + added.value().view(x_NABD.shape)

    def _in_windows(self, x_NABD: Tensor) -> Tensor:
        """Windows at the edges are filled up with zeros, which are seen as other tokens are."""
        count, side, _, width = x_NABD.shape
        window, along = self.window, -(-side // self.window)
        missing = along * window - side
        whole = F.pad(x_NABD, (0, 0, 0, missing, 0, missing))
        cut = whole.view(count, along, window, along, window, width).transpose(2, 3)
        read: Tensor = self.attn(cut.reshape(-1, window, window, width))
        return read.view(cut.shape).transpose(2, 3).reshape(whole.shape)[:, :side, :side]


class Sam(nn.Module):
    """From pixels to a sixteenth of the patches."""

    def __init__(self, facts: SamFacts, build: Build) -> None:
        super().__init__()
        hidden, neck, (first, last) = facts.block.hidden, facts.neck, facts.channels
        self.facts = facts
        self.patches = PatchEmbedding((3, facts.patch, facts.patch), hidden, build, bias=True)
        self.positions = Learned((facts.side, facts.side, hidden), build)
        self.blocks = nn.ModuleList(SamBlock(facts, number, build) for number in range(facts.depth))
        self.neck = nn.ModuleList(
            [
                Learned((neck, hidden, 1, 1), build),
                make_norm(NECK_NORM, neck, build),
                Learned((neck, neck, 3, 3), build),
                make_norm(NECK_NORM, neck, build),
            ]
        )
        """By the numbers that checkpoints give them: convolutions, each with its norm."""
        self.shrink_first = Learned((first, neck, 3, 3), build)
        self.shrink_last = Learned((last, first, 3, 3), build)

    def forward(self, values: Tensor) -> Tensor:
        """float32 [N, edge, edge, 3] -> [N, S, D], row after row."""
        patch, (count, edge) = self.facts.patch, values.shape[:2]
        side = edge // patch
        cut = values.view(count, side, patch, side, patch, 3).permute(0, 1, 3, 5, 2, 4)
        x_NABD = self.patches(cut.reshape(count * side * side, -1)).view(count, side, side, -1) + self._places(side)
        for block in self.blocks:
            x_NABD = block(x_NABD)
        narrow, narrow_norm, mix, mix_norm = self.neck
        x = _normed(F.conv2d(x_NABD.permute(0, 3, 1, 2), narrow.weight), narrow_norm)  # type: ignore[arg-type]
        x = _normed(F.conv2d(x, mix.weight, padding=1), mix_norm)  # type: ignore[arg-type]
        for shrink in (self.shrink_first, self.shrink_last):
            x = F.conv2d(x, shrink.weight, stride=2, padding=1)
        return x.flatten(2).transpose(1, 2)

    def _places(self, side: int) -> Tensor:
        table = self.positions.weight
        if len(table) == side:
            return table
        grid = table.float().permute(2, 0, 1)[None]
        fitted = F.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False, antialias=True)
        return fitted[0].permute(1, 2, 0).to(table.dtype)


def _normed(x_NCAB: Tensor, norm: nn.Module) -> Tensor:
    out: Tensor = norm(x_NCAB.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return out


class QueryBlock(nn.Module):
    """Qwen2's, over squares of equal length."""

    def __init__(self, facts: QueryFacts, build: Build) -> None:
        super().__init__()
        shape = (facts.num_heads, facts.num_kv_heads, facts.head_dim)
        self.attn_norm = make_norm(facts.norm, facts.hidden, build)
        self.qkv = QKVLinear(facts.hidden, *shape, build, bias=True)
        self.out = ReplicatedLinear(facts.num_heads * facts.head_dim, facts.hidden, build)
        self.mlp_norm = make_norm(facts.norm, facts.hidden, build)
        self.mlp = GatedMlp(facts.mlp, facts.hidden, build)

    def forward(self, x_TD: Tensor, places_T: Tensor, cos_sin_SR: Tensor, sees_SS: Tensor) -> Tensor:
        q_TNH, k_TKH, v_TKH = self.qkv(self.attn_norm(x_TD))
        q_TNH, k_TKH = apply_rope(q_TNH, k_TKH, places_T, cos_sin_SR)
        q, k, v = (each.unflatten(0, (-1, len(sees_SS))).transpose(1, 2) for each in (q_TNH, k_TKH, v_TKH))
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=sees_SS, enable_gqa=True)
        x_TD = x_TD + self.out(read.transpose(1, 2).reshape(len(x_TD), -1))
        added: Product = self.mlp(self.mlp_norm(x_TD))
        return x_TD + added.value()


class QueryEncoder(nn.Module):
    """Tokens of a square see one another; queries behind them see those, and the queries before."""

    def __init__(self, facts: QueryFacts, build: Build) -> None:
        super().__init__()
        self.facts = facts
        self.blocks = nn.ModuleList(QueryBlock(facts, build) for _ in range(facts.depth))
        self.norm = make_norm(facts.norm, facts.hidden, build)
        self.of_tile = Learned((TILE_QUERIES, facts.hidden), build)
        self.of_whole = Learned((WHOLE_QUERIES, facts.hidden), build)

    def forward(self, x_NSD: Tensor) -> Tensor:
        """[N, Q, D]"""
        count, length, _ = x_NSD.shape
        queries_QD = (self.of_tile if length <= TILE_QUERIES else self.of_whole).weight
        x_NSD = torch.cat([x_NSD, queries_QD.expand(count, -1, -1)], 1)
        place = torch.arange(x_NSD.shape[1], device=x_NSD.device)
        sees_SS = (place <= place[:, None]) | (place < length)
        half = self.facts.head_dim // 2
        frequencies = self.facts.theta ** -(torch.arange(half, device=place.device, dtype=torch.float32) / half)
        angles_SF = place[:, None] * frequencies
        cos_sin_SR = torch.cat((angles_SF.cos(), angles_SF.sin()), -1)
        x_TD, places_T = x_NSD.flatten(0, 1), place.repeat(count)
        for block in self.blocks:
            x_TD = block(x_TD, places_T, cos_sin_SR, sees_SS)
        return self.norm(x_TD).view(x_NSD.shape)[:, length:]  # type: ignore[no-any-return]


class Ocr2Tower(Tower):
    """An item's features are pixels [all of its squares, 3]: tiles, then the whole image. Its grid is the number of tiles
    and the whole image's edge."""

    def __init__(self, facts: OcrVision, build: Build) -> None:
        super().__init__()
        build = alone(build)
        self.facts = facts
        self.width = facts.out
        self.normalise = Normaliser(facts.image.mean, facts.image.std, facts.image.rescale, build)
        self.sam = Sam(facts.sam, build)
        self.queries = QueryEncoder(facts.queries, build)
        self.project = ReplicatedLinear(facts.queries.hidden, facts.out, build, bias=True)
        self.separator = Learned((facts.out,), build)

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        made = []
        for pixels, (tiles, edge) in items:
            tile = self.facts.tile
            split = tiles * tile * tile
            if tiles:
                made.append(self._seen(pixels[:split].view(tiles, tile, tile, 3)))
            made += [self._seen(pixels[split:].view(1, edge, edge, 3)), self.separator.weight[None]]
        return torch.cat(made)

    def _seen(self, pixels: Tensor) -> Tensor:
        """[positions of all squares, W]"""
        x_NQD = self.queries(self.sam(self.normalise(pixels)))
        out: Tensor = self.project(x_NQD.flatten(0, 1))
        return out
