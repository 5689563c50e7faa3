"""Keys and values in whole numbers of 8 or 4 bits, with a scale for every token and head.

A head's vector of D numbers is D codes and one *range*: number = code * step + low. Codes are from 0 to 255 (8 bits), or
from 0 to 15 in half bytes: the low half of byte i is number i, the high half is number i + D / 2. A range is 32 bits: `step`
as bfloat16 in the upper 16, `low` as bfloat16 in the lower 16. Both are rounded such that the range holds all numbers of the
vector, and codes are those of the rounded range.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_STEP = 1e-30
"""A vector whose numbers differ by less is kept as its lowest number."""
_UPPER = -0x10000


class Ranges(NamedTuple):
    """Those of one layer, int32 [pages, page size, kv heads] each."""

    keys: Tensor
    values: Tensor


def code_width(width: int, bits: int) -> int:
    """Bytes of a vector's codes."""
    return width * bits // 8


def bits_of(cache: Tensor, width: int) -> int:
    """Of the codes in a cache of vectors of `width` numbers."""
    return 8 * cache.shape[-1] // width


def encode(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(codes uint8 [..., D * bits / 8], ranges int32 [...]) of vectors [..., D]."""
    x, most = x.float(), (1 << bits) - 1
    lowest = (x.amin(-1) + 0.0).view(torch.int32)  # of two zeros the positive one
    low_bits = torch.where(lowest < 0, lowest + 0xFFFF, lowest) & _UPPER
    low = low_bits.view(torch.float32)
    # By a tensor: a GPU divides by a number of Python's by way of its reciprocal, which rounds twice.
    step_bits = (((x.amax(-1) - low) / low.new_full((), most)).view(torch.int32) + 0xFFFF) & _UPPER
    step_bits = torch.where(step_bits.view(torch.float32) < SMALLEST_STEP, 0, step_bits)
    step = step_bits.view(torch.float32)
    inverse = torch.where(step > 0, 1.0 / step, 0.0)
    codes = ((x - low.unsqueeze(-1)) * inverse.unsqueeze(-1)).round_().clamp_(0, most).to(torch.uint8)
    if bits == 4:
        first, second = codes.chunk(2, -1)
        codes = first | (second << 4)
    return codes, step_bits | ((low_bits >> 16) & 0xFFFF)


def decode(codes: Tensor, ranges: Tensor, width: int) -> Tensor:
    """float32 [..., D]: what `encode` was given, rounded."""
    if codes.shape[-1] != width:
        codes = torch.cat((codes & 15, codes >> 4), -1)
    step, low = (ranges & _UPPER).view(torch.float32), (ranges << 16).view(torch.float32)
    return codes.float() * step.unsqueeze(-1) + low.unsqueeze(-1)


def as_read(x: Tensor, bits: int) -> Tensor:
    """Vectors as they are read from a cache of `bits` bits."""
    return decode(*encode(x, bits), x.shape[-1]).to(x.dtype)
