"""What the mixture-of-experts kernels compute, in plain torch; what joins several of them, one after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bough.kernels import moe
from bough.kernels.activation.reference import gelu_tanh_mul, silu_mul
from bough.kernels.linear import linear
from bough.kernels.norm import add_rms_norm

ACTIVATIONS = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


def topk_softmax(logits_TE: Tensor, k: int, renormalise: bool, loc_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
    probabilities = logits_TE.float().softmax(-1)
    order = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, ids = order.values[:, :k], order.indices[:, :k]
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    if loc_T is not None:
        ids = ids.masked_fill((loc_T < 0)[:, None], -1)
    return weights.contiguous(), ids.to(torch.int32)


_SOME = 1e-20
"""Keeps a sum of scores from being 0."""


def topk_scored(
    logits_TE: Tensor, k: int, scoring: moe.Scoring, bias_E: Tensor | None = None, loc_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    scores_TE = logits_TE.sigmoid() if scoring.sigmoid else logits_TE.softmax(-1)
    ranked_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if scoring.groups > 1:
        ranked_TE = _of_kept_groups(ranked_TE, scoring)
    ids_Tk = ranked_TE.topk(k, dim=-1).indices
    weights_Tk = scores_TE.gather(1, ids_Tk)
    if scoring.renormalise:
        total_T1 = weights_Tk.sum(-1, keepdim=True)
        weights_Tk = weights_Tk / total_T1.clamp(min=max(scoring.least_sum, _SOME))
    if loc_T is not None:
        ids_Tk = ids_Tk.masked_fill((loc_T < 0)[:, None], -1)
    return weights_Tk * scoring.scale, ids_Tk.to(torch.int32)


def _of_kept_groups(ranked_TE: Tensor, scoring: moe.Scoring) -> Tensor:
    """Experts of other groups are at -infinity."""
    by_group = ranked_TE.view(len(ranked_TE), scoring.groups, -1)
    best = by_group.topk(2 if scoring.best_two else 1, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(scoring.kept_groups, dim=-1).indices, True)
    return by_group.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)


def choose(logits_TE: Tensor, how: moe.Choosing, loc_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(weights, ids) as `moe.route` says."""
    if how.scoring is None:
        chosen = topk_softmax(logits_TE, how.per_token, how.renormalise)
    else:
        chosen = topk_scored(logits_TE.float(), how.per_token, how.scoring, how.bias_E)
    return moe.settle(*chosen, logits_TE.shape[1], how, loc_T)


def route(
    x_TD: Tensor, router_ED: Tensor, router_bias_E: Tensor | None, how: moe.Choosing, loc_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return choose(linear(x_TD.to(router_ED.dtype), router_ED, router_bias_E), how, loc_T)


def fused_experts(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    topk_weights_Tk: Tensor,
    topk_ids_Tk: Tensor,
    activation: str = "silu",
) -> Tensor:
    num_experts = gate_up_E2FD.shape[0]
    act = ACTIVATIONS[activation]
    out = torch.zeros(x_TD.shape[0], down_EDF.shape[1], dtype=torch.float32, device=x_TD.device)
    for expert in range(num_experts):
        token, choice = (topk_ids_Tk == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        hidden = act(x_TD[token] @ gate_up_E2FD[expert].T)
        part = (hidden @ down_EDF[expert].T).float() * topk_weights_Tk[token, choice].float().unsqueeze(1)
        out.index_add_(0, token, part)
    return out.to(x_TD.dtype)


def biased_experts(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    biases: moe.Biases,
    topk_weights_Tk: Tensor,
    topk_ids_Tk: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    out = torch.zeros(x_TD.shape[0], down_EDF.shape[1], dtype=torch.float32, device=x_TD.device)
    for expert in range(gate_up_E2FD.shape[0]):
        token, choice = (topk_ids_Tk == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        gate_up = x_TD[token] @ gate_up_E2FD[expert].T + biases.gate_up_E2F[expert]
        part = moe.clamped_gate(gate_up, alpha, limit) @ down_EDF[expert].T + biases.down_ED[expert]
        out.index_add_(0, token, part.float() * topk_weights_Tk[token, choice].float().unsqueeze(1))
    return out.to(x_TD.dtype)


def plain_experts(
    x_TD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    topk_weights_Tk: Tensor,
    topk_ids_Tk: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    out = torch.zeros(x_TD.shape[0], down_EDF.shape[1], dtype=torch.float32, device=x_TD.device)
    for expert in range(up_EFD.shape[0]):
        token, choice = (topk_ids_Tk == expert).nonzero(as_tuple=True)
        if token.numel():
            part = activation(x_TD[token] @ up_EFD[expert].T) @ down_EDF[expert].T
            out.index_add_(0, token, part.float() * topk_weights_Tk[token, choice].float().unsqueeze(1))
    return out.to(x_TD.dtype)


def routed_experts(
    x_TD: Tensor,
    residual_TD: Tensor,
    routing: moe.Routing,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    activation: str = "silu",
) -> tuple[Tensor, Tensor]:
    """One after the other, each by what the device has for it."""
    normed_TD, total_TD = add_rms_norm(x_TD, residual_TD, routing.norm_D, routing.eps, offset=routing.offset)
    how = moe.Choosing(routing.per_token, routing.renormalise)
    weights_Tk, ids_Tk = moe.route(normed_TD, routing.router_ED, None, how, routing.loc_T)
    return moe.fused_experts(normed_TD, gate_up_E2FD, down_EDF, weights_Tk, ids_Tk, activation), total_TD
