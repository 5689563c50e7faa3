"""Weights that are rounded block by block, with the inputs that the blocks before them, already rounded, give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.compress.awq import fold_scales, folds_of
from bough.compress.gptq import rounded_in_turn
from bough.compress.grid import clipped_grid, plain_grid
from bough.compress.open_model import OpenModel
from bough.compress.targets import Method
from bough.compress.texts import Ids, whole_batch
from bough.kernels.packed_linear import Codes
from bough.layers.batch import Batch
from bough.layers.stream import Stream


@dataclass(frozen=True, slots=True)
class Rounding:
    """How weights are rounded."""

    method: Method
    bits: int
    group: int
    tensors: frozenset[str]
    """The checkpoint's tensors that are rounded."""


class Calibration:
    """Passes texts through a model's blocks, one block at a time."""

    def __init__(self, opened: OpenModel, texts: Sequence[Ids]) -> None:
        self._opened = opened
        self._batches = [whole_batch(ids, opened.device) for ids in texts]
        with torch.no_grad():
            self._inputs = [opened.model.embed(batch).clone() for batch in self._batches]

    @torch.no_grad()
    def rounded(self, rounding: Rounding) -> Iterator[dict[str, Codes]]:
        """The codes of every block's tensors, block after block; what else changes is changed in `opened` (norms that take
        up scales)."""
        grams = self._opened.scheme.grams
        for index, block in enumerate(self._opened.model.layers):
            prefix = f"layers.{index}."
            grams.wanted = {prefix}
            for inputs, batch in self._streams():
                block(Stream(inputs.clone(), batch, fuses=False), batch)
            grams.wanted = set()
            yield self._round_block(prefix, grams.take(), rounding)
            for place, (inputs, batch) in enumerate(self._streams()):
                stream = Stream(inputs, batch, fuses=False)
                block(stream, batch)
                self._inputs[place] = stream.tap()

    def _streams(self) -> Iterator[tuple[Tensor, Batch]]:
        yield from zip(self._inputs, self._batches, strict=True)

    def _round_block(self, prefix: str, grams: dict[str, Tensor], rounding: Rounding) -> dict[str, Codes]:
        opened = self._opened
        if rounding.method == "awq":
            for fold in folds_of(opened, prefix):
                fold_scales(opened, fold, grams, rounding.bits, rounding.group)
        made: dict[str, Codes] = {}
        for slot in opened.source_of:
            name, _ = opened.source_of[slot]
            if slot.startswith(prefix) and name not in made and name in rounding.tensors:
                gram = grams.get(slot.removesuffix(".weight"))
                made[name], dense = self._round(name, gram, rounding)
                opened.replace(name, dense)
        return made

    def _round(self, name: str, gram_DD: Tensor | None, rounding: Rounding) -> tuple[Codes, Tensor]:
        """(codes, what they are worth). Without a Gram matrix (an expert that no token chose): to the nearest."""
        weight_OD, bits, group = self._opened.weight(name), rounding.bits, rounding.group
        dtype = torch.bfloat16 if self._opened.tensors[name].kind == "BF16" else torch.float16
        if gram_DD is None:
            grid = plain_grid(weight_OD, bits, group, dtype)
            return grid.nearest(weight_OD), grid.rounded(weight_OD)
        grid = clipped_grid(weight_OD, gram_DD, bits, group, dtype)
        if rounding.method == "gptq":
            weight_OD = rounded_in_turn(weight_OD, gram_DD, grid)
        return grid.nearest(weight_OD), grid.rounded(weight_OD)
