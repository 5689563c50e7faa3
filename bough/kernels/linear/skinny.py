# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Matrix products with few rows: the weight streams through the multiprocessors once, at memory bandwidth.

Weight rows are the M dimension of the tensor-core product and tokens its N, so that a handful of tokens wastes nothing.
All (tile of weight rows, step along D) pairs form one stream, cut into equal chunks, one a program (stream-K): every
multiprocessor reads the same number of bytes. A tile cut over several chunks is summed, in order, by the program that
finishes last. Where `ring` can serve, it does so with the same cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.activation.triton import gated
from bough.kernels.launching import cdiv, num_sms, pdl_options, power_of_two, trigger, wait
from bough.kernels.linear import ring as hopper
from bough.kernels.norm.inlined import NormedStruct

MOST_TOKENS = 256
"""The widest token block."""


@dataclass(frozen=True, slots=True)
class SkinnyTiling:
    """How the product is cut. `block_n`: weight rows a tile; `programs_per_sm` 0: one program a tile and `split` of D."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 0
    split: int = 1
    tma: bool = False
    """Tiles come through the copy engine (Hopper and later)."""
    ring: bool = False
    """Served by `ring` where that is ready, which starts to read before the kernel before has ended."""


@triton.jit
def weight_tile(
    weight, row, k, D, rows, stride, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr
):
    """[BLOCK_N, BLOCK_K] of the weight from (row, k) on; what lies beyond (rows, D) is zero unless EVEN says it can't."""
    if TMA:
        return weight.load([row, k])
    else:  # noqa: RET505 - Triton needs one return a branch
        n = row + tl.arange(0, BLOCK_N)
        col = k + tl.arange(0, BLOCK_K)
        at = weight + n.to(tl.int64)[:, None] * stride + col[None, :]
        if EVEN:
            return tl.load(at, eviction_policy="evict_first")
        else:  # noqa: RET505
            return tl.load(at, mask=(n < rows)[:, None] & (col < D)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def sum_partials(partial, first, last, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr):
    """The sum over chunks first .. last, in their order; small ones come four at a time."""
    UNROLL: tl.constexpr = 4 if BLOCK_N * BLOCK_T <= 2048 else 1
    offset = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for base in tl.range(first, last + 1, UNROLL):
        for ahead in tl.static_range(UNROLL):
            chunk = base + ahead
            place = tl.cast(2 * chunk, tl.int64) + tl.where(chunk == first, 1, 0)
            at = partial + place * (BLOCK_N * BLOCK_T) + offset
            acc += tl.load(at, mask=offset * 0 + chunk <= last, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit(do_not_specialize=["T", "per_chunk", "total", "k_steps"])
def _skinny_kernel(
    x,
    weight,
    bias,
    out,
    partial,
    counters,
    T,
    rows,
    D,
    x_stride,
    weight_stride,
    per_chunk,
    total,
    k_steps,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    chunk = tl.program_id(0)
    at = chunk * per_chunk
    end = tl.minimum(at + per_chunk, total)
    trigger(PDL)
    wait(PDL)
    token = tl.arange(0, BLOCK_T)
    real = token < T
    while at < end:
        tile = at // k_steps
        k_start = at - tile * k_steps
        k_end = tl.minimum(k_steps, k_start + end - at)
        row = tile * BLOCK_N
        acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for step in tl.range(k_start, k_end):
            k = step * BLOCK_K
            col = k + tl.arange(0, BLOCK_K)
            w = weight_tile(weight, row, k, D, rows, weight_stride, BLOCK_N, BLOCK_K, EVEN, TMA)
            if TMA:
                x_tile = tl.trans(x.load([0, k]))
            else:
                x_at = x + token.to(tl.int64)[None, :] * x_stride + col[:, None]
                if EVEN:
                    x_tile = tl.load(x_at, mask=real[None, :], other=0.0)
                else:
                    x_tile = tl.load(x_at, mask=real[None, :] & (col < D)[:, None], other=0.0)
            acc = tl.dot(w, x_tile, acc, input_precision=PRECISION)
            if SILU:
                w_up = weight_tile(weight, row + rows, k, D, 2 * rows, weight_stride, BLOCK_N, BLOCK_K, EVEN, TMA)
                up = tl.dot(w_up, x_tile, up, input_precision=PRECISION)

        first = tile * k_steps // per_chunk
        last = (tile * k_steps + k_steps - 1) // per_chunk
        n = row + tl.arange(0, BLOCK_N)
        inside = real[None, :] & (n < rows)[:, None]
        finish = first == last
        if first != last:
            place = tl.cast(2 * chunk, tl.int64) + tl.where(chunk == first, 1, 0)
            offset = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + token[None, :]
            tl.store(partial + place * (BLOCK_N * BLOCK_T) + offset, acc)
            if SILU:
                half = partial + tl.cast(tl.num_programs(0), tl.int64) * (2 * BLOCK_N * BLOCK_T)
                tl.store(half + place * (BLOCK_N * BLOCK_T) + offset, up)
            tl.debug_barrier()
            done = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
            finish = done == last - first
            if finish:
                tl.store(counters + tile, 0)
                acc = sum_partials(partial, first, last, BLOCK_N, BLOCK_T)
                if SILU:
                    half = partial + tl.cast(tl.num_programs(0), tl.int64) * (2 * BLOCK_N * BLOCK_T)
                    up = sum_partials(half, first, last, BLOCK_N, BLOCK_T)
        if finish:
            if BIAS:
                acc += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)[:, None]
            result = acc
            if SILU:
                # Rounded as the two halves would be if they were stored.
                DTYPE: tl.constexpr = out.dtype.element_ty
                result = gated(acc.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32), False)
            out_at = out + token.to(tl.int64)[None, :] * rows + n[:, None]
            tl.store(out_at, result.to(out.dtype.element_ty), mask=inside)
        at += k_end - k_start


class Scratch:
    """Partial sums and counters of a device, grown as needed. Counters are zero between launches.

    What was handed out is never freed: a captured graph may use it.
    """

    def __init__(self) -> None:
        self._partials: dict[torch.device, list[Tensor]] = {}
        self._counters: dict[torch.device, list[Tensor]] = {}

    def get(self, device: torch.device, partial: int, counters: int) -> tuple[Tensor, Tensor]:
        partials = self._partials.setdefault(device, [])
        if not partials or partials[-1].numel() < partial:
            partials.append(torch.empty(max(partial, 1 << 22), dtype=torch.float32, device=device))
        counts = self._counters.setdefault(device, [])
        if not counts or counts[-1].numel() < counters:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a graph would capture the zeroing of counters: call reserve() or run once before")
            counts.append(torch.zeros(max(counters, 1 << 16), dtype=torch.int32, device=device))
        return partials[-1], counts[-1]


SCRATCH = Scratch()


def reserve(device: torch.device) -> None:
    """Allocates the scratch of a device, so that no graph capture has to."""
    SCRATCH.get(device, 1 << 24, 1 << 16)


def _is_even(rows: int, depth: int, config: SkinnyTiling) -> bool:
    return rows % config.block_n == 0 and depth % config.block_k == 0


def _takes_tma(x: Tensor, rows: int, config: SkinnyTiling) -> bool:
    aligned = x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return config.tma and aligned and _is_even(rows, x.shape[1], config) and x.device.type == "cuda"


def _takes_ring(x: Tensor, rows: int, config: SkinnyTiling, bias: Tensor | None) -> bool:
    alike = bias is None or bias.dtype == x.dtype
    few = x.shape[0] <= hopper.MOST_TOKENS
    return config.ring and few and alike and _takes_tma(x, rows, config) and hopper.is_ready(x.device)


def takes_norm(x_TD: Tensor, weight_OD: Tensor, config: SkinnyTiling, bias: Tensor | None) -> bool:
    """Whether a product without an activation can begin with a norm, and had better."""
    tokens, depth = x_TD.shape
    if tokens > hopper.MOST_NORMED or not _takes_ring(x_TD, weight_OD.shape[0], config, bias):
        return False
    block = (8, config.block_n, config.block_k)
    room = hopper.shared_bytes(block, config.num_stages, silu_mul=False, normed=depth)
    return room <= hopper.MOST_SHARED_BYTES


def skinny(
    x_TD: Tensor,
    weight: Tensor,
    config: SkinnyTiling,
    *,
    bias: Tensor | None = None,
    silu_mul: bool = False,
    normed: NormedStruct | None = None,
) -> Tensor:
    """x @ weight.T with at most one of: + bias, silu_mul of the result's halves. With `normed`, for which `takes_norm`, the
    norm of x + residual is multiplied."""
    tokens, depth = x_TD.shape
    x = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    rows = weight.shape[0] // 2 if silu_mul else weight.shape[0]
    device = x.device
    even = _is_even(rows, depth, config)
    tma = _takes_tma(x, rows, config)
    ring = _takes_ring(x, rows, config, bias)
    block_t = power_of_two(tokens, 8 if ring else 16)
    k_steps = cdiv(depth, config.block_k)
    tiles = cdiv(rows, config.block_n)
    total = tiles * k_steps
    if config.programs_per_sm:
        per_chunk = cdiv(total, num_sms(device) * config.programs_per_sm)
    else:
        per_chunk = cdiv(k_steps, config.split)
    programs = cdiv(total, per_chunk)
    needed = 2 * programs * config.block_n * block_t * (2 if silu_mul else 1)
    partial, counters = SCRATCH.get(device, needed, tiles)
    out = x.new_empty((tokens, rows))
    if ring:
        hopper.launch_ring(
            x, weight, bias, out, partial, counters,
            cut=(programs, per_chunk, total, k_steps), block=(block_t, config.block_n, config.block_k),
            stages=config.num_stages, silu_mul=silu_mul, normed=normed,
        )  # fmt: skip
        return out
    _skinny_kernel[(programs,)](
        _descriptor(x, block_t, config) if tma else x,
        _descriptor(weight, config.block_n, config) if tma else weight,
        weight if bias is None else bias,
        out,
        partial,
        counters,
        tokens,
        rows,
        depth,
        x.stride(0),
        weight.stride(0),
        per_chunk,
        total,
        k_steps,
        SILU=silu_mul,
        BIAS=bias is not None,
        EVEN=even,
        TMA=tma,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        BLOCK_T=block_t,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl_options(device),
    )
    return out


def _descriptor(matrix: Tensor, rows: int, config: SkinnyTiling) -> object:
    """Tiles of [rows, block_k]; rows beyond the matrix read as zero."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [rows, config.block_k])
