"""Scales of keys and values that are cached in FP8, taken from the first prompts.

The first step that computes a prompt measures each layer's keys and values before the layer writes any of them. No page
holds anything by then, so that every page is written with the scales that it is read with: they never change afterwards.

Scales are powers of two. Numbers that neither overflow nor come close to zero are rounded alike whatever the power is, so
that answers do not depend on which prompts came first, and ranks that hold different heads need not agree.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from bough.layers.batch import AttentionBackend, AttentionSpec, IndexQueries, chooses
from bough.memory.mha import KVPool

_log = logging.getLogger(__name__)

HEADROOM = 32.0
"""Numbers up to this many times the largest one of the first prompts can be kept. A lone token of SmolLM2-135M has values
14 times smaller than those of a text, keys 7 times; ten tokens come within a factor of 1.6. It costs next to nothing:
numbers down to 1 / 450 of the largest keep all bits of FP8 E4M3, smaller ones fewer."""


class MeasuringAttention:
    """An attention backend around another one, for the step that scales are taken from."""

    def __init__(self, inner: AttentionBackend, pool: KVPool) -> None:
        """`inner` reads its scales from the pool's lists."""
        self._inner = inner
        self._pool = pool

    def forward(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """[T, N * V]. Waits for the device."""
        pool, layer = self._pool, spec.layer
        pool.k_scales[layer] = fitting_scale(k_TKH, pool.keys[layer].dtype)
        # Values of latents are part of the keys.
        pool.v_scales[layer] = pool.k_scales[layer] if spec.latent else fitting_scale(v_TKH, pool.values[layer].dtype)
        return self._inner.forward(spec, q_TNH, k_TKH, v_TKH)

    def choose(self, spec: AttentionSpec, index: IndexQueries) -> None:
        """As `ChoosingBackend`."""
        assert chooses(self._inner), "asked for by models whose backends do"
        self._inner.choose(spec, index)

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """[T, N * V], of KV that is in the pages."""
        return self._inner.attend(spec, q_TNH)


def fitting_scale(values: Tensor, dtype: torch.dtype) -> float:
    """The smallest power of two that leaves `HEADROOM` for larger numbers; 1 if there are none, or not all are finite."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not largest or not math.isfinite(largest):
        return 1.0
    return float(2.0 ** math.ceil(math.log2(largest * HEADROOM / torch.finfo(dtype).max)))


def log_scales(pool: KVPool, num_tokens: int) -> None:
    _log.info(
        "scales of keys are 2^%d to 2^%d, of values 2^%d to 2^%d, by %d tokens of the first prompts",
        *(math.log2(pick(scales)) for scales in (pool.k_scales, pool.v_scales) for pick in (min, max)),
        num_tokens,
    )
