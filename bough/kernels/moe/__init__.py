"""Mixture of experts: the router's choice of experts, and the gated feed-forward of the chosen ones; apart, or together
with the norm before them.

in: router logits, activations, stacked expert weights. out: weighted sums of expert outputs. never: a wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.kernels.choices import standard

_IMPLEMENTATIONS = standard(__name__)


def topk_softmax(logits_TE: Tensor, k: int, renormalise: bool, loc_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(weights float32 [T, k], ids int32 [T, k]): softmax over all experts, the k largest in descending order.

    With `renormalise` the k weights sum to one. Equal logits: the lower id first. A token whose `loc_T` (int64) is negative
    is padding and chooses none: its ids are -1.
    """
    choose = _IMPLEMENTATIONS.pick("topk_softmax", logits_TE.device)
    out: tuple[Tensor, Tensor] = choose(logits_TE, k, renormalise, loc_T)
    return out


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores choose experts, and what weighs them."""

    sigmoid: bool
    """Of each logit; otherwise a softmax over all of them."""
    groups: int
    kept_groups: int
    """Only experts of the `kept_groups` best groups of neighbours can be chosen..."""
    best_two: bool
    """...groups being compared by the sum of their two best scores, or by their best one."""
    renormalise: bool
    least_sum: float
    """Weights are divided by their sum, or by this if it is larger."""
    scale: float
    """Multiplies weights, last."""


def topk_scored(
    logits_TE: Tensor, k: int, scoring: Scoring, bias_E: Tensor | None = None, loc_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(weights float32 [T, k], ids int32 [T, k]) of float32 logits: the k experts of the largest scores + bias, in
    descending order, weighed by their scores. `loc_T` as of `topk_softmax`."""
    choose = _IMPLEMENTATIONS.pick("topk_scored", logits_TE.device)
    out: tuple[Tensor, Tensor] = choose(logits_TE, k, scoring, bias_E, loc_T)
    return out


@dataclass(frozen=True, slots=True)
class Choosing:
    """What becomes of a router's logits."""

    per_token: int
    renormalise: bool
    """Without a `scoring`: experts are those of `topk_softmax`, ..."""
    scoring: Scoring | None = None
    """...and with one, those of `topk_scored`..."""
    bias_E: Tensor | None = None
    """...with this bias, float32."""
    forced_nk: Tensor | None = None
    """int32 [n, k]: the experts of token t are those of line t modulo n, whatever the router says."""
    always: int = 0
    """Number of experts behind the router's that every token chooses, after the others."""
    always_weight: float = 1.0
    """Weight of those experts."""

    @property
    def width(self) -> int:
        """Experts of a token."""
        return self.per_token + self.always


def route(
    x_TD: Tensor, router_ED: Tensor, router_bias_E: Tensor | None, how: Choosing, loc_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(weights float32 [T, k], ids int32 [T, k]) of what a router reads, k being `how.width`: logits are of the type of the
    router's weight, which must not be written by another kernel of the same step. `loc_T` as of `topk_softmax`."""
    out: tuple[Tensor, Tensor] = _IMPLEMENTATIONS.pick("route", x_TD.device)(x_TD, router_ED, router_bias_E, how, loc_T)
    return out


def settle(
    weights_Tk: Tensor, ids_Tk: Tensor, num_experts: int, how: Choosing, loc_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What a router of `num_experts` chose, as `how` and `loc_T` change it."""
    tokens = len(ids_Tk)
    if how.forced_nk is not None:
        repeats = -(-tokens // len(how.forced_nk))
        ids_Tk = how.forced_nk[:tokens] if repeats <= 1 else how.forced_nk.repeat(repeats, 1)[:tokens]
    if how.always:
        behind = torch.arange(num_experts, num_experts + how.always, dtype=torch.int32, device=ids_Tk.device)
        ids_Tk = torch.cat((ids_Tk, behind.expand(tokens, -1)), 1)
        weights_Tk = torch.cat((weights_Tk, weights_Tk.new_full((tokens, how.always), how.always_weight)), 1)
    if loc_T is not None:
        ids_Tk = ids_Tk.masked_fill((loc_T < 0)[:, None], -1)
    return weights_Tk, ids_Tk


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


@dataclass(frozen=True, slots=True)
class Biases:
    """Of experts' products."""

    gate_up_E2F: Tensor
    down_ED: Tensor


def biased_experts(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    biases: Biases,
    topk_weights_Tk: Tensor,
    topk_ids_Tk: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    """As `fused_experts`, with biases and `clamped_gate` in place of an activation, [T, D]."""
    out: Tensor = _IMPLEMENTATIONS.pick("biased_experts", x_TD.device)(
        x_TD, gate_up_E2FD, down_EDF, biases, topk_weights_Tk, topk_ids_Tk, alpha, limit
    )
    return out


def plain_experts(
    x_TD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    topk_weights_Tk: Tensor,
    topk_ids_Tk: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """sum over the token's experts e of weight * down_e(act(up_e(x))), [T, D]. Ids as of `fused_experts`."""
    out: Tensor = _IMPLEMENTATIONS.pick("plain_experts", x_TD.device)(
        x_TD, up_EFD, down_EDF, topk_weights_Tk, topk_ids_Tk, activation
    )
    return out


def clamped_gate(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) of the two halves, gate at most `limit`, up within it on both sides."""
    gate, up = gate_up.float().chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * (alpha * gate).sigmoid()).to(gate_up.dtype)


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen: by a norm, a product with the router's weight, and `topk_softmax`."""

    norm_D: Tensor
    eps: float
    offset: float
    """As of `norm.add_rms_norm`."""
    router_ED: Tensor
    per_token: int
    renormalise: bool
    loc_T: Tensor | None = None
    """As of `topk_softmax`; what padding gets is not said."""


def routed_experts(
    x_TD: Tensor,
    residual_TD: Tensor,
    routing: Routing,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    activation: str = "silu",
) -> tuple[Tensor, Tensor]:
    """(fused_experts of the norm of x + residual, x + residual), [T, D] each, where all experts are here.

    x may be [P, T, D] of several addends. Router weights must not be written by another kernel of the same step.
    """
    out: tuple[Tensor, Tensor] = _IMPLEMENTATIONS.pick("routed_experts", x_TD.device)(
        x_TD, residual_TD, routing, gate_up_E2FD, down_EDF, activation
    )
    return out
