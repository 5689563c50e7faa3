"""Mamba 2's recurrence in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_TOKENS = 64
"""Tokens that read each other by one product: more cost quadratically, fewer make more launches."""


def scan_row(
    x_LHP: Tensor, dt_LH: Tensor, a_H: Tensor, b_LGN: Tensor, c_LGN: Tensor, d_H: Tensor, state_HPN: Tensor
) -> Tensor:
    read_LHP = d_H[:, None] * x_LHP
    added_LHP, decay_LH = x_LHP * dt_LH[:, :, None], dt_LH * a_H
    for first in range(0, len(x_LHP), CHUNK_TOKENS):
        part = slice(first, first + CHUNK_TOKENS)
        x, g, b, c = (each[part].transpose(0, 1) for each in (added_LHP, decay_LH, b_LGN, c_LGN))
        read_LHP[part] += _chunk(x, g, b, c, state_HPN).transpose(0, 1)
    return read_LHP


def _chunk(x_HLP: Tensor, g_HL: Tensor, b_GLN: Tensor, c_GLN: Tensor, state_HPN: Tensor) -> Tensor:
    """With T the sum of g up to a token: y_i = exp(T_i) S c_i + sum over j <= i of exp(T_i - T_j) (c_i b_j) x_j."""
    heads = len(x_HLP) // len(b_GLN)
    total_HL = g_HL.cumsum(1)
    decay_HLL = (total_HL[:, :, None] - total_HL[:, None, :]).tril().exp().tril()
    c_HLN, b_HLN = (each.repeat_interleave(heads, 0) if heads > 1 else each for each in (c_GLN, b_GLN))
    seen_HLL = (c_GLN @ b_GLN.transpose(1, 2)).repeat_interleave(heads, 0) * decay_HLL
    read_HLP: Tensor = seen_HLL @ x_HLP + total_HL.exp()[:, :, None] * (c_HLN @ state_HPN.transpose(1, 2))
    left_HL1 = (total_HL[:, -1:] - total_HL).exp()[:, :, None]
    state_HPN.mul_(total_HL[:, -1].exp()[:, None, None]).add_((x_HLP * left_HL1).transpose(1, 2) @ b_HLN)
    return read_HLP


def step_rows(
    x_RHP: Tensor, dt_RH: Tensor, a_H: Tensor, b_RGN: Tensor, c_RGN: Tensor, d_H: Tensor, states_SHPN: Tensor, at_R: Tensor
) -> Tensor:  # fmt: skip
    (rows, heads, width), groups = x_RHP.shape, b_RGN.shape[1]
    state_RHPN = states_SHPN[at_R]
    state_RHPN *= (dt_RH * a_H).exp_()[:, :, None, None]
    by_group = state_RHPN.view(rows, groups, heads // groups * width, -1)  # [R, G, heads of a group x P, N]
    added = (x_RHP * dt_RH[:, :, None]).view(rows, groups, -1, 1)
    by_group.addcmul_(added, b_RGN[:, :, None, :])
    states_SHPN[at_R] = state_RHPN
    return torch.addcmul((by_group @ c_RGN[:, :, :, None]).view(x_RHP.shape), d_H[:, None], x_RHP)
