"""silu(x @ gate.T) * (x @ up.T) for many rows on Hopper: one kernel, the halves never leave the multiprocessor.

The kernel is `gated_hopper.cu`; this is its door: how the product is cut, and what it can be asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from bough.kernels.ahead import rehearsed
from bough.kernels.cuda_source import CudaKernel, cached_cubin, can_map, current_stream, runs_on, tensor_map

SOURCE = Path(__file__).with_suffix(".cu")
DEPTH = 64
"""Of D, a step."""
LEAST_STEPS = 8
"""A shorter D would let warpgroups run a whole tile apart."""
LEAST_USE = 0.88
"""Of the multiprocessors' time, by tiles that are whole and waves that are full; measured on an H200: at 0.97 the kernel
takes 4 to 7 % less than the vendor's product and an activation after it, at 0.85 7 % more."""
NEAR_USE = 0.02
"""Less than this isn't worth a tiling that comes later among `TILINGS`."""
LEAST_TOKENS = 65
"""With fewer, half of every tile would be empty."""
FEW_TOKENS, FEW_TILE = 256, 128
"""Up to FEW_TOKENS tokens, reading the weight takes about as long as multiplying: a tile of up to FEW_TILE rows may have
empty ones."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the product is cut."""

    features: int = 128
    """Of a block's tile: as many gate rows, and as many up rows."""
    pair_along_tokens: bool = True
    """The two blocks of a pair have the same features (and fetch the weight together), not the same tokens."""
    group: int = 8
    """Tiles of a pair along the tokens before the next features."""
    lag: int = 1
    """Steps along D between the warpgroups of a block that share a tile."""
    stages: int = 4
    parts: int = 1
    """Of 64 tokens, that a warpgroup multiplies at once."""
    turns: int = 1
    """2: the warpgroups of a block have every other tile each, and one multiplies while the other activates."""
    streamed: bool = False
    """Weights and results pass through L2 without displacing the tokens, which are read again for the next features."""

    @property
    def tokens(self) -> int:
        """Of a block's tile."""
        return 64 * self.parts * 2 // self.turns

    def defines(self) -> Mapping[str, int]:
        return {
            "FEATURES": self.features,
            "PAIR_ALONG_T": int(self.pair_along_tokens),
            "GROUP": self.group,
            "LAG": self.lag,
            "STAGES": self.stages,
            "PARTS": self.parts,
            "TURNS": self.turns,
            "STREAMED": int(self.streamed),
        }

    def tiles(self, tokens: int, features: int) -> tuple[int, int]:
        """Tiles of a pair along tokens and along features."""
        along = (2, 1) if self.pair_along_tokens else (1, 2)
        return -(-tokens // (self.tokens * along[0])), -(-features // (self.features * along[1]))

    def use(self, tokens: int, features: int, pairs: int) -> float:
        """The part of the multiprocessors' time that goes into results, if `pairs` of them work at once."""
        t_tiles, f_tiles = self.tiles(tokens, features)
        waves = -(-t_tiles * f_tiles // pairs)
        return tokens * features / (waves * pairs * 2 * self.tokens * self.features)

    def shared_bytes(self) -> int:
        """The ring, what is about to be stored, the barriers, and room to align them all to 1024."""
        stage = (self.tokens + 2 * self.features) * DEPTH * 2
        stored = 2 * 64 * 128 * 2  # of each of two warpgroups 64 tokens, at most 128 features
        return self.stages * (stage + 2 * 8) + stored + 1024


TILINGS = (
    Tiling(104, True, group=4, lag=2, stages=3, parts=2, streamed=True),
    Tiling(88, True, group=8, stages=5, parts=2, turns=2),
    *(Tiling(features, along, group) for along, group in ((True, 8), (False, 16)) for features in (128, 112, 96)),
)
"""Those that are chosen from, the best first where they use multiprocessors alike. Thousands of tokens run at the power
cap, where it counts how much is fetched for a product (it would be a seventh faster if nothing were), not how busy tensor
cores are: the largest tiles first. Sustained on an H200 with 14336 features of 4096, us at 8,192 and at 2,048 tokens: 2760
and 732 with the first (2810 if not streamed), 2840 and 714 with the second (whose small tiles fill the last wave), 2870 and
730 with the third."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    kernel: CudaKernel
    pairs: int
    """That run at once."""


@rehearsed
@cache
def _loaded(tiling: Tiling, device: torch.device) -> _Loaded:
    cubin = cached_cubin(SOURCE, "sm_90a", tiling.defines())
    kernel = CudaKernel(cubin, "gated_hopper", device, threads=384, shared_bytes=tiling.shared_bytes())
    return _Loaded(kernel, kernel.most_clusters(2))


@rehearsed
@cache
def _is_ready(device: torch.device) -> bool:
    """Whether the kernel can be had on a device; says why not where it could be expected.

    All tilings are loaded at once: later it might be in the middle of a graph's capture.
    """

    def load() -> None:
        with ThreadPoolExecutor(len(TILINGS)) as pool:
            list(pool.map(lambda tiling: cached_cubin(SOURCE, "sm_90a", tiling.defines()), TILINGS))
        for tiling in TILINGS:
            _loaded(tiling, device)

    return runs_on(device, load, "gate and up are activated in a pass of their own")


@lru_cache(maxsize=4096)
def best_tiling(tokens: int, features: int, pairs: int) -> Tiling | None:
    """How a product is cut for `pairs` pairs of multiprocessors; None if they would be idle too long."""
    if tokens < LEAST_TOKENS:
        return None
    counted = -(-tokens // FEW_TILE) * FEW_TILE if tokens <= FEW_TOKENS else tokens
    uses = [tiling.use(counted, features, pairs) for tiling in TILINGS]
    best = max(uses)
    if best < LEAST_USE:
        return None
    return next(tiling for tiling, use in zip(TILINGS, uses, strict=True) if use >= best - NEAR_USE)


def tiling_for(x_TD: Tensor, weight_2FD: Tensor) -> Tiling | None:
    """With which `gated` serves these matrices faster than a product and an activation after it; None: it doesn't."""
    if x_TD.shape[0] < LEAST_TOKENS or not can_serve(x_TD, weight_2FD) or not _is_ready(x_TD.device):
        return None
    return best_tiling(x_TD.shape[0], weight_2FD.shape[0] // 2, _loaded(TILINGS[0], x_TD.device).pairs)


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
    out = x_TD.new_empty((tokens, features)) if out_TF is None else out_TF
    loaded = _loaded(tiling, x_TD.device)
    t_tiles, f_tiles = tiling.tiles(tokens, features)
    maps = (
        tensor_map(x_TD, tiling.tokens if tiling.pair_along_tokens else tiling.tokens // 2),
        tensor_map(weight_2FD, tiling.features),
        tensor_map(out, 64, tiling.features if tiling.features // 8 % 2 else None),
    )
    blocks = 2 * min(loaded.pairs, t_tiles * f_tiles)
    steps = -(-depth // DEPTH)
    loaded.kernel.launch(blocks, (*maps, t_tiles, f_tiles, steps, features), current_stream(x_TD.device))
    return out
