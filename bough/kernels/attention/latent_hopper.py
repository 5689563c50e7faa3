"""Attention of decode rows over latents on Hopper (`latent_hopper.cu`): clusters of thread blocks share a row's KV and its
merge, so that few rows are read by all multiprocessors.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from bough.kernels.ahead import rehearsed
from bough.kernels.attention.inputs import AttentionInputs, Spec
from bough.kernels.attention.plan import Plan, Shape
from bough.kernels.cuda_source import CudaKernel, cached_cubin, can_map, current_stream, runs_on, tensor_map
from bough.kernels.launching import num_sms, power_of_two

SOURCE = Path(__file__).with_suffix(".cu")
WIDTH, RANK = 576, 512
"""Numbers of a latent with its rotated key, and of the latent alone."""
MOST_HEADS = 16
BLOCK = 64
"""KV tokens of a stage."""
_FETCHED = BLOCK // 2
"""KV tokens that are fetched together."""
STAGES = 2
_QUERIES = 2
"""Rows whose queries a thread block holds."""
_WARPS = 9
_BOXES = WIDTH * 2 // 128
_LOG2E = 1.4426950408889634
_MOST_CLUSTER = 4


def _shape(cluster: int) -> Shape:
    """A chunk has two blocks for every multiprocessor of its cluster at least, as many as its ring holds."""
    return Shape(
        block_m=16, block_n=BLOCK, num_warps=_WARPS, num_stages=STAGES, ctas_per_sm=1,
        min_tokens=STAGES * BLOCK * cluster, sms_per_program=cluster, may_pad=True,
    )  # fmt: skip


SHAPES = {cluster: _shape(cluster) for cluster in (1, 2, _MOST_CLUSTER)}
CLUSTERS = ((4, 4), (32, 2))
"""(Rows, multiprocessors of a cluster): for up to that number of rows; for more rows each works alone. A graph is captured
for a number of rows whose contexts aren't known, so the number alone decides: up to four rows have fewer blocks than the
multiprocessors could fetch at once, and up to 32 rows have two clusters each. On an H200 with 16 heads, us a layer behind a
product, by multiprocessors of a cluster with chunks of one block and more for each, of two, and of two padded:

    rows x context    1 (one, two, padded)     2                        4                        32 tokens a block
    1 x 128            6.7    6.2    6.3        6.2    5.1    5.1        5.3    5.3    5.2        7.6
    1 x 15,000        51.1   51.2   51.3       23.2   23.2   23.1       16.2   16.1   16.1       24.2
    2 x 500            9.0    8.6    8.5        7.7    8.5    8.4        7.7    7.5    7.4        8.4
    4 x 2,000         18.6   14.5   14.4       11.8   11.5   11.5       14.1   11.2   11.1       18.6
    8 x 4,000         23.5   23.5   21.7       24.1   24.1   18.6       23.0   23.1   19.9       25.8
    12 x 700          11.6   11.9    9.3       15.2   13.7    8.9       14.1   14.7   10.2       13.1
    24 x 1,000        15.8   15.8   14.8       17.0   16.9   14.5       19.3   19.3   14.0       19.7
    100 x 600         30.4           27.9                                                        34.7
    200 x 300         32.1                                                                       36.9

The last column is a kernel with blocks of 32 tokens and products by warps.
"""
MOST_ROWS = 256
"""The portable kernel took 37.5 us with 100 rows of 600 tokens, and 30.0 with 200 of 300: with many more it is faster."""


class _Inputs(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "page_table", "tiles", "header", "chunk_tile")),
        *((name, ctypes.c_void_p) for name in ("counters", "partial", "stats")),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("tile_room", "page_size", "num_tokens")),
        ("scale_log2", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class LatentRoom:
    """Where thread blocks leave what they have of rows that are cut. One is enough for all launches of a stream."""

    partial: Tensor
    stats: Tensor
    counters: Tensor
    """int32, zero between launches."""

    def holds(self, plan: Plan) -> bool:
        """Whether it is large enough."""
        tiles, chunks = plan.tiles.shape[1], plan.num_chunks
        return len(self.counters) >= tiles * _MOST_CLUSTER and len(self.partial) >= 2 * chunks

    @staticmethod
    def make(plan: Plan, device: torch.device) -> LatentRoom:
        """For the plan, and for others that need less."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a graph would capture the zeroing of the counters: run once before")
        tiles = power_of_two(plan.tiles.shape[1], 1024)
        chunks = max(power_of_two(plan.num_chunks), num_sms(device), MOST_ROWS)
        return LatentRoom(
            torch.empty((2 * chunks, 16, RANK), dtype=torch.float32, device=device),
            torch.empty((2 * chunks, _MOST_CLUSTER, 2, 16), dtype=torch.float32, device=device),
            torch.zeros(tiles * _MOST_CLUSTER, dtype=torch.int32, device=device),
        )


def defines(heads: int, cluster: int) -> dict[str, int]:
    """What the source is given."""
    return {"HEADS": heads, "CLUSTER": cluster, "STAGES": STAGES}


def shared_bytes() -> int:
    """The ring, the queries, a block's weights, and room to align them to 1024."""
    return STAGES * BLOCK * WIDTH * 2 + _QUERIES * MOST_HEADS * WIDTH * 2 + MOST_HEADS * BLOCK * 2 + 1024


@dataclass(frozen=True, slots=True)
class _Loaded:
    kernel: CudaKernel
    clusters: int
    """That run at once."""


@rehearsed
@cache
def _loaded(device: torch.device, heads: int, cluster: int) -> _Loaded:
    cubin = cached_cubin(SOURCE, "sm_90a", defines(heads, cluster))
    kernel = CudaKernel(cubin, "decode_latents", device, threads=32 * _WARPS, shared_bytes=shared_bytes())
    return _Loaded(kernel, kernel.most_clusters(cluster) if cluster > 1 else num_sms(device))


@rehearsed
@cache
def _is_ready(device: torch.device, heads: int) -> bool:
    """Whether the kernel can be had on a device; says why not where it could be expected."""
    return all(
        runs_on(device, partial(_loaded, device, heads, cluster), "latents are read by the portable kernel")
        for cluster in (1, *{cluster for _, cluster in CLUSTERS})
    )


def suits(spec: Spec, inputs: AttentionInputs, q_TNH: Tensor) -> bool:
    """Whether the kernel should serve a layer of a step: one of decode rows alone, and of not too many."""
    if inputs.num_tokens > MOST_ROWS or inputs.max_query != 1:
        return False
    if inputs.shared is not None or inputs.tree is not None or inputs.tail is not None:
        return False
    cache_ = inputs.k_caches[spec.layer]
    shaped = spec.latent and (spec.head_dim, spec.v_head_dim) == (WIDTH, RANK) and spec.num_heads <= MOST_HEADS
    plain = spec.causal and all(
        each is None for each in (spec.window, spec.softcap, spec.chunk, spec.sinks, spec.slopes)
    )
    typed = q_TNH.dtype == cache_.dtype == torch.bfloat16 and inputs.scales(spec.layer) == (1.0, 1.0)
    paged = inputs.page_size % _FETCHED == 0 and cache_.is_contiguous() and cache_.shape[2:] == (1, WIDTH)
    held = not inputs.ranges and inputs.gaps_T2 is None
    return shaped and plain and typed and paged and held and _is_ready(q_TNH.device, spec.num_heads)


def shape_for(inputs: AttentionInputs) -> Shape:
    """How to plan the rows of a step."""
    return SHAPES[next((cluster for rows, cluster in CLUSTERS if inputs.num_tokens <= rows), 1)]


def fitted(shape: Shape, device: torch.device, heads: int) -> Shape:
    """A shape whose plans have no more chunks than clusters run at once: groups of multiprocessors on a device may not be
    whole numbers of clusters, and what is left over would wait for the others."""
    if device.type != "cuda" or shape.sms_per_program == 1:
        return shape
    return replace(shape, most_programs=_loaded(device, heads, shape.sms_per_program).clusters)


def attend(
    spec: Spec,
    inputs: AttentionInputs,
    plan: Plan,
    room: LatentRoom,
    q_TNX: Tensor,
    out_TNR: Tensor,
    *,
    after_plan: bool,
) -> None:
    """Fills `out_TNR` for a step and layer that the kernel `suits`, by a plan of one of `SHAPES`. `q_TNX` and `out_TNR` are
    contiguous.

    `after_plan`: the plan may just have been queued, so this launch must not start before it ends.
    """
    device, heads = q_TNX.device, spec.num_heads
    q, kv = q_TNX.view(-1, WIDTH), inputs.k_caches[spec.layer].view(-1, WIDTH)
    if not can_map(q) or not room.holds(plan):
        raise ValueError(f"queries of {tuple(q_TNX.shape)} with strides {q_TNX.stride()}, {plan.num_chunks} chunks")
    cluster = plan.shape.sms_per_program
    loaded = _loaded(device, heads, cluster)
    given = {
        "out": out_TNR, "page_table": inputs.page_table, "tiles": plan.tiles, "header": plan.header,
        "chunk_tile": plan.chunk_tile, "counters": room.counters, "partial": room.partial, "stats": room.stats,
    }  # fmt: skip
    structure = _Inputs(
        **{name: each.data_ptr() for name, each in given.items()}, table_stride=inputs.page_table.stride(0),
        tile_room=plan.tiles.shape[1], page_size=inputs.page_size, num_tokens=inputs.num_tokens,
        scale_log2=spec.scale * _LOG2E,
    )  # fmt: skip
    blocks = cluster * min(loaded.clusters, plan.num_chunks)
    maps = (tensor_map(q, MOST_HEADS), tensor_map(kv, _FETCHED))
    loaded.kernel.launch(blocks, (*maps, structure), current_stream(device), early=not after_plan)
