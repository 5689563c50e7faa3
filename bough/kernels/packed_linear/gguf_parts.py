"""The numbers in GGUF's blocks, taken apart: codes, scales, minima. O rows, D columns, G groups of a row.

A weight is worth (code - offset) * scale + minimum. Kinds of 256 columns have two levels: their scales and minima are small
integers times a float of the whole block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.kernels.packed_linear.reference import bits_of, nibbles_of, six_bits_of
from bough.kernels.packed_linear.weight import FORMATS


@dataclass(frozen=True, slots=True)
class GgufParts:
    """What `take_apart` finds."""

    codes_OD: Tensor
    """uint8"""
    offset: int
    bits: int
    group: int
    """Columns that share a scale."""
    scale_OG: Tensor
    """float16, or small integers (uint8, int8)..."""
    minimum_OG: Tensor | None = None
    """Alike; None: 0."""
    of_blocks_OB: Tensor | None = None
    """...that are multiplied by these float16, one for 256 columns, and minima by the next, with a minus."""
    minimum_of_blocks_OB: Tensor | None = None


def take_apart(kind: str, raw: Tensor, cols: int) -> GgufParts:
    """Of the bytes [O, bytes of a row] of a checkpoint. Kinds of plain floats have no blocks."""
    form, rows = FORMATS[kind], raw.shape[0]
    blocks = raw.reshape(-1, form.block_bytes)

    def of(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[O, ...] from [blocks, ...]."""
        values = values.contiguous() if dtype is None else values.contiguous().view(dtype)
        return values.reshape(rows, -1)

    half = torch.float16
    match kind:
        case "Q4_0":
            return GgufParts(of(nibbles_of(blocks[:, 2:])), 8, 4, 32, of(blocks[:, :2], half))
        case "Q4_1":
            codes = of(nibbles_of(blocks[:, 4:]))
            return GgufParts(codes, 0, 4, 32, of(blocks[:, :2], half), of(blocks[:, 2:4], half))
        case "Q5_0":
            codes = of(nibbles_of(blocks[:, 6:]) | bits_of(blocks[:, 2:6], 8) << 4)
            return GgufParts(codes, 16, 5, 32, of(blocks[:, :2], half))
        case "Q5_1":
            codes = of(nibbles_of(blocks[:, 8:]) | bits_of(blocks[:, 4:8], 8) << 4)
            return GgufParts(codes, 0, 5, 32, of(blocks[:, :2], half), of(blocks[:, 2:4], half))
        case "Q8_0":
            return GgufParts(of(blocks[:, 2:] ^ 128), 128, 8, 32, of(blocks[:, :2], half))
        case "Q4_K":
            codes = of(nibbles_of(blocks[:, 16:].reshape(-1, 4, 32)))
            return _two_levels(blocks, codes, 4, of)
        case "Q5_K":
            low = nibbles_of(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
            shifts = torch.arange(8, dtype=torch.uint8, device=raw.device).view(1, 8, 1)
            return _two_levels(blocks, of(low | ((blocks[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4), 5, of)
        case "Q6_K":
            low = nibbles_of(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
            shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=raw.device).view(1, 1, 4, 1)
            high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
            scale = of(blocks[:, 192:208], torch.int8)
            return GgufParts(of(low | high << 4), 32, 6, 16, scale, of_blocks_OB=of(blocks[:, 208:210], half))
    raise ValueError(f"{kind} has no blocks")


def _two_levels(blocks: Tensor, codes_OD: Tensor, bits: int, of: Callable[..., Tensor]) -> GgufParts:
    """Q4_K and Q5_K: eight scales and eight minima of 6 bits in 12 bytes."""
    scales, minima = six_bits_of(blocks[:, 4:16])
    return GgufParts(
        codes_OD,
        0,
        bits,
        32,
        of(scales),
        of(minima),
        of(blocks[:, :2], torch.float16),
        of(blocks[:, 2:4], torch.float16),
    )
