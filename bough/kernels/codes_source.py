"""What CUDA sources that include `codes.cuh` are given: how a weight in codes is stored, and what it has besides codes."""

from __future__ import annotations

import ctypes
from typing import Final, NamedTuple

import torch
from torch import Tensor

BOX_COLUMNS: Final = 128
"""Columns of a weight in codes that come together."""
CODE_KINDS: Final = {"float8": 1, "int4": 2, "float4": 3}
"""How the sources name a kind of codes."""
CODE_GROUPS: Final[dict[str, tuple[int, ...]]] = {"float8": (0, 128), "int4": (0, 128), "float4": (0, 32)}
"""Columns that may share a scale, by kind; 0: all."""
_SCALE_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class CodeForm(NamedTuple):
    """What a weight's values are, and how a warp takes them. By default: as those of x."""

    kind: int = 0
    tiles: int = 1
    """Of 16 rows, that a warp has."""
    group: int = 0
    scale_rows: int = 1
    scale_type: int = 0
    has_zeros: bool = False

    @property
    def box_bytes(self) -> int:
        """Of a row of a box, 0: of those of x."""
        return (0, 128, 64, 64)[self.kind]

    def defines(self) -> dict[str, int]:
        return {
            "KIND": self.kind,
            "TILES": self.tiles,
            "GROUP": self.group,
            "SCALE_ROWS": self.scale_rows,
            "SCALES": self.scale_type,
            "ZEROS": int(self.has_zeros),
        }


class CodedWeight(ctypes.Structure):
    """As `Coded` of the source. The tensors must outlive the kernel."""

    _fields_ = (
        ("scales", ctypes.c_void_p),
        ("row_scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("width", ctypes.c_int),
        ("groups", ctypes.c_int),
    )


def scale_type(scales: Tensor) -> int | None:
    """How the sources name the type of scales; None: they do not know it."""
    return _SCALE_TYPES.get(scales.dtype)
