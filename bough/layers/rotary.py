"""Rotary positions: a table of cosines and sines, with the scalings that stretch a context baked in.

Scalings that depend on how long a sequence gets (dynamic, longrope) are settled once, by the longest sequence served: a
cached key is rotated for good, so the choice can't change while a sequence grows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bough.config.rope_facts import RopeFacts
from bough.kernels.rotary import apply_rope, qk_norm_rope
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.norm import RMSNorm


class Rope:
    """Rotates queries and keys by their positions."""

    def __init__(self, facts: RopeFacts, build: Build) -> None:
        self.cos_sin_PR = rope_table(facts, build.context_length, build.device)
        self.interleaved = facts.interleaved
        self.sections = facts.sections
        self.axis_R = axis_of_frequency(facts).repeat(2).to(build.device) if facts.sections else None
        """By column of the table: the axis of a position that it is looked up by; None: positions have one."""

    def at(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What kernels take: each token's line of a table, and the table. If positions have several axes, it is a table of
        this pass, made once for all layers that share this rope."""
        axes_AT, axis_R = batch.axes_AT, self.axis_R
        if axes_AT is None or axis_R is None:
            return batch.positions_T, self.cos_sin_PR
        made = batch.rotary.get(id(self))
        if made is None:
            by_axis_ATR = self.cos_sin_PR[axes_AT]
            table_TR = by_axis_ATR[0]
            for axis in range(1, len(axes_AT)):
                table_TR = torch.where(axis_R == axis, by_axis_ATR[axis], table_TR)
            made = batch.rotary[id(self)] = torch.arange(len(table_TR), device=table_TR.device), table_TR
        return made

    def __call__(self, q_TNH: Tensor, k_TKH: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return apply_rope(q_TNH, k_TKH, *self.at(batch), interleaved=self.interleaved)

    def queries(self, q_TNH: Tensor, norm: RMSNorm | None, positions_T: Tensor) -> Tensor:
        """Norms each head of queries alone (None: not at all), then rotates it. Positions have one axis."""
        none_T0H = q_TNH[:, :0]
        if norm is None:
            return apply_rope(q_TNH, none_T0H, positions_T, self.cos_sin_PR, interleaved=self.interleaved)[0]
        return qk_norm_rope(
            q_TNH,
            none_T0H,
            norm.weight,
            norm.weight,
            norm.eps,
            positions_T,
            self.cos_sin_PR,
            offset=norm.offset,
            interleaved=self.interleaved,
        )[0]

    def after_norms(
        self, q_TNH: Tensor, k_TKH: Tensor, q_norm: RMSNorm, k_norm: RMSNorm, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Norms each head, then rotates."""
        positions_T, cos_sin_PR = self.at(batch)
        return qk_norm_rope(
            q_TNH,
            k_TKH,
            q_norm.weight,
            k_norm.weight,
            q_norm.eps,
            positions_T,
            cos_sin_PR,
            offset=q_norm.offset,
            interleaved=self.interleaved,
        )


def axis_of_frequency(facts: RopeFacts) -> Tensor:
    """int64 [R / 2]: the axis of a position that each frequency turns by."""
    if not facts.sections_take_turns:
        return torch.arange(len(facts.sections)).repeat_interleave(torch.tensor(facts.sections))
    axes = torch.zeros(facts.rotary_dim // 2, dtype=torch.int64)
    count = len(facts.sections)
    for axis in range(1, count):
        axes[axis : count * facts.sections[axis] : count] = axis
    return axes


def rope_table(facts: RopeFacts, num_positions: int, device: torch.device) -> Tensor:
    """float32 [P, R]: cosines of R / 2 frequencies, then their sines."""
    frequencies, magnitude = _FREQUENCIES[facts.kind](facts, num_positions)
    if facts.backwards:
        frequencies = -frequencies
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies.to(device)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(magnitude)


def rope_frequencies(facts: RopeFacts, num_positions: int) -> Tensor:
    """float32 [R / 2]: by how much each pair of a head turns from one position to the next."""
    frequencies = _FREQUENCIES[facts.kind](facts, num_positions)[0]
    return -frequencies if facts.backwards else frequencies


def _wavelengths(facts: RopeFacts, theta: float) -> Tensor:
    """theta ** (2i / R): the distance in tokens over which frequency i turns by one radian."""
    exponents = torch.arange(0, facts.rotary_dim, 2, dtype=torch.float32) / facts.rotary_dim
    return theta**exponents


def _default(facts: RopeFacts, num_positions: int) -> tuple[Tensor, float]:
    return 1.0 / _wavelengths(facts, facts.theta), 1.0


def _linear(facts: RopeFacts, num_positions: int) -> tuple[Tensor, float]:
    return 1.0 / _wavelengths(facts, facts.theta) / facts.factor, 1.0


def _dynamic(facts: RopeFacts, num_positions: int) -> tuple[Tensor, float]:
    stretch = facts.factor * max(num_positions, facts.max_position) / facts.max_position - (facts.factor - 1)
    theta = facts.theta * stretch ** (facts.rotary_dim / (facts.rotary_dim - 2))
    return 1.0 / _wavelengths(facts, theta), 1.0


def _llama3(facts: RopeFacts, num_positions: int) -> tuple[Tensor, float]:
    """Slow frequencies are stretched, fast ones kept, those between blended."""
    frequencies = 1.0 / _wavelengths(facts, facts.theta)
    turns = facts.original_max_position * frequencies / (2 * math.pi)
    keep = (turns - facts.low_freq_factor) / (facts.high_freq_factor - facts.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequencies / facts.factor + keep * frequencies, 1.0


def _yarn(facts: RopeFacts, num_positions: int) -> tuple[Tensor, float]:
    """Frequencies by how often they turn within the trained length: often, kept; seldom, stretched; a ramp between."""
    half = facts.rotary_dim // 2

    def index_of(turns: float) -> float:
        length = facts.original_max_position / (turns * 2 * math.pi)
        return facts.rotary_dim * math.log(length) / (2 * math.log(facts.theta))

    low, high = index_of(facts.beta_fast), index_of(facts.beta_slow)
    if facts.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, facts.rotary_dim - 1)
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0.0, 1.0)
    frequencies = 1.0 / _wavelengths(facts, facts.theta)
    blended = frequencies / facts.factor * ramp + frequencies * (1 - ramp)
    return blended, _yarn_magnitude(facts)


def _yarn_magnitude(facts: RopeFacts) -> float:
    if facts.attention_factor is not None:
        return facts.attention_factor

    def magnitude(weight: float) -> float:
        return 1.0 if facts.factor <= 1 else 0.1 * weight * math.log(facts.factor) + 1.0

    if facts.mscale and facts.mscale_all_dim:
        return magnitude(facts.mscale) / magnitude(facts.mscale_all_dim)
    return magnitude(1.0)


def _longrope(facts: RopeFacts, num_positions: int) -> tuple[Tensor, float]:
    """Divisors found by search: one set for lengths the model was trained on, one for longer ones."""
    divisors = facts.long_factor if num_positions > facts.original_max_position else facts.short_factor
    magnitude = facts.attention_factor
    if magnitude is None:
        stretched = math.log(facts.factor) / math.log(facts.original_max_position) if facts.factor > 1 else 0.0
        magnitude = math.sqrt(1 + stretched)
    return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * _wavelengths(facts, facts.theta)), magnitude


def _proportional(facts: RopeFacts, num_positions: int) -> tuple[Tensor, float]:
    """The fastest pairs turn, the others stand still."""
    turning = int(facts.share * facts.rotary_dim // 2)
    frequencies = 1.0 / _wavelengths(facts, facts.theta) / facts.factor
    frequencies[turning:] = 0.0
    return frequencies, 1.0


_FREQUENCIES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
