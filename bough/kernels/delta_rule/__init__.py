"""The gated delta rule: what heads read from matrices that decay and that each token corrects at its key.

in: queries, keys, values, rates and states. out: what is read, and the states behind the last token. never: projections,
norms of what is read, or whose states they are.

For each head with state S [K, V], with q and k divided by their lengths and q by sqrt(K): S <- exp(g) S;
S <- S + k (b (v - S^T k))^T; the token reads S^T q. All in float32. Each
of G key heads serves H / G neighbouring value heads. Rates g are by head, [L, H, 1], or by line of its state, [L, H, K].
"""

from __future__ import annotations

from torch import Tensor

from bough.kernels.choices import standard

_IMPLEMENTATIONS = standard(__name__)


def scan_row(q_LGK: Tensor, k_LGK: Tensor, v_LHV: Tensor, g_LHK: Tensor, b_LH: Tensor, state_HKV: Tensor) -> Tensor:
    """[L, H, V]: what the L tokens of a row read, one after the other. The state is advanced in place."""
    read: Tensor = _IMPLEMENTATIONS.pick("scan_row", q_LGK.device)(q_LGK, k_LGK, v_LHV, g_LHK, b_LH, state_HKV)
    return read


def step_rows(
    q_RGK: Tensor, k_RGK: Tensor, v_RHV: Tensor, g_RHK: Tensor, b_RH: Tensor, states_SHKV: Tensor, at_R: Tensor
) -> Tensor:
    """[R, H, V]: what one token of each row reads. The rows' states, `at_R`, are advanced in place."""
    read: Tensor = _IMPLEMENTATIONS.pick("step_rows", q_RGK.device)(q_RGK, k_RGK, v_RHV, g_RHK, b_RH, states_SHKV, at_R)
    return read
