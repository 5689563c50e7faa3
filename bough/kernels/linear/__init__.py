"""Matrix products with a weight [O, D]: few rows stream the weight at memory bandwidth, many go to the vendor's library.

in: activations and weights of one dtype. out: [T, O] in that dtype, accumulated in float32. never: quantised weights, or
weights that a kernel of the same step writes (they are read before the kernels in front have ended).
"""

from __future__ import annotations

from torch import Tensor

from bough.kernels.choices import standard

_IMPLEMENTATIONS = standard(__name__)


def linear(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x @ weight.T (+ bias)."""
    out: Tensor = _IMPLEMENTATIONS.pick("linear", x_TD.device)(x_TD, weight_OD, bias_O)
    return out


def linear_onto(x_TD: Tensor, weight_OD: Tensor, stream_TO: Tensor) -> tuple[Tensor, Tensor | None]:
    """x @ weight.T for `add_rms_norm`: (what is added to the stream, the stream), or (their sum, None).

    What is added is [T, O], or [P, T, O] of several addends. The sum may be made in the stream's memory.
    """
    out: tuple[Tensor, Tensor | None] = _IMPLEMENTATIONS.pick("linear_onto", x_TD.device)(x_TD, weight_OD, stream_TO)
    return out


def linear_after_norm(
    x_TD: Tensor,
    residual_TD: Tensor,
    norm_D: Tensor,
    eps: float,
    weight_OD: Tensor,
    bias_O: Tensor | None = None,
    *,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(`linear` of the norm of x + residual, x + residual), where the norm is that of `norm.add_rms_norm`."""
    out: tuple[Tensor, Tensor] = _IMPLEMENTATIONS.pick("linear_after_norm", x_TD.device)(
        x_TD, residual_TD, norm_D, eps, weight_OD, bias_O, offset=offset
    )
    return out


def linear_silu_mul(x_TD: Tensor, weight_2FD: Tensor) -> Tensor:
    """silu_mul(x @ weight.T): gate rows first, then up rows."""
    out: Tensor = _IMPLEMENTATIONS.pick("linear_silu_mul", x_TD.device)(x_TD, weight_2FD)
    return out
