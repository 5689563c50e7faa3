"""Vocabulary bit masks on logits, in place.

in: logits [rows, vocabulary], the rows that are masked, and one bit mask for each (int32 words, bit set: allowed).
out: minus infinity where the bit is clear. never: a mask as one value per token.
"""

from __future__ import annotations

from torch import Tensor

from bough.kernels.choices import standard

_IMPLEMENTATIONS = standard(__name__)


def apply_masks(logits_RV: Tensor, rows_M: Tensor, masks_MW: Tensor) -> None:
    """Forbids tokens: bit v % 32 of `masks[m, v // 32]` is token v of row `rows[m]`. Rows are different ones.

    Tokens beyond the mask's words are forbidden too. int64 rows, int32 masks; floating logits with contiguous rows.
    """
    _IMPLEMENTATIONS.pick("apply_masks", logits_RV.device)(logits_RV, rows_M, masks_MW)
