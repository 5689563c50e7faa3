"""From a checkpoint's tensors to codes or floats, for one part of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bough.kernels.packed_linear import Codes
from bough.kernels.packed_linear.codes import activation_order, can_stack, dequantise_codes, out_of_order, stack
from bough.quantization.formats import WeightFormat
from bough.quantization.layouts import WeightLayout
from bough.quantization.layouts.layout import Region, TensorSpec, read_region, region_of, scale_check
from bough.quantization.quantise import quantise
from bough.quantization.scheme import Part
from bough.weights.dummy import DummyDraw
from bough.weights.slots import Slot
from bough.weights.stored import Stored, copy_into


@dataclass(frozen=True, slots=True)
class Source:
    """Where the weights of one part come from."""

    part: Part
    form: WeightFormat | None
    """None: plain floats stay plain."""
    layout: WeightLayout | None
    """None: the checkpoint has plain floats."""


class PartLoader:
    """Takes the tensors of one part as they come, and makes codes or plain floats of them."""

    def __init__(self, source: Source, dtype: torch.dtype, device: torch.device) -> None:
        self.source = source
        self.dtype = dtype
        self.device = device
        self._tensors: dict[str, Tensor] = {}

    def slots(self) -> dict[str, Slot]:
        part, layout = self.source.part, self.source.layout
        if layout is None:
            return {part.slot_name("weight"): Slot(part.shape, self._take_plain)}
        region = region_of(layout, part.shape, part.rows, part.cols)
        return {
            part.slot_name(name): Slot(
                spec.shape,
                partial(self._take, name, spec, region),
                spec.optional,
                outputs=None if spec.rows is None else spec.rows.dim,
                kinds=spec.kinds,
                check=scale_check(spec),
                also=spec.also,
            )
            for name, spec in layout.tensors(part.shape).items()
        }

    def _take(self, name: str, spec: TensorSpec, region: Region, stored: Stored) -> None:
        self._tensors[name] = read_region(spec, region, stored, self.device)

    def _take_plain(self, stored: Stored) -> None:
        part = self.source.part
        dense = torch.empty(part.num_rows, part.num_cols, dtype=self.dtype, device=self.device)
        copy_into(dense, stored, part.rows, part.cols)
        self._tensors["weight"] = dense

    def give(self, dense_OD: Tensor) -> None:
        """Floats instead of a checkpoint's tensors."""
        self._tensors = {"weight": dense_OD}

    def result(self) -> Codes | Tensor:
        """What was loaded; it is not kept here any longer."""
        part, layout, form = self.source.part, self.source.layout, self.source.form
        tensors, self._tensors = self._tensors, {}
        if layout is None or tensors.keys() == {"weight"}:
            dense = tensors["weight"]
            return dense if form is None else quantise(form, dense)
        region = region_of(layout, part.shape, part.rows, part.cols)
        codes = layout.decode(region, tensors)
        (top, bottom, _), (left, right, _) = part.rows.indices(part.shape[0]), part.cols.indices(part.shape[1])
        inner = codes.cut(
            slice(top - region.rows[0], bottom - region.rows[0]), slice(left - region.cols[0], right - region.cols[0])
        )
        return inner.sorted()


def draw_parts(loaders: Sequence[PartLoader], name: str, draw: DummyDraw) -> None:
    """Gives every part its rows of the floats that a plain matrix of this name would have drawn."""
    parts = [loader.source.part for loader in loaders]
    heights = [part.num_rows for part in parts]
    dense = torch.empty(sum(heights), parts[0].num_cols, dtype=loaders[0].dtype, device=loaders[0].device)
    draw.fill(f"{name}.weight", dense)
    for loader, rows in zip(loaders, torch.split(dense, heights), strict=True):
        loader.give(rows)


def joined(results: list[Codes | Tensor]) -> list[Codes | Tensor]:
    """Neighbours that can be one piece as one."""
    joined: list[Codes | Tensor] = []
    for result in _alike(results):
        last = joined[-1] if joined else None
        if isinstance(last, Tensor) and isinstance(result, Tensor):
            joined[-1] = torch.cat((last, result))
        elif isinstance(last, Codes) and isinstance(result, Codes) and can_stack(last, result):
            joined[-1] = stack([last, result])
        else:
            joined.append(result)
    return joined


def _alike(results: list[Codes | Tensor]) -> list[Codes | Tensor]:
    """Parts whose activations have a scale each get the largest: they are rounded once for all."""
    scales = [each.inputs.scale for each in results if isinstance(each, Codes) and each.inputs is not None]
    known = [scale for scale in scales if scale is not None]
    if not known:
        return results
    return [
        replace(each, inputs=replace(each.inputs, scale=max(known)))
        if isinstance(each, Codes) and each.inputs is not None and each.inputs.scale is not None
        else each
        for each in results
    ]


def dequantised(codes: Codes) -> Tensor:
    """float32 [O, D], columns in the order of activations."""
    dense, order = dequantise_codes(codes), activation_order(codes)
    return dense if order is None else out_of_order(dense, order, codes.num_inputs)
