"""The towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL. T patches, D width, M merged patches (positions of the prompt)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.model_facts import NormFacts
from bough.layers.build import Build
from bough.layers.embedding import Table
from bough.layers.linear import ReplicatedLinear
from bough.layers.norm import make_norm
from bough.layers.tower import Normaliser, PatchEmbedding, Tower, TowerBlock, TowerInput, alone
from bough.memory.transfer import upload
from bough.models.qwen_vision import QwenVision


class Merger(nn.Module):
    """Neighbouring patches together become one position of the language model."""

    def __init__(self, hidden: int, merge: int, out: int, norm: NormFacts, build: Build, *, norm_merged: bool) -> None:
        """`hidden`, `out`: widths of a patch and of the language model; `merge`: patches along a side of a position;
        `norm_merged`: the norm is over all patches of a position, not over each."""
        super().__init__()
        self.width = hidden * merge**2
        self.norm_width = self.width if norm_merged else hidden
        self.norm = make_norm(norm, self.norm_width, build)
        up = ReplicatedLinear(self.width, self.width, build, bias=True)
        down = ReplicatedLinear(self.width, out, build, bias=True)
        self.mlp = nn.ModuleDict({"0": up, "2": down})
        """By the numbers that most checkpoints give them."""

    def forward(self, x_TD: Tensor) -> Tensor:
        """[M, width of the language model]"""
        x_MF = self.norm(x_TD.reshape(-1, self.norm_width)).view(-1, self.width)
        out_MD: Tensor = self.mlp["2"](F.gelu(self.mlp["0"](x_MF)))
        return out_MD


class TowerPlan(NamedTuple):
    """How the patches of a step's items are computed."""

    cos_sin_TR: Tensor
    lengths: list[int]
    """Of images (frames), which see one another..."""
    window_lengths: list[int]
    """...and of the windows that they are cut into."""
    order_M: Tensor | None
    """The order in which positions are computed, if it is another than the prompt's."""


_KEPT_PLANS = 8
_KEPT_PATCHES = 16_384
"""Plans of at most this number of patches are kept: 5 MB each with heads of 80 values."""


class PatchPlans:
    """Plans of the last steps: images often have the shapes of earlier ones, and the device waits while a plan is made."""

    def __init__(self, facts: QwenVision, device: torch.device) -> None:
        self._facts = facts
        self._device = device
        self._kept: dict[tuple[tuple[int, ...], ...], TowerPlan] = {}
        """By the grids of a step's items, those that were used last at the end."""

    def of(self, grids: Sequence[tuple[int, ...]]) -> TowerPlan:
        """As `plan_patches`."""
        key = tuple(grids)
        plan = self._kept.pop(key, None) or plan_patches(key, self._facts, self._device)
        if len(plan.cos_sin_TR) <= _KEPT_PATCHES:
            self._kept[key] = plan
            if len(self._kept) > _KEPT_PLANS:
                del self._kept[next(iter(self._kept))]
        return plan


class QwenTower(Tower):
    """A vision transformer over images of their own shapes."""

    def __init__(self, facts: QwenVision, build: Build) -> None:
        super().__init__()
        build = alone(build)
        self.facts = facts
        self.width = facts.out * (1 + len(facts.deep))
        self.device = build.device
        self.normalise = Normaliser(facts.image.mean, facts.image.std, facts.image.rescale, build)
        self.patches = PatchEmbedding(facts.kernel, facts.block.hidden, build, bias=facts.patch_bias)
        self.positions = Table(facts.grid_side**2, facts.block.hidden, build) if facts.grid_side else None
        self.blocks = nn.ModuleList(TowerBlock(facts.block, build) for _ in range(facts.depth))
        shapes = (facts.block.hidden, facts.merge, facts.out, facts.merger_norm, build)
        self.merger = Merger(*shapes, norm_merged=False)
        self.deep_mergers = nn.ModuleList(Merger(*shapes, norm_merged=True) for _ in facts.deep)
        self.plans = PatchPlans(facts, self.device)

    def forward(self, items: Sequence[TowerInput]) -> Tensor:
        facts, grids = self.facts, [item.grid[:3] for item in items]
        x_TD = self.patches(torch.cat([self._cut(item.features) for item in items]))
        if self.positions is not None:
            x_TD = x_TD + torch.cat([self._learned_positions(h, w).repeat(t, 1) for t, h, w in grids])
        plan = self.plans.of(grids)
        merge = facts.merge**2
        if plan.order_M is not None:
            x_TD = x_TD.view(-1, merge, facts.block.hidden)[plan.order_M].view(-1, facts.block.hidden)
        deep: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            windowed = facts.window and number not in facts.full
            x_TD = block(x_TD, plan.window_lengths if windowed else plan.lengths, plan.cos_sin_TR)
            if number in facts.deep:
                deep.append(self.deep_mergers[facts.deep.index(number)](x_TD))
        out_MW = torch.cat([self.merger(x_TD), *deep], dim=-1)
        if plan.order_M is None:
            return out_MW
        restored_MW = torch.empty_like(out_MW)
        restored_MW[plan.order_M] = out_MW
        return restored_MW

    def _cut(self, pixels: Tensor) -> Tensor:
        """uint8 [frames, height, width, 3] -> float32 patches [T, values], those of a position next to one another."""
        facts = self.facts
        values = self.normalise(pixels)
        return cut_patches(values, patch=facts.patch, merge=facts.merge, temporal=facts.temporal)

    def _learned_positions(self, h: int, w: int) -> Tensor:
        """[patches of a frame, D]: the grid of learned positions, stretched over `h x w` patches."""
        assert self.positions is not None, "the family has learned positions"
        table, side, merge = self.positions.weight, self.facts.grid_side, self.facts.merge
        total = torch.zeros(h * w, table.shape[1], dtype=torch.float32, device=table.device)
        row_taps, column_taps = taps(h, side, table.device), taps(w, side, table.device)
        for row, row_weight in row_taps:
            for column, column_weight in column_taps:
                index = by_position(row[:, None] * side + column, merge)
                weight = by_position(row_weight[:, None] * column_weight, merge)
                total = total + table[index] * weight[:, None]
        return total.to(table.dtype)


def cut_patches(values: Tensor, *, patch: int, merge: int, temporal: int) -> Tensor:
    """float32 [frames, height, width, channels] -> patches [T, values], those of a position next to one another."""
    p, m, t = patch, merge, temporal
    if values.shape[0] % t:
        values = torch.cat([values, values[-1:].expand(t - values.shape[0] % t, -1, -1, -1)])
    frames, height, width, channels = values.shape
    h, w = height // p, width // p
    cut = values.view(frames // t, t, h // m, m, p, w // m, m, p, channels)
    return cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(frames // t * h * w, -1)


def plan_patches(grids: Sequence[tuple[int, ...]], facts: QwenVision, device: torch.device) -> TowerPlan:
    """How patches of these grids are computed. Queues device work only."""
    merge = facts.merge
    places, lengths, window_lengths, orders = [], [], [], []
    start = 0
    for t, h, w in grids:
        rows, columns = np.divmod(np.arange(h * w).reshape(h // merge, merge, w // merge, merge), w)
        place_P2 = np.stack([rows, columns], -1).transpose(0, 2, 1, 3, 4).reshape(-1, 2)
        places.append(np.tile(place_P2, (t, 1)))
        lengths += [h * w] * t
        if facts.window:
            order, sizes = windows(h // merge, w // merge, facts.window // merge)
            for _ in range(t):
                orders.append(order + start)
                window_lengths += [size * merge**2 for size in sizes]
                start += len(order)
    places_T2 = np.concatenate(places).astype(np.float32)
    order_M = None
    if facts.window:
        order = np.concatenate(orders)
        places_T2 = places_T2.reshape(-1, merge**2, 2)[order].reshape(-1, 2)
        order_M = upload(order, device)
    half = facts.block.head_dim // 2
    frequencies = 1.0 / facts.theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
    angles_TF = (upload(places_T2, device)[..., None] * upload(frequencies.numpy(), device)).flatten(1)
    cos_sin_TR = torch.cat((angles_TF.cos(), angles_TF.sin()), -1)
    return TowerPlan(cos_sin_TR, lengths, window_lengths, order_M)


def windows(h: int, w: int, side: int) -> tuple[npt.NDArray[np.int64], list[int]]:
    """The order of `h x w` positions in which those of a window lie together, and the windows' sizes. Equal ones follow one
    another, so that they can be computed together: nothing depends on the windows' order."""
    row, column = np.divmod(np.arange(h * w), w)
    across = -(-w // side)
    window = row // side * across + column // side
    sizes = np.bincount(window)
    order = np.lexsort((window, -sizes[window]))
    return order, sorted(sizes.tolist(), reverse=True)


def taps(size: int, side: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Where `size` places fall among `side` learned ones, from end to end: the neighbours on both sides, and how much each
    counts."""
    at = torch.arange(size, dtype=torch.float32, device=device) * (side - 1) / max(size - 1, 1)
    low = at.floor().long()
    part = at - low
    return [(low, 1 - part), ((low + 1).clamp(max=side - 1), part)]


def by_position(grid_HW: Tensor, merge: int) -> Tensor:
    """[patches]: a grid's values in the order of patches, those of a position next to one another."""
    h, w = grid_HW.shape
    return grid_HW.reshape(h // merge, merge, w // merge, merge).transpose(1, 2).flatten()
