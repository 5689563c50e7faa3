"""Mixture of experts: the router's choice of experts, and the gated feed-forward of the chosen ones.

in: router logits, activations, stacked expert weights. out: weighted sums of expert outputs. never: a wait for the device.
"""

from __future__ import annotations

from torch import Tensor

from bough.kernels.choices import standard

_IMPLEMENTATIONS = standard(__name__)


def topk_softmax(logits_TE: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """(weights float32 [T, k], ids int32 [T, k]): softmax over all experts, the k largest in descending order.

    With `renormalise` the k weights sum to one. Equal logits: the lower id first.
    """
    out: tuple[Tensor, Tensor] = _IMPLEMENTATIONS.pick("topk_softmax", logits_TE.device)(logits_TE, k, renormalise)
    return out


def fused_experts(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    topk_weights_Tk: Tensor,
    topk_ids_Tk: Tensor,
    activation: str = "silu",
) -> Tensor:
    """sum over the token's experts e of weight * down_e(act(gate_e(x)) * up_e(x)), [T, D].

    `activation` is "silu" or "gelu_tanh". An id outside 0..E-1 contributes nothing (experts held by another rank).
    """
    out: Tensor = _IMPLEMENTATIONS.pick("fused_experts", x_TD.device)(
        x_TD, gate_up_E2FD, down_EDF, topk_weights_Tk, topk_ids_Tk, activation
    )
    return out
