"""The gated delta rule in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_TOKENS = 64
"""Tokens whose corrections are found together, by a triangular system: more cost quadratically, fewer make more launches."""


LEAST_SQUARE = 1e-6
"""Added to the square of a query's or key's length, which may be 0."""


def scan_row(q_LGK: Tensor, k_LGK: Tensor, v_LHV: Tensor, g_LH: Tensor, b_LH: Tensor, state_HKV: Tensor) -> Tensor:
    read = torch.empty(v_LHV.shape, dtype=v_LHV.dtype, device=v_LHV.device)
    q_LHK, k_LHK = _by_value_head(q_LGK, k_LGK, v_LHV.shape[1])
    for first in range(0, len(read), CHUNK_TOKENS):
        part = slice(first, first + CHUNK_TOKENS)
        q, k, v, g, b = (each[part].transpose(0, 1) for each in (q_LHK, k_LHK, v_LHV, g_LH, b_LH))
        read[part] = _chunk(q, k, v, g, b, state_HKV).transpose(0, 1)
    return read


def _chunk(q_HLK: Tensor, k_HLK: Tensor, v_HLV: Tensor, g_HL: Tensor, b_HL: Tensor, state_HKV: Tensor) -> Tensor:
    """With G the sum of g up to a token and d what each adds at its key:
    d_i = b_i (v_i - exp(G_i) S^T k_i - sum over j < i of exp(G_i - G_j) (k_i k_j) d_j)."""
    total_HL = g_HL.cumsum(1)
    decay_HLL = (total_HL[:, :, None] - total_HL[:, None, :]).tril().exp().tril()
    within_HLL = b_HL[:, :, None] * (k_HLK @ k_HLK.transpose(1, 2)) * decay_HLL
    since_HL1 = total_HL.exp()[:, :, None]
    known_HLV = b_HL[:, :, None] * (v_HLV - since_HL1 * (k_HLK @ state_HKV))
    added_HLV = torch.linalg.solve_triangular(within_HLL.tril(-1), known_HLV, upper=False, unitriangular=True)
    read_HLV: Tensor = since_HL1 * (q_HLK @ state_HKV) + (q_HLK @ k_HLK.transpose(1, 2) * decay_HLL) @ added_HLV
    left_HL1 = (total_HL[:, -1:] - total_HL).exp()[:, :, None]
    state_HKV.mul_(total_HL[:, -1].exp()[:, None, None]).add_((k_HLK * left_HL1).transpose(1, 2) @ added_HLV)
    return read_HLV


def step_rows(
    q_RGK: Tensor, k_RGK: Tensor, v_RHV: Tensor, g_RH: Tensor, b_RH: Tensor, states_SHKV: Tensor, at_R: Tensor
) -> Tensor:
    q_RHK, k_RHK = _by_value_head(q_RGK, k_RGK, v_RHV.shape[1])
    state_RHKV = states_SHKV[at_R] * g_RH.exp()[:, :, None, None]
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
