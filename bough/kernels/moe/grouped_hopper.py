"""Experts of many tokens on Hopper: products in large tiles, grouped by expert (`grouped_hopper.cu`).

Tokens are laid out by expert (`grouping`), multiplied with gate and up and activated, multiplied with down, and summed.
Weights are bf16, or e4m3 with a scale per row; then tokens are rounded to e4m3 as well, with a scale each.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from bough.kernels.ahead import rehearsed
from bough.kernels.cuda_source import CudaKernel, cached_cubin, can_map, current_stream, runs_on, tensor_map
from bough.kernels.linear.gated_hopper import Tiling
from bough.kernels.moe.grouping import Grouping, group_tokens, round_rows, sum_parts

SOURCE = Path(__file__).with_suffix(".cu")
_ROW_BYTES = 128
"""Of a token or a weight row, that a step along the depth takes."""
LEAST_STEPS = 5
"""Along the depth. With fewer than the ring has stages, one warpgroup of a block could be a tile ahead of the other."""
LEAST_PAIRS, LEAST_PAIRS_FP8 = 56, 24
"""(Token, expert) pairs of an expert, on average, from which on its weights are multiplied in tiles. With 128 experts of
768 units in a model of 2,048 on an H200, us of a layer, the portable kernels first: 16 pairs 306 and 334, 64 396 and 379,
128 635 and 497, 256 1203 and 720, 512 2179 and 1229, 1,024 4071 and 2302; with 66 of 1,408 units, 24 pairs 294 and 320. The
portable kernels' tiles of 64 tokens hold all of an expert's up to about 56 pairs, and are read once up to there."""
LOW_PAIRS_FP8 = 300
"""Pairs up to which tiles of 64 rows are faster with e4m3 (256 pairs: 543 and 562 us; 512 pairs: 970 and 955). With bf16
those of 128 are (64 pairs: 430 and 379)."""
HIGH_PAIRS = 2048
"""Pairs from which on tiles of 256 rows are used, which fetch less for a product; with 1,024 pairs they take 3 % longer
than 128."""


@dataclass(frozen=True, slots=True)
class GroupedTilings:
    """Tilings of both products. Their tiles are equally high, since they share a list."""

    gate_up: Tiling
    down: Tiling

    @property
    def height(self) -> int:
        return self.gate_up.tokens


def _tiling(features: int, *, parts: int = 1, turns: int = 1, stages: int, lag: int = 1) -> Tiling:
    return Tiling(
        features, pair_along_tokens=False, group=1, lag=lag, stages=stages, parts=parts, turns=turns, streamed=False
    )


HIGH = (
    _tiling(96, parts=2, stages=3, lag=2),
    _tiling(104, parts=2, stages=3, lag=2),
    _tiling(88, parts=2, stages=3, lag=2),
)
"""Tiles of 256 rows."""
MIDDLE = (_tiling(128, stages=4), _tiling(112, stages=4), _tiling(96, stages=4))
"""Of 128."""
LOW = (_tiling(128, turns=2, stages=4), _tiling(112, turns=2, stages=4), _tiling(96, turns=2, stages=5))
"""Of 64."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Stacked weights of a layer's experts."""

    gate_up_E2FD: Tensor
    down_EDF: Tensor
    gate_up_scale_E2F: Tensor | None = None
    """float32; None: weights are bf16."""
    down_scale_ED: Tensor | None = None

    @property
    def is_fp8(self) -> bool:
        return self.gate_up_scale_E2F is not None


def cut_for(num_pairs: int, num_experts: int, inner: int, width: int, *, fp8: bool = False) -> GroupedTilings:
    """How experts of `inner` units and `width` features are cut for `pairs` pairs."""
    per_expert = num_pairs / num_experts
    is_low = fp8 and per_expert <= LOW_PAIRS_FP8
    of = list(HIGH if per_expert > HIGH_PAIRS else LOW if is_low else MIDDLE)
    if fp8:  # scales take registers that two parts of 104 features don't leave
        of = [tiling for tiling in of if tiling.parts * tiling.features <= 2 * 96]
    return GroupedTilings(
        max(of, key=lambda tiling: _use(inner, 2 * tiling.features)),
        max(of, key=lambda tiling: _use(width, 4 * tiling.features)),
    )


def _use(columns: int, of_pair: int) -> float:
    """The part of a product's columns that is real, if a pair of blocks computes `of_pair` of them."""
    return columns / (-(-columns // of_pair) * of_pair)


@dataclass(frozen=True, slots=True)
class _Loaded:
    kernel: CudaKernel
    pairs: int
    """That run at once."""


def _defines(tiling: Tiling, *, gated: bool, fp8: bool) -> dict[str, int]:
    given = {**tiling.defines(), "GATED": int(gated), "FP8": int(fp8)}
    del given["GROUP"], given["PAIR_ALONG_T"]
    return given


@rehearsed
@cache
def _loaded(tiling: Tiling, gated: bool, fp8: bool, device: torch.device) -> _Loaded:
    cubin = cached_cubin(SOURCE, "sm_90a", _defines(tiling, gated=gated, fp8=fp8))
    kernel = CudaKernel(cubin, "grouped_hopper", device, threads=384, shared_bytes=tiling.shared_bytes())
    return _Loaded(kernel, kernel.most_clusters(2))


def load_cuts(cuts: Sequence[GroupedTilings], device: torch.device, *, fp8: bool) -> None:
    """Compiles what these cuts need, all at once, and loads it. Raises CudaSourceError."""
    wanted = {(cut.gate_up, True) for cut in cuts} | {(cut.down, False) for cut in cuts}
    with ThreadPoolExecutor(len(wanted)) as pool:
        list(pool.map(lambda w: cached_cubin(SOURCE, "sm_90a", _defines(w[0], gated=w[1], fp8=fp8)), wanted))
    for tiling, gated in wanted:
        _loaded(tiling, gated, fp8, device)


@rehearsed
@cache
def is_ready(device: torch.device, inner: int, width: int, fp8: bool) -> bool:
    """Whether the kernel can be had on a device; says why not where it could be expected.

    All it may be asked for by a model's experts is loaded at once: later it might be in the middle of a graph's capture.
    """

    def load() -> None:
        of_each = (1, HIGH_PAIRS, HIGH_PAIRS + 1)
        load_cuts([cut_for(pairs, 1, inner, width, fp8=fp8) for pairs in of_each], device, fp8=fp8)

    return runs_on(device, load, "experts of many tokens are multiplied by the portable kernel")


def suits(x_TD: Tensor, weights: Weights, ids_Tk: Tensor, activation: str) -> bool:
    """Whether `experts` serves these, and is the fastest that does."""
    num_experts, width, inner = weights.down_EDF.shape
    least = LEAST_PAIRS_FP8 if weights.is_fp8 else LEAST_PAIRS
    if ids_Tk.numel() < least * num_experts or activation != "silu" or x_TD.dtype != torch.bfloat16:
        return False
    return can_serve(weights) and is_ready(x_TD.device, inner, width, weights.is_fp8)


def can_serve(weights: Weights) -> bool:
    """Whether the kernel takes these weights."""
    stacks = (weights.gate_up_E2FD, weights.down_EDF)
    dtype = torch.float8_e4m3fn if weights.is_fp8 else torch.bfloat16
    if any(each.dtype != dtype or not each.is_contiguous() or not can_map(each.flatten(0, 1)) for each in stacks):
        return False
    _, width, inner = weights.down_EDF.shape
    return takes(width, inner, dtype)


def takes(width: int, inner: int, dtype: torch.dtype) -> bool:
    """Whether the kernel takes experts of these sizes."""
    return width % 8 == inner % 8 == 0 and min(width, inner) * dtype.itemsize >= LEAST_STEPS * _ROW_BYTES


def experts(
    x_TD: Tensor,
    weights: Weights,
    topk_weights_Tk: Tensor,
    topk_ids_Tk: Tensor,
    out_TD: Tensor,
    cut: GroupedTilings | None = None,
) -> None:
    """As `fused_experts` with silu, into out_TD."""
    num_experts, width, inner = weights.down_EDF.shape
    fp8 = weights.is_fp8
    cut = cut or cut_for(topk_ids_Tk.numel(), num_experts, inner, width, fp8=fp8)
    grouping, rows, scales = group_tokens(x_TD, topk_ids_Tk, num_experts, cut.height, fp8=fp8)
    hidden = torch.empty((grouping.num_rows, inner), dtype=torch.bfloat16, device=x_TD.device)
    product(rows, weights.gate_up_E2FD, hidden, grouping, cut.gate_up, scales, weights.gate_up_scale_E2F, gated=True)
    if fp8:
        hidden, scales = round_rows(hidden)
        parts = torch.empty((grouping.num_rows, width), dtype=torch.bfloat16, device=x_TD.device)
    else:
        parts = rows  # which were read by the first product, and are as large
    product(hidden, weights.down_EDF, parts, grouping, cut.down, scales, weights.down_scale_ED, gated=False)
    sum_parts(parts, topk_weights_Tk, grouping, out_TD)


def product(
    rows: Tensor,
    weight_ERD: Tensor,
    out: Tensor,
    grouping: Grouping,
    tiling: Tiling,
    scales: Tensor | None,
    weight_scales: Tensor | None,
    *,
    gated: bool,
) -> None:
    """Fills the rows of `out` that belong to pairs with rows @ weight[expert].T; `gated`: activated, half as wide."""
    flat, columns = weight_ERD.flatten(0, 1), out.shape[1]
    loaded = _loaded(tiling, gated, scales is not None, rows.device)
    of_tile = tiling.features if gated else 2 * tiling.features
    f_tiles = -(-columns // (2 * of_tile))
    maps = (
        tensor_map(rows, tiling.tokens // 2),
        tensor_map(flat, tiling.features),
        tensor_map(out, 64, tiling.features if tiling.features // 8 % 2 else None),
    )
    steps = -(-rows.shape[1] * rows.element_size() // _ROW_BYTES)
    apart = columns if gated else tiling.features
    given = (*maps, grouping.tiles, grouping.num_tiles, scales, weight_scales)
    sizes = (f_tiles, steps, weight_ERD.shape[1], apart, columns)
    loaded.kernel.launch(2 * loaded.pairs, (*given, *sizes), current_stream(rows.device))
