"""The gated delta rule in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_TOKENS = 64
"""Tokens whose corrections are found together, by a triangular system: more cost quadratically, fewer make more launches."""


LEAST_SQUARE = 1e-6
"""Added to the square of a query's or key's length, which may be 0."""
CHANNEL_TOKENS = 16
"""The same where lines of a state decay by rates of their own: what tokens see of each other is then summed line by line."""


def scan_row(q_LGK: Tensor, k_LGK: Tensor, v_LHV: Tensor, g_LHK: Tensor, b_LH: Tensor, state_HKV: Tensor) -> Tensor:
    read = torch.empty(v_LHV.shape, dtype=v_LHV.dtype, device=v_LHV.device)
    q_LHK, k_LHK = _by_value_head(q_LGK, k_LGK, v_LHV.shape[1])
    tokens = CHUNK_TOKENS if g_LHK.shape[2] == 1 else CHANNEL_TOKENS
    for first in range(0, len(read), tokens):
        part = slice(first, first + tokens)
        q, k, v, g, b = (each[part].transpose(0, 1) for each in (q_LHK, k_LHK, v_LHV, g_LHK, b_LH))
        read[part] = _chunk(q, k, v, g, b, state_HKV).transpose(0, 1)
    return read


def _chunk(q_HLK: Tensor, k_HLK: Tensor, v_HLV: Tensor, g_HLK: Tensor, b_HL: Tensor, state_HKV: Tensor) -> Tensor:
    """With G the sum of g up to a token and d what each adds at its key:
    d_i = b_i (v_i - S^T exp(G_i) k_i - sum over j < i of (k_i exp(G_i - G_j) k_j) d_j)."""
    total_HLK = g_HLK.cumsum(1)
    within_HLL = b_HL[:, :, None] * _seen(k_HLK, k_HLK, total_HLK)
    since_HLK = total_HLK.exp()
    known_HLV = b_HL[:, :, None] * (v_HLV - (since_HLK * k_HLK) @ state_HKV)
    added_HLV = torch.linalg.solve_triangular(within_HLL.tril(-1), known_HLV, upper=False, unitriangular=True)
    read_HLV: Tensor = (since_HLK * q_HLK) @ state_HKV + _seen(q_HLK, k_HLK, total_HLK) @ added_HLV
    left_HLK = (total_HLK[:, -1:] - total_HLK).exp()
    state_HKV.mul_(total_HLK[:, -1].exp()[:, :, None]).add_((k_HLK * left_HLK).transpose(1, 2) @ added_HLV)
    return read_HLV


def _seen(x_HLK: Tensor, k_HLK: Tensor, total_HLK: Tensor) -> Tensor:
    """[H, L, L]: x_i exp(G_i - G_j) k_j for j <= i, else 0."""
    if total_HLK.shape[2] == 1:
        decay_HLL = (total_HLK - total_HLK.transpose(1, 2)).tril().exp()
        return (x_HLK @ k_HLK.transpose(1, 2) * decay_HLL).tril()
    decay_HLLK = (total_HLK[:, :, None] - total_HLK[:, None]).clamp_max(0.0).exp()
    return torch.einsum("hik,hijk,hjk->hij", x_HLK, decay_HLLK, k_HLK).tril()


def step_rows(
    q_RGK: Tensor, k_RGK: Tensor, v_RHV: Tensor, g_RHK: Tensor, b_RH: Tensor, states_SHKV: Tensor, at_R: Tensor
) -> Tensor:
    q_RHK, k_RHK = _by_value_head(q_RGK, k_RGK, v_RHV.shape[1])
    state_RHKV = states_SHKV[at_R] * g_RHK.exp()[:, :, :, None]
    kept_RHV = (k_RHK[:, :, None, :] @ state_RHKV).squeeze(2)
    added_RHV = b_RH[:, :, None] * (v_RHV - kept_RHV)
    state_RHKV += k_RHK[:, :, :, None] * added_RHV[:, :, None, :]
    states_SHKV[at_R] = state_RHKV
    return (q_RHK[:, :, None, :] @ state_RHKV).squeeze(2)


def _by_value_head(q_LGK: Tensor, k_LGK: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """[L, H, K]: of length 1, queries scaled."""
    q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + LEAST_SQUARE) for each in (q_LGK, k_LGK))
    q *= q.shape[-1] ** -0.5
    repeats = num_heads // q.shape[1]
    if repeats > 1:
        q, k = q.repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1)
    return q, k
