"""Rows of GGUF blocks -> float32: what an embedding lookup needs, for a few rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from bough.config.gguf_header import BLOCK_SIZES
from bough.weights.from_gguf import dequantise


def dequantise_rows(kind: str, rows_TB: Tensor) -> Tensor:
    """uint8 [T, bytes of a row] -> float32 [T, weights of a row], on the CPU."""
    num_rows, row_bytes = rows_TB.shape
    per_block, block_bytes = BLOCK_SIZES[kind]
    num_cols = row_bytes // block_bytes * per_block
    blocks = rows_TB.view(num_rows, -1, block_bytes)
    match kind:
        case "Q8_0":
            weights = _half(blocks, 0) * blocks[..., 2:].view(torch.int8)
        case "Q4_0":
            weights = _half(blocks, 0) * (_nibbles(blocks[..., 2:]) - 8)
        case "Q4_1":
            weights = _half(blocks, 0) * _nibbles(blocks[..., 4:]) + _half(blocks, 2)
        case _:
            weights = torch.from_numpy(dequantise(kind, rows_TB.contiguous().numpy()))
    return weights.view(num_rows, num_cols)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [T, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """Low halves of the bytes, then high halves, as int16."""
    return torch.cat((data & 15, data >> 4), dim=-1).to(torch.int16)
