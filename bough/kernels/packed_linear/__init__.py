"""Matrix products with weights that stay packed in memory: GGUF's low-bit blocks, and plain floats interleaved for SIMD.

in: raw blocks of a checkpoint, activations. out: [T, rows]. never: a dequantised copy of the whole weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bough.kernels import choices
from bough.kernels.choices import Choice, Choices
from bough.kernels.packed_linear.weight import FORMATS, PackedWeight

__all__ = ["PackedWeight", "dequantise", "pack", "packed_linear", "packed_rows", "supported"]

_IMPLEMENTATIONS = Choices(
    Choice("cpu", f"{__name__}.cpu", needs=choices.cpu),
    Choice("reference", f"{__name__}.reference"),
)


def supported(kind: str) -> bool:
    """Whether weights of this kind (GGUF's name for it, say "Q4_K") are smaller if they stay as they are.

    `pack` takes F32 too, which gains speed but no memory.
    """
    return kind in FORMATS and kind != "F32"


def pack(kind: str, raw: Tensor, cols: int) -> PackedWeight:
    """Keeps a weight packed. `raw`: uint8 [rows, bytes of a row], as the checkpoint has them; the result owns its memory."""
    form = FORMATS[kind]
    if cols % form.block:
        raise ValueError(f"a {kind} weight has a multiple of {form.block} columns, not {cols}")
    if raw.dtype != torch.uint8 or raw.dim() != 2 or raw.shape[1] != cols // form.block * form.block_bytes:
        expected = cols // form.block * form.block_bytes
        raise ValueError(f"{kind} rows of {cols} columns take {expected} bytes; got {raw.dtype} {tuple(raw.shape)}")
    packed: PackedWeight = _IMPLEMENTATIONS.pick("pack", raw.device)(kind, raw, cols)
    return packed


def packed_linear(
    x_TD: Tensor, weight: PackedWeight, bias_O: Tensor | None = None, *, exact: bool = False, out: Tensor | None = None
) -> Tensor:
    """x @ weight.T (+ bias), in the dtype of x.

    `exact`: float32 arithmetic on the weights' own values. Otherwise an implementation may round activations to 8 bits with
    a scale for each 32 of them, except a token's few that are far larger than its others.
    `out`: where the result goes, [T, rows] with contiguous rows (a slice of a wider tensor).
    """
    result: Tensor = weight.functions.packed_linear(x_TD, weight, bias_O, exact=exact, out=out)
    return result


def packed_rows(ids_T: Tensor, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """[T, cols]: rows of the weight, dequantised; the embedding lookup of a packed table."""
    result: Tensor = weight.functions.packed_rows(ids_T, weight, dtype)
    return result


def dequantise(weight: PackedWeight) -> Tensor:
    """float32 [rows, cols]."""
    result: Tensor = weight.functions.dequantise(weight)
    return result
