"""Mamba's recurrence in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCKS = 8
BLOCK_TOKENS = 8
"""A chunk has 64 tokens: the states of all of them are in memory at once."""


def scan_row(
    x_LC: Tensor, dt_LC: Tensor, a_CN: Tensor, b_LN: Tensor, c_LN: Tensor, d_C: Tensor, state_CN: Tensor
) -> Tensor:
    read_LC = d_C * x_LC
    for first in range(0, len(x_LC), BLOCKS * BLOCK_TOKENS):
        part = slice(first, first + BLOCKS * BLOCK_TOKENS)
        read_LC[part] += _chunk(x_LC[part] * dt_LC[part], dt_LC[part], a_CN, b_LN[part], c_LN[part], state_CN)
    return read_LC


def _chunk(x_LC: Tensor, dt_LC: Tensor, a_CN: Tensor, b_LN: Tensor, c_LN: Tensor, state_CN: Tensor) -> Tensor:
    """Blocks are advanced side by side as if each began at zero, with how much of an earlier state is left; then what each
    begins with is added to its tokens."""
    length = len(x_LC)
    missing = -length % BLOCK_TOKENS
    x, dt, b = (torch.nn.functional.pad(each, (0, 0, 0, missing)) for each in (x_LC, dt_LC, b_LN))
    added = (x[:, :, None] * b[:, None, :]).view(-1, BLOCK_TOKENS, *a_CN.shape)  # [B, K, C, N]
    left = (dt[:, :, None] * a_CN).exp_().view(added.shape)
    for at in range(1, BLOCK_TOKENS):
        added[:, at].addcmul_(left[:, at], added[:, at - 1])
        left[:, at] *= left[:, at - 1]
    for block in range(len(added)):
        added[block].addcmul_(left[block], state_CN)
        state_CN.copy_(added[block, -1])  # behind the last token nothing is added, and nothing decays
    seen_LCN = added.flatten(0, 1)[:length]
    read_LC: Tensor = (seen_LCN @ c_LN[:, :, None]).squeeze(2)
    return read_LC


def step_rows(
    x_RC: Tensor, dt_RC: Tensor, a_CN: Tensor, b_RN: Tensor, c_RN: Tensor, d_C: Tensor, states_SCN: Tensor, at_R: Tensor
) -> Tensor:
    state_RCN = states_SCN[at_R]
    state_RCN *= (dt_RC[:, :, None] * a_CN).exp_()
    state_RCN.addcmul_((x_RC * dt_RC)[:, :, None], b_RN[:, None, :])
    states_SCN[at_R] = state_RCN
    return torch.addcmul((state_RCN @ c_RN[:, :, None]).squeeze(2), d_C, x_RC)
