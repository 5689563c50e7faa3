"""How the tensors of a format lie in a checkpoint, and the way from them to `Codes`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.core.errors import WeightsError
from bough.kernels.packed_linear import Codes
from bough.weights.stored import Stored, read_all, read_part

FLOATS = frozenset({"F32", "F16", "BF16"})
INT32 = frozenset({"I32", "U32"})


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """A dimension of a stored tensor that runs along a weight's outputs or inputs: `indices` for every `values` of them."""

    dim: int
    values: int = 1
    indices: int = 1

    def at(self, start: int, stop: int) -> slice:
        """The indices of outputs `start` to `stop`; a stop within `values` counts as a whole."""
        return slice(start * self.indices // self.values, -(-stop * self.indices // self.values))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a weight. A span that is None: the tensor does not depend on that side and is read as a whole."""

    shape: tuple[int, ...]
    rows: StoredSpan | None
    cols: StoredSpan | None
    kinds: frozenset[str]
    optional: bool = False
    also: tuple[tuple[int, ...], ...] = ()
    """Other shapes that writers give it, with as many numbers in the same order."""
    is_scale: bool = False
    """Every number must be finite, which is checked before anything is loaded."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a weight that its tensors can be cut to."""

    rows: tuple[int, int]
    cols: tuple[int, int]
    shape: tuple[int, int]
    """Of the whole weight."""

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def num_cols(self) -> int:
        return self.cols[1] - self.cols[0]


class WeightLayout(ABC):
    """The tensors of one weight [O, D]."""

    @abstractmethod
    def tensors(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        """What a weight of this shape has, by the last word of the name."""

    @abstractmethod
    def decode(self, region: Region, tensors: Mapping[str, Tensor]) -> Codes:
        """The codes of a region, from its part of each tensor. Codes may lie in the tensors' memory."""

    @property
    def cuts_columns(self) -> bool:
        """Whether some columns can be read without the others."""
        return True

    def problem(self, shape: tuple[int, int]) -> str:
        """Why a weight of this shape can't be in this layout; empty if it can."""
        return ""


def region_of(layout: WeightLayout, shape: tuple[int, int], rows: slice, cols: slice) -> Region:
    """The smallest region with these rows and columns that all tensors can be cut to."""
    specs = layout.tensors(shape).values()
    return Region(
        _aligned(rows.indices(shape[0])[:2], shape[0], [spec.rows for spec in specs]),
        _aligned(
            (cols if layout.cuts_columns else slice(None)).indices(shape[1])[:2],
            shape[1],
            [spec.cols for spec in specs],
        ),
        shape,
    )


def _aligned(wanted: tuple[int, int], total: int, spans: Iterable[StoredSpan | None]) -> tuple[int, int]:
    unit = math.lcm(*(span.values for span in spans if span is not None))
    start, stop = wanted
    return start // unit * unit, min(total, -(-stop // unit) * unit)


def read_region(spec: TensorSpec, region: Region, stored: Stored, device: torch.device) -> Tensor:
    """The region's part of a tensor, on the device, in the shape that `spec` says."""
    if not spec.shape:
        return read_all(stored).reshape(()).to(device)
    wanted = [slice(0, extent) for extent in spec.shape]
    for span, (start, stop) in ((spec.rows, region.rows), (spec.cols, region.cols)):
        if span is not None:
            at = span.at(start, stop)
            wanted[span.dim] = slice(at.start, min(at.stop, spec.shape[span.dim]))
    if len(stored.shape) != len(spec.shape):
        return read_all(stored).reshape(spec.shape)[tuple(wanted)].to(device)
    return read_part(stored, wanted[0].start, wanted[0].stop, *wanted[1:]).to(device)


def scale_check(spec: TensorSpec) -> Callable[[Stored], None] | None:
    """Reads scales and raises `WeightsError` if one is not finite."""
    return _check_scales if spec.is_scale else None


def _check_scales(stored: Stored) -> None:
    values = read_all(stored)
    if values.dtype in (torch.uint8, torch.float8_e8m0fnu):
        wrong = values.view(torch.uint8) == 255
    else:
        wrong = ~values.float().isfinite()
    count = int(wrong.sum())
    if count:
        raise WeightsError(
            what=f"{stored.name} has {count} scales that are no numbers",
            why=f"of {values.numel()} scales all must be finite",
            fix="download the checkpoint again; if that does not help, it was written wrongly",
        )
