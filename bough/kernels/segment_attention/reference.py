"""Segments of one length are computed together, by torch's own attention: an image has many windows of the same size, and
a video many frames. No token is padded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend_segments(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    num_tokens, num_heads = q_TNH.shape[:2]
    out_TNH = torch.empty((num_tokens, num_heads, v_TNH.shape[2]), dtype=q_TNH.dtype, device=q_TNH.device)
    start = 0
    for length, same in groupby(lengths):
        count = sum(1 for _ in same)
        part = slice(start, start + count * length)
        q, k, v = (each[part].view(count, length, num_heads, -1).transpose(1, 2) for each in (q_TNH, k_TNH, v_TNH))
        read = scaled_dot_product_attention(q, k, v, scale=scale)
        out_TNH[part] = read.transpose(1, 2).reshape(count * length, num_heads, -1)
        start = part.stop
    return out_TNH.view(num_tokens, -1)
