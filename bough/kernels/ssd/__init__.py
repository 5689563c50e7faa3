"""Mamba 2's recurrence: each head keeps a matrix that decays by one rate and to which each token adds a product of vectors.

in: inputs, steps, rates, B, C and states. out: what is read, and the states behind the last token. never: projections,
norms, gates, or whose states they are.

For each head with state S [P, N]: S <- exp(dt a) S + (dt x) b^T; the token reads S c + d x. Heads in G groups of neighbours
share b and c. All in float32.
"""

from __future__ import annotations

from torch import Tensor

from bough.kernels.choices import standard

_IMPLEMENTATIONS = standard(__name__)


def scan_row(
    x_LHP: Tensor, dt_LH: Tensor, a_H: Tensor, b_LGN: Tensor, c_LGN: Tensor, d_H: Tensor, state_HPN: Tensor
) -> Tensor:
    """[L, H, P]: what the L tokens of a row read, one after the other. The state is advanced in place."""
    scan = _IMPLEMENTATIONS.pick("scan_row", x_LHP.device)
    read: Tensor = scan(x_LHP, dt_LH, a_H, b_LGN, c_LGN, d_H, state_HPN)
    return read


def step_rows(
    x_RHP: Tensor,
    dt_RH: Tensor,
    a_H: Tensor,
    b_RGN: Tensor,
    c_RGN: Tensor,
    d_H: Tensor,
    states_SHPN: Tensor,
    at_R: Tensor,
) -> Tensor:
    """[R, H, P]: what one token of each row reads. The rows' states, `at_R`, are advanced in place."""
    step = _IMPLEMENTATIONS.pick("step_rows", x_RHP.device)
    read: Tensor = step(x_RHP, dt_RH, a_H, b_RGN, c_RGN, d_H, states_SHPN, at_R)
    return read
