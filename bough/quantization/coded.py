"""The scheme of every quantised checkpoint but GGUF, and of weights that are quantised while they are loaded."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bough.config.hf import StoredShape
from bough.core.errors import ConfigError
from bough.kernels.packed_linear import pack_codes
from bough.quantization.coded_experts import CodedExperts, DequantisedExperts
from bough.quantization.formats import Online
from bough.quantization.layouts import WeightLayout, layout_of
from bough.quantization.layouts.layout import FLOATS
from bough.quantization.loading import PartLoader, Source, dequantised, draw_parts, joined
from bough.quantization.packed_matrix import PackedMatrix
from bough.quantization.read import LayerKind, Rules
from bough.quantization.scheme import ExpertShape, ExpertWeights, Matrix, Part
from bough.quantization.unquantized import DenseMatrix, check_gated, dense_experts, expert_parts
from bough.weights.dummy import DummyDraw
from bough.weights.mapping import Mapping as Names
from bough.weights.slots import Slot

_log = logging.getLogger(__name__)

LEAST_GROUP = 32
"""Columns that share a scale, at least, once a weight is cut for a rank: what kernels take."""


class Coded:
    """The scheme. Each layer is stored as `rules` say for it."""

    def __init__(
        self,
        rules: Rules,
        names: Names,
        headers: Mapping[str, StoredShape],
        *,
        keep_packed: bool = True,
    ) -> None:
        """`names` leads from layers to the checkpoint's names, `headers` are those of its tensors (none: random weights).
        Without `keep_packed` weights are dequantised on load."""
        self.rules = rules
        self._names = names
        self._headers = headers
        self._keep_packed = keep_packed

    def matrix(
        self,
        name: str,
        parts: Sequence[Part],
        *,
        kind: LayerKind = "linear",
        dtype: torch.dtype,
        device: torch.device,
    ) -> Matrix:
        sources = [self._source(f"{name}.{part.name}" if part.name else name, part, kind) for part in parts]
        if all(source.form is None for source in sources):
            return DenseMatrix(parts, dtype, device)
        if not self._keep_packed:
            return DequantisedMatrix(sources, dtype, device)
        return CodedMatrix(sources, dtype, device)

    def experts(self, name: str, shape: ExpertShape, *, dtype: torch.dtype, device: torch.device) -> ExpertWeights:
        sources = [
            [self._source(f"{name}.{expert}.{part.name}", part, "expert") for part in expert_parts(shape)]
            for expert in range(shape.num_experts)
        ]
        if all(source.form is None for each in sources for source in each):
            return dense_experts(shape, dtype, device)
        check_gated(shape)
        made = CodedExperts if self._keep_packed else DequantisedExperts
        return made(shape, sources, dtype, device)

    def _source(self, slot: str, part: Part, kind: LayerKind) -> Source:
        """The layer's format. A layer that has plain floats in the file is plain, whatever the configuration says of it."""
        name = self._names.source_of(f"{slot}.weight").removesuffix(".weight")
        form = self.rules.of(name, kind)
        if form is None or isinstance(form, Online):
            return Source(part, form, None)
        layout = layout_of(form, name, self._headers)
        if self._headers and self._is_plain(name, layout, part):
            _log.info("%s is not quantised, though %s lists it", name, self.rules.method)
            return Source(part, None, None)
        check_cut(name, layout, part)
        return Source(part, form, layout)

    def _is_plain(self, name: str, layout: WeightLayout, part: Part) -> bool:
        needed = [word for word, spec in layout.tensors(part.shape).items() if not spec.optional and word != "weight"]
        plain = self._headers.get(f"{name}.weight")
        return (
            plain is not None and plain.kind in FLOATS and not any(f"{name}.{word}" in self._headers for word in needed)
        )


def check_cut(name: str, layout: WeightLayout, part: Part) -> None:
    """Raises `ConfigError` if a weight can't be in its layout, or a rank's share of it can't be cut from it."""
    problem = layout.problem(part.shape)
    if problem:
        raise ConfigError(
            what=f"the weight of {name}, {part.shape[0]} x {part.shape[1]}, can't be read as its config says",
            why=problem,
            fix="check the quantisation config",
        )
    start, stop, _ = part.cols.indices(part.shape[1])
    for spec in layout.tensors(part.shape).values():
        if spec.cols is None or not spec.is_scale or (start, stop) == (0, part.shape[1]):
            continue
        group = spec.cols.values
        if math.gcd(group, start, stop) < min(group, LEAST_GROUP):
            raise ConfigError(
                what=f"{part.shape[1]} inputs of {name} can't be split over ranks of {stop - start}",
                why=f"{group} inputs share a scale; cuts must be at multiples of {min(group, LEAST_GROUP)}",
                fix="choose another --tp-size",
            )


class CodedMatrix(PackedMatrix):
    """Parts with codes of one kind are packed together; others stay pieces of their own."""

    def __init__(self, sources: Sequence[Source], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__([source.part for source in sources], dtype, device)
        self._loaders = [PartLoader(source, dtype, device) for source in sources]

    def weight_slots(self) -> dict[str, Slot]:
        return {name: slot for loader in self._loaders for name, slot in loader.slots().items()}

    def draw_dummies(self, name: str, draw: DummyDraw) -> None:
        draw_parts(self._loaders, name, draw)
        self.finish_loading()

    def finish_loading(self) -> None:
        results = [loader.result() for loader in self._loaders]
        self.pieces = [piece if isinstance(piece, Tensor) else pack_codes(piece) for piece in joined(results)]


class DequantisedMatrix(DenseMatrix):
    """One plain tensor, from parts in any format."""

    def __init__(self, sources: Sequence[Source], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__([source.part for source in sources], dtype, device)
        self._loaders = [PartLoader(source, dtype, device) for source in sources]

    def weight_slots(self) -> dict[str, Slot]:
        return {name: slot for loader in self._loaders for name, slot in loader.slots().items()}

    def draw_dummies(self, name: str, draw: DummyDraw) -> None:
        draw_parts(self._loaders, name, draw)
        self.finish_loading()

    def finish_loading(self) -> None:
        start = 0
        for loader in self._loaders:
            result = loader.result()
            dense = result if isinstance(result, Tensor) else dequantised(result)
            self.weight[start : start + dense.shape[0]].copy_(dense)
            start += dense.shape[0]
