"""Matrix products with weights that stay packed in memory: GGUF's low-bit blocks, plain floats interleaved for SIMD, and the
codes and scales of any other quantised checkpoint.

in: raw blocks of a GGUF file or `Codes`, activations. out: [T, rows]. never: a name of a checkpoint's format.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bough.config.gguf_header import KEPT_BITS
from bough.kernels import choices
from bough.kernels.choices import Choice, Choices
from bough.kernels.packed_linear.codes import Codes, Inputs
from bough.kernels.packed_linear.weight import FORMATS, PackedWeight

__all__ = [
    "Codes",
    "Inputs",
    "PackedWeight",
    "dequantise",
    "keeps_blocks",
    "pack",
    "pack_codes",
    "packed_linear",
    "packed_rows",
    "supported",
]

_CPU = torch.device("cpu")
_IMPLEMENTATIONS = Choices(
    Choice("triton", f"{__name__}.triton", needs=choices.cuda()),
    Choice("cpu", f"{__name__}.cpu", needs=choices.cpu),
    Choice("reference", f"{__name__}.reference"),
)


def supported(kind: str, device: torch.device = _CPU) -> bool:
    """Whether weights of this kind (GGUF's name for it, say "Q4_K") are smaller on a device if they stay as they are.

    `pack` takes F32 too, which gains speed but no memory. On a GPU, floats of 16 bits are plain weights.
    """
    return kind in KEPT_BITS or (kind in ("F16", "BF16") and device.type == "cpu")


def keeps_blocks(device: torch.device) -> bool:
    """Whether GGUF's blocks are multiplied quickly as they are on this device: there are kernels compiled for it."""
    return _IMPLEMENTATIONS.explain("pack", device)[0] != "reference"


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


def pack_codes(codes: Codes) -> PackedWeight:
    """Keeps a quantised weight packed, on the device where its codes are; the result owns its memory."""
    packed: PackedWeight = _IMPLEMENTATIONS.pick("pack_codes", codes.values_OD.device)(codes)
    return packed


def packed_linear(
    x_TD: Tensor, weight: PackedWeight, bias_O: Tensor | None = None, *, exact: bool = False, out: Tensor | None = None
) -> Tensor:
    """x @ weight.T (+ bias), in the dtype of x.

    `exact`: activations are not rounded. Otherwise an implementation may round them to 8 bits: on a CPU, where weights are
    integers times scales, with a scale for each 32 of them, except a token's few that are far larger than its others; on a
    GPU, where the checkpoint asks for it, with the scales it asks for.
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
