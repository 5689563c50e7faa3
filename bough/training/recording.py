"""What a model computes for texts, kept for all epochs where memory suffices. B texts, T tokens of the longest, S tokens of
all texts, E the model's width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bough.training.samples import Sample
from bough.training.target import TrainingTarget

_TOKENS_AT_ONCE = 32768
"""Of a pass over texts whose states are kept."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What a model has computed for texts. Rows are padded with their last token."""

    ids_BT: Tensor
    states: list[Tensor]
    """[B, T, E] at each of the places that were asked for."""
    hidden_BTE: Tensor
    """After the final norm."""


class StateRecording:
    """The states of a model for some texts: computed once and kept on its device, or for each batch anew."""

    def __init__(
        self, target: TrainingTarget, samples: Sequence[Sample], taps: Sequence[int], budget_bytes: int
    ) -> None:
        """`taps`: as in `DraftFacts`. `budget_bytes`: what may be kept; texts that need more are computed per batch."""
        self._target, self._taps = target, tuple(taps)
        self.samples = samples
        self.prompts = np.array([len(sample.prompt) for sample in samples], dtype=np.int64)
        self.lengths = np.array([len(sample.ids) for sample in samples], dtype=np.int64)
        self._starts = np.cumsum(self.lengths) - self.lengths
        total, width = int(self.lengths.sum()), target.facts.hidden
        size = total * width * (1 + len(self._taps)) * target.dtype.itemsize
        self._kept: list[Tensor] | None = None
        if size <= budget_bytes:
            self._kept = self._compute_all(total, width)
        self._ids_S = target.on_device(np.concatenate([np.array(sample.ids, dtype=np.int64) for sample in samples]))

    @property
    def is_kept(self) -> bool:
        return self._kept is not None

    def of(self, group: Sequence[int]) -> Watched:
        """The texts with these numbers."""
        which = np.asarray(group)
        lengths = self.lengths[which]
        step = np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
        kept_at = self._target.on_device(self._starts[which][:, None] + step)
        if self._kept is None:
            found = self._target.compute([self.samples[number].ids for number in group], self._taps)
            at_BT = self._target.on_device((np.cumsum(lengths) - lengths)[:, None] + step)
        else:
            found, at_BT = self._kept, kept_at
        *states, hidden = (each[at_BT] for each in found)
        return Watched(self._ids_S[kept_at], states, hidden)

    def _compute_all(self, total: int, width: int) -> list[Tensor]:
        target = self._target
        kept = [torch.empty(total, width, dtype=target.dtype, device=target.device) for _ in range(len(self._taps) + 1)]
        begin = 0
        while begin < len(self.samples):
            size = np.searchsorted(np.cumsum(self.lengths[begin:]), _TOKENS_AT_ONCE, side="right")
            end = begin + max(1, int(size))
            first = int(self._starts[begin])
            found = target.compute([sample.ids for sample in self.samples[begin:end]], self._taps)
            for into, part in zip(kept, found, strict=True):
                into[first : first + len(part)] = part
            begin = end
        return kept
