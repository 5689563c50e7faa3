"""Masks by plain torch: says what the others must do."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_masks(logits_RV: Tensor, rows_M: Tensor, masks_MW: Tensor) -> None:
    num_tokens = logits_RV.shape[1]
    tokens_V = torch.arange(num_tokens, device=logits_RV.device)
    word_V = (tokens_V // 32).clamp_max(masks_MW.shape[1] - 1)
    allowed_MV = ((masks_MW[:, word_V] >> (tokens_V % 32).int()) & 1).bool() & (tokens_V < 32 * masks_MW.shape[1])
    logits_RV.index_copy_(0, rows_M, logits_RV[rows_M].masked_fill(~allowed_MV, -torch.inf))
