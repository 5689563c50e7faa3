"""One checkpoint made of another, from opening it to saying what was lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from bough.compress.calibrate import Calibration, Rounding
from bough.compress.open_model import OpenModel
from bough.compress.targets import Target
from bough.compress.texts import Ids, Judge, Likeness
from bough.compress.write import Selection, Tell, check_source, largest_group, write_quantised
from bough.config.hf import Checkpoint, open_checkpoint
from bough.core.errors import ConfigError, UnsupportedModel
from bough.kernels.packed_linear import Codes
from bough.models.load import build_model
from bough.models.registry import facts_of, find_architecture
from bough.weights.load import open_tensors
from bough.weights.mapping import Mapping as Names


class CompressionJob:
    """What is to be written, and where."""

    def __init__(self, source: Checkpoint, out: Path, target: Target, group: int, device: torch.device) -> None:
        """`group`: columns of a group; 0: chosen. Raises `ConfigError` for what can't be done."""
        check_source(source, out)
        self.source = source
        self.out = out
        self.target = target
        self.device = device
        self._names = _names_of(source)
        with open_tensors(source) as tensors:
            widest = Selection(target, 1, self._names)
            widths = [stored.shape[1] for name, stored in tensors.items() if widest.is_linear(name, stored)]
            self._selection = Selection(target, group or largest_group(widths), self._names)
            self.chosen = frozenset(name for name, stored in tensors.items() if self._selection.has(name, stored))
        if not self.chosen:
            raise ConfigError(
                what=f"{source.name} has no weights that can be written so",
                why=f"groups of {self._selection.group} columns fit none of {len(widths)} projections"
                if widths
                else "none of its tensors is known as a projection with outputs first",
                fix="choose another --group-size" if widths else "choose another model",
                param="group_size",
            )

    def run(self, samples: Sequence[Ids], texts: Sequence[Ids], tell: Tell) -> tuple[Likeness, Likeness] | None:
        """Writes the checkpoint. `samples`: texts to calibrate on. Returns what the models before and after are on `texts`;
        None without any."""
        judge: Judge | None = None
        method = self.target.method
        with open_tensors(self.source) as tensors:
            made: dict[str, Codes] = {}
            if method == "nearest" and not texts:
                write_quantised(self.source, tensors, made, self.out, self._selection, tell)
                return None
            opened = OpenModel(self.source, tensors, self.device)
            if texts:
                judge = Judge(opened, texts)
            if method != "nearest":
                rounding = Rounding(method, 4, self._selection.group, self.chosen)
                count = len(opened.model.layers)
                for index, codes in enumerate(Calibration(opened, samples).rounded(rounding)):
                    made |= codes
                    tell(f"layer {index + 1} of {count}")
            write_quantised(self.source, opened.tensors, made, self.out, self._selection, tell)
            if judge is None:
                return None
            before = judge.exact()
            del opened
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        model = build_model(open_checkpoint(str(self.out)), dtype=dtype, device=self.device)
        return before, judge.of(model, self.device)


def _names_of(source: Checkpoint) -> Names | None:
    """The model's; None if it is computed by modules that bough does not have."""
    try:
        facts = facts_of(source.config, "auto")
    except UnsupportedModel:
        return None
    return None if facts.through_transformers else find_architecture(facts.architecture).weights
