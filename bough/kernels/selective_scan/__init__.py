"""Mamba's recurrence: each channel keeps a vector whose numbers decay each by a rate of its own.

in: inputs, steps, rates, B, C and states. out: what is read, and the states behind the last token. never: projections,
norms, gates, or whose states they are.

For each channel with state s [N]: s <- exp(dt a) s + dt x b; the token reads s c + d x. All channels share b and c. All in
float32.
"""

from __future__ import annotations

from torch import Tensor

from bough.kernels.choices import standard

_IMPLEMENTATIONS = standard(__name__)


def scan_row(
    x_LC: Tensor, dt_LC: Tensor, a_CN: Tensor, b_LN: Tensor, c_LN: Tensor, d_C: Tensor, state_CN: Tensor
) -> Tensor:
    """[L, C]: what the L tokens of a row read, one after the other. The state is advanced in place."""
    scan = _IMPLEMENTATIONS.pick("scan_row", x_LC.device)
    read: Tensor = scan(x_LC, dt_LC, a_CN, b_LN, c_LN, d_C, state_CN)
    return read


def step_rows(
    x_RC: Tensor, dt_RC: Tensor, a_CN: Tensor, b_RN: Tensor, c_RN: Tensor, d_C: Tensor, states_SCN: Tensor, at_R: Tensor
) -> Tensor:
    """[R, C]: what one token of each row reads. The rows' states, `at_R`, are advanced in place."""
    step = _IMPLEMENTATIONS.pick("step_rows", x_RC.device)
    read: Tensor = step(x_RC, dt_RC, a_CN, b_RN, c_RN, d_C, states_SCN, at_R)
    return read
