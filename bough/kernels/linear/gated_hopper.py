"""silu(x @ gate.T) * (x @ up.T) for many rows on Hopper: one kernel, the halves never leave the multiprocessor.

The kernel is `gated_hopper.cu`; this is its door: how the product is cut, and what it can be asked.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from bough.kernels.choices import facts_of
from bough.kernels.cuda_source import CudaKernel, CudaSourceError, cached_cubin, can_map, tensor_map

log = logging.getLogger("bough.kernels")

SOURCE = Path(__file__).with_suffix(".cu")
FEATURES = 128
"""Features of a block's tile: as many gate rows, and as many up rows."""
TOKENS = 128
"""Tokens of a block's tile."""
DEPTH = 64
"""Of D, a step."""
LEAST_STEPS = 8
"""A shorter D would let warpgroups run a whole tile apart."""
LEAST_USE = 0.88
"""Of the multiprocessors' time, by tiles that are whole and waves that are full; measured on an H200: at 0.97 the kernel
takes 4 to 7 % less than the vendor's product and an activation after it, at 0.85 7 % more."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the product is cut."""

    pair_along_tokens: bool = True
    """The two blocks of a pair have the same features (and fetch the weight together), not the same tokens."""
    group: int = 8
    """Tiles of a pair along the tokens before the next features."""
    lag: int = 1
    """Steps along D between the warpgroups of a block."""
    stages: int = 4

    def defines(self) -> Mapping[str, int]:
        return {
            "PAIR_ALONG_T": int(self.pair_along_tokens),
            "GROUP": self.group,
            "LAG": self.lag,
            "STAGES": self.stages,
        }

    def tiles(self, tokens: int, features: int) -> tuple[int, int]:
        """Tiles of a pair along tokens and along features."""
        along = (2, 1) if self.pair_along_tokens else (1, 2)
        return -(-tokens // (TOKENS * along[0])), -(-features // (FEATURES * along[1]))

    def use(self, tokens: int, features: int, pairs: int) -> float:
        """The part of the multiprocessors' time that goes into results, if `pairs` of them work at once."""
        t_tiles, f_tiles = self.tiles(tokens, features)
        waves = -(-t_tiles * f_tiles // pairs)
        return tokens * features / (waves * pairs * 2 * TOKENS * FEATURES)

    def shared_bytes(self) -> int:
        """The ring, what is about to be stored, the barriers, and room to align them all to 1024."""
        stage = (TOKENS + 2 * FEATURES) * DEPTH * 2
        return self.stages * (stage + 2 * 8) + TOKENS * FEATURES * 2 + 1024


@dataclass(frozen=True, slots=True)
class _Loaded:
    kernel: CudaKernel
    pairs: int
    """That run at once."""


@cache
def _loaded(tiling: Tiling, device: torch.device) -> _Loaded:
    cubin = cached_cubin(SOURCE, "sm_90a", tiling.defines())
    kernel = CudaKernel(cubin, "gated_hopper", device, threads=384, shared_bytes=tiling.shared_bytes())
    return _Loaded(kernel, kernel.most_clusters(2))


@cache
def _is_ready(device: torch.device) -> bool:
    """Whether the kernel can be had on a device; says why where it could be expected."""
    if facts_of(device.type, device.index).capability != (9, 0):
        return False
    try:
        _loaded(Tiling(), device)
    except CudaSourceError as error:
        log.warning("gate and up are activated in a pass of their own: %s", error)
        return False
    return True


def pays(x_TD: Tensor, weight_2FD: Tensor) -> bool:
    """Whether `gated` serves these matrices, and faster than a product and an activation after it."""
    if not can_serve(x_TD, weight_2FD) or not _is_ready(x_TD.device):
        return False
    tiling, tokens, features = Tiling(), x_TD.shape[0], weight_2FD.shape[0] // 2
    pairs = _loaded(tiling, x_TD.device).pairs
    return tiling.use(tokens, features, pairs) >= LEAST_USE


def can_serve(x_TD: Tensor, weight_2FD: Tensor) -> bool:
    """Whether the kernel takes these matrices."""
    features, depth = weight_2FD.shape[0] // 2, weight_2FD.shape[1]
    if x_TD.dim() != 2 or x_TD.shape[0] == 0 or x_TD.dtype != torch.bfloat16 or weight_2FD.dtype != torch.bfloat16:
        return False
    return can_map(x_TD) and can_map(weight_2FD) and features % 8 == 0 and depth >= LEAST_STEPS * DEPTH


def gated(x_TD: Tensor, weight_2FD: Tensor, tiling: Tiling, out_TF: Tensor | None = None) -> Tensor:
    """[T, F] of matrices for which `can_serve`, written into `out_TF` if there is one. Raises CudaSourceError."""
    tokens, depth = x_TD.shape
    features = weight_2FD.shape[0] // 2
    out = torch.empty((tokens, features), dtype=x_TD.dtype, device=x_TD.device) if out_TF is None else out_TF
    loaded = _loaded(tiling, x_TD.device)
    t_tiles, f_tiles = tiling.tiles(tokens, features)
    maps = (
        tensor_map(x_TD, TOKENS if tiling.pair_along_tokens else TOKENS // 2),
        tensor_map(weight_2FD, FEATURES),
        tensor_map(out, 64),
    )
    blocks = 2 * min(loaded.pairs, t_tiles * f_tiles)
    steps = -(-depth // DEPTH)
    stream = torch.cuda.current_stream(x_TD.device).cuda_stream
    loaded.kernel.launch(blocks, (*maps, t_tiles, f_tiles, steps, features), stream)
    return out
