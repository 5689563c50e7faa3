# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Masks on the GPU: every program reads a few words and writes only where their bits are clear. No logit is read."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import cdiv

_WORDS = 64


@triton.jit
def _mask_kernel(logits, rows, masks, V, W, stride, WORDS: tl.constexpr):
    at = tl.program_id(0)
    row = tl.load(rows + at).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(masks + at.to(tl.int64) * W + word, mask=word < W, other=0)
    bit = tl.arange(0, 32)
    token = word[:, None] * 32 + bit[None, :]
    forbidden = ((bits[:, None] >> bit[None, :]) & 1) == 0
    nothing = tl.full([WORDS, 32], float("-inf"), logits.dtype.element_ty)
    tl.store(logits + row * stride + token, nothing, mask=forbidden & (token < V))


def apply_masks(logits_RV: Tensor, rows_M: Tensor, masks_MW: Tensor) -> None:
    num_tokens = logits_RV.shape[1]
    grid = (len(rows_M), cdiv(num_tokens, 32 * _WORDS))
    _mask_kernel[grid](
        logits_RV, rows_M, masks_MW.contiguous(), num_tokens, masks_MW.shape[1], logits_RV.stride(0), WORDS=_WORDS
    )
