"""Masks on the CPU, a row at a time: a row's bits are spread by numpy and used at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def apply_masks(logits_RV: Tensor, rows_M: Tensor, masks_MW: Tensor) -> None:
    num_tokens = logits_RV.shape[1]
    forbidden_MB = np.invert(masks_MW.numpy()).view(np.uint8)
    for row, forbidden_B in zip(rows_M.tolist(), forbidden_MB, strict=True):
        forbidden_V = torch.from_numpy(np.unpackbits(forbidden_B, count=num_tokens, bitorder="little"))
        covered = min(num_tokens, 8 * len(forbidden_B))
        logits_RV[row, :covered].masked_fill_(forbidden_V[:covered].view(torch.bool), -torch.inf)
        logits_RV[row, covered:] = -torch.inf
