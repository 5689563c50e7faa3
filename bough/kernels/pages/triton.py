# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Copies of pages on the GPU: one launch for all caches, which the kernel finds by their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.launching import cdiv
from bough.kernels.pages import reference

_WORDS = 4096
"""4-byte words that one program copies."""


@triton.jit(do_not_specialize=["words"])
def _copy_kernel(addresses, source, target, words, WORDS: tl.constexpr):
    base = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    come_from = tl.load(source + tl.program_id(1)) * words
    go_to = tl.load(target + tl.program_id(1)) * words
    at = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    inside = at < words
    tl.store(base + go_to + at, tl.load(base + come_from + at, mask=inside, other=0), mask=inside)


@cache
def _addresses(caches: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(caches, dtype=torch.int64, device=device)


def copy_pages(caches: Sequence[Tensor], source_M: Tensor, target_M: Tensor) -> None:
    by_words: dict[int, list[int]] = {}
    for each in caches:
        num_bytes = each.stride(0) * each.element_size()
        if num_bytes % 4 or not each.is_contiguous():
            reference.copy_pages([each], source_M, target_M)
        else:
            by_words.setdefault(num_bytes // 4, []).append(each.data_ptr())
    for words, addresses in by_words.items():
        grid = (len(addresses), len(source_M), cdiv(words, _WORDS))
        _copy_kernel[grid](_addresses(tuple(addresses), source_M.device), source_M, target_M, words, WORDS=_WORDS)
