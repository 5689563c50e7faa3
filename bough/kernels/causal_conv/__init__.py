"""A convolution of each channel over a token and those before it, and perhaps SiLU, for layers that keep a state.

in: inputs of tokens, the last inputs before them, weights. out: the results, and the last inputs behind them. never:
projections, or whose states they are.

A state holds the `W - 1` last inputs of a row, oldest first. Results and states are in float32.
"""

from __future__ import annotations

from torch import Tensor

from bough.kernels.choices import standard

_IMPLEMENTATIONS = standard(__name__)


def conv_row(x_LC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, state_CW: Tensor, *, silu: bool = True) -> Tensor:
    """float32 [L, C] of the tokens of a row. The state is advanced in place."""
    out: Tensor = _IMPLEMENTATIONS.pick("conv_row", x_LC.device)(x_LC, weight_CW, bias_C, state_CW, silu=silu)
    return out


def conv_ones(
    x_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, states_SCW: Tensor, at_N: Tensor, *, silu: bool = True
) -> Tensor:
    """float32 [N, C] of one token of each row. The rows' states, `at_N`, are advanced in place."""
    out: Tensor = _IMPLEMENTATIONS.pick("conv_ones", x_NC.device)(x_NC, weight_CW, bias_C, states_SCW, at_N, silu=silu)
    return out
