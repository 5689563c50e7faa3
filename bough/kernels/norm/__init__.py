"""Root-mean-square normalisation of rows, alone or after adding a residual.

in: activations and a weight. out: normalised activations in their dtype; the arithmetic is float32. never: in-place changes.
"""

from __future__ import annotations

from torch import Tensor

from bough.kernels.choices import standard

_IMPLEMENTATIONS = standard(__name__)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """x / rms(x) * (offset + weight), over the last dimension."""
    out: Tensor = _IMPLEMENTATIONS.pick("rms_norm", x_TD.device)(x_TD, weight_D, eps, offset=offset)
    return out


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the sum is rounded to the dtype once, before it is normalised.

    x may have a dimension more in front than the residual: several addends.
    """
    out: tuple[Tensor, Tensor] = _IMPLEMENTATIONS.pick("add_rms_norm", x_TD.device)(
        x_TD, residual_TD, weight_D, eps, offset=offset
    )
    return out
