"""Attention of encoders: tokens of a step lie one behind the other in segments, and see their own segment only, all of it.

in: q, k, v of all tokens, and the segments' lengths on the host. out: what each token reads. never: pages, masks, padding.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bough.kernels.choices import standard

_IMPLEMENTATIONS = standard(__name__)


def attend_segments(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """[T, N * H]. `lengths` sum up to T."""
    out: Tensor = _IMPLEMENTATIONS.pick("attend_segments", q_TNH.device)(q_TNH, k_TNH, v_TNH, lengths, scale)
    return out
