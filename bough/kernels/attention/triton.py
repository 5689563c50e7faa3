# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Attention over paged KV on the GPU: one program a chunk of the plan's stream (see plan.py), any mixture of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.attention import plan as planning
from bough.kernels.attention.inputs import TreeMask
from bough.kernels.attention.plan import (
    ALIGNED,
    KV_HIGH,
    KV_LOW,
    PER_CHUNK,
    POSITION,
    REAL_TOKENS,
    SLOT,
    SPANS,
    START,
    TOKEN,
    TOKENS,
    TOTAL,
)
from bough.kernels.kv_codes import Ranges, bits_of
from bough.kernels.launching import has_pdl, pdl_options, power_of_two, trigger, wait

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _page_of(table, n, n_high, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of the block's tokens: one scalar where a block lies in one page, else one entry a token."""
    if PAGE % BLOCK_N == 0:
        return tl.load(table + n // PAGE, mask=n < n_high, other=0)
    else:  # noqa: RET505 - Triton needs one return a branch
        tokens = n + tl.arange(0, BLOCK_N)
        return tl.load(table + tokens // PAGE, mask=tokens < n_high, other=0)


@triton.jit
def _locations(page, n, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """int64 [BLOCK_N]: where the block's tokens lie in the flat cache."""
    if PAGE % BLOCK_N == 0:
        return page.to(tl.int64) * PAGE + n % PAGE + tl.arange(0, BLOCK_N)
    else:  # noqa: RET505
        return page.to(tl.int64) * PAGE + (n + tl.arange(0, BLOCK_N)) % PAGE


@triton.jit
def _numbers(codes, dim, ranges, D: tl.constexpr, BITS: tl.constexpr):
    """float32 of codes, whose shape is that which `dim` and `ranges` have together."""
    if BITS == 4:
        codes = tl.where(dim < D // 2, codes & 15, codes >> 4)
    step = (ranges & -0x10000).to(tl.float32, bitcast=True)
    low = (ranges << 16).to(tl.float32, bitcast=True)
    return codes.to(tl.float32) * step + low


@triton.jit
def _codes(at, mask, MASKED: tl.constexpr):
    """What lies there; 0 where the mask is false."""
    if MASKED:
        return tl.load(at, mask=mask, other=0)
    else:  # noqa: RET505
        return tl.load(at)


@triton.jit
def _byte_of(dim, D: tl.constexpr, BITS: tl.constexpr):
    """Where the code of a number lies in its vector."""
    if BITS == 4:
        return tl.where(dim < D // 2, dim, dim - D // 2)
    else:  # noqa: RET505
        return dim


@triton.jit
def _attend_blocks(
    acc,
    high,
    norm,
    q,
    q_rest,
    position,
    k_cache,
    v_cache,
    k_ranges,
    v_ranges,
    kv_head,
    table,
    low,
    end,
    kv_high,
    scale_log2,
    softcap,
    window,
    k_token,
    v_token,
    slope,
    bits,
    tail,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    TREE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
    SLOPED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    LATENT: tl.constexpr,
    BITS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    H: tl.constexpr,
    VH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Online softmax over KV tokens low .. end (a whole number of blocks); `high` is the running maximum, base 2.

    The caches are pointers to the KV head, or with TMA descriptors of [tokens, heads * width]. With LATENT a value is the
    first VH numbers of its key, which are read once: `q` has as many, `q_rest` has those for the rest of a key.
    """
    dim = tl.arange(0, BLOCK_H)
    v_dim = tl.arange(0, BLOCK_V)
    page = _page_of(table, low, kv_high, PAGE, BLOCK_N)
    for n in tl.range(low, end, BLOCK_N):
        here = page
        page = _page_of(table, n + BLOCK_N, kv_high, PAGE, BLOCK_N)
        tokens = n + tl.arange(0, BLOCK_N)
        if TMA:
            k = tl.trans(k_cache.load([here * PAGE + n % PAGE, kv_head * H]))
        elif LATENT:
            at = _locations(here, n, PAGE, BLOCK_N)
            inside = (tokens < kv_high)[:, None]
            if BLOCK_V != VH:
                inside = inside & (v_dim < VH)[None, :]
            latent = tl.load(k_cache + at[:, None] * k_token + v_dim[None, :], mask=inside, other=0.0).to(q.dtype)
            inside = (tokens < kv_high)[None, :] & (dim < H - VH)[:, None]
            rest = tl.load(k_cache + at[None, :] * k_token + VH + dim[:, None], mask=inside, other=0.0).to(q.dtype)
            k = tl.trans(latent)
        elif BITS != 0:
            at = _locations(here, n, PAGE, BLOCK_N)
            # Codes are numbers in any page, and scores of tokens beyond the row's last one are masked.
            code = _codes(
                k_cache + at[None, :] * k_token + _byte_of(dim, H, BITS)[:, None], (dim < H)[:, None], BLOCK_H != H
            )
            k = _numbers(code, dim[:, None], tl.load(k_ranges + at * KV_HEADS)[None, :], H, BITS)
        else:
            at = _locations(here, n, PAGE, BLOCK_N)
            k_at = k_cache + at[None, :] * k_token + dim[:, None]
            if MASKED and BLOCK_H != H:
                k = tl.load(k_at, mask=(tokens < kv_high)[None, :] & (dim < H)[:, None], other=0.0)
            elif MASKED:
                k = tl.load(k_at, mask=(tokens < kv_high)[None, :], other=0.0)
            elif BLOCK_H != H:
                k = tl.load(k_at, mask=(dim < H)[:, None], other=0.0)
            else:
                k = tl.load(k_at)
        score = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
        if LATENT:
            score = tl.dot(q_rest, rest, score, input_precision=PRECISION)
        score = score * scale_log2
        if SOFTCAP:
            bounded = 2.0 * tl.sigmoid(score * (2.0 / (_LOG2E * softcap))) - 1.0
            score = bounded * (softcap * _LOG2E)
        if SLOPED:
            score += slope[:, None] * tokens[None, :].to(tl.float32)
        if MASKED:
            seen = (tokens < kv_high)[None, :]
            if TREE:
                place = tokens[None, :] - tail[:, None]
                bit = (bits[:, None] >> tl.minimum(tl.maximum(place, 0), 63).to(tl.int64)) & 1
                seen = seen & ((place < 0) | ((place < 64) & (bit == 1)))
            elif CAUSAL:
                seen = seen & (tokens[None, :] <= position[:, None])
            if CHUNKED:
                seen = seen & (tokens[None, :] >= (position // window * window)[:, None])
            elif WINDOWED:
                seen = seen & (tokens[None, :] > (position - window)[:, None])
            score = tl.where(seen, score, float("-inf"))
        new_high = tl.maximum(high, tl.max(score, 1))
        if MASKED:
            anchor = tl.where(new_high == float("-inf"), 0.0, new_high)
        else:
            anchor = new_high
        weight = tl.exp2(score - anchor[:, None])
        shrink = tl.exp2(high - anchor)
        norm = norm * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        # Beyond the row's last token a page holds anything, also what isn't a number; before its window it is another row's.
        there = tokens < kv_high
        if MASKED and CHUNKED:
            there = there & (tokens >= tl.min(position, 0) // window * window)
        elif MASKED and WINDOWED:
            there = there & (tokens > tl.min(position, 0) - window)
        if TMA:
            v = v_cache.load([here * PAGE + n % PAGE, kv_head * VH])
            if MASKED:
                v = tl.where(there[:, None], v, 0.0)
        elif LATENT:
            v = latent
        elif BITS != 0:
            v_at = v_cache + at[:, None] * v_token + _byte_of(v_dim, VH, BITS)[None, :]
            code = _codes(v_at, (v_dim < VH)[None, :], BLOCK_V != VH)
            v = _numbers(code, v_dim[None, :], _codes(v_ranges + at * KV_HEADS, there, MASKED)[:, None], VH, BITS)
        else:
            v_at = v_cache + at[:, None] * v_token + v_dim[None, :]
            if MASKED and BLOCK_V != VH:
                v = tl.load(v_at, mask=there[:, None] & (v_dim < VH)[None, :], other=0.0)
            elif MASKED:
                v = tl.load(v_at, mask=there[:, None], other=0.0)
            elif BLOCK_V != VH:
                v = tl.load(v_at, mask=(v_dim < VH)[None, :], other=0.0)
            else:
                v = tl.load(v_at)
        acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
        high = new_high
    return acc, high, norm


@triton.jit
def _merge(partial, partial_stats, first, last, valid, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr):
    """Puts the partial results of chunks first .. last together, in their order."""
    row = tl.arange(0, BLOCK_M)
    v_dim = tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    high = tl.full([BLOCK_M], float("-inf"), tl.float32)
    STAGES: tl.constexpr = 3 if BLOCK_M <= 16 else 1
    for chunk in tl.range(first, last + 1, num_stages=STAGES):
        place = (2 * chunk + (chunk == first).to(tl.int32)).to(tl.int64)
        stats = partial_stats + place * (2 * BLOCK_M) + row
        part_high = tl.load(stats, mask=valid, other=float("-inf"), cache_modifier=".cg")
        part_norm = tl.load(stats + BLOCK_M, mask=valid, other=0.0, cache_modifier=".cg")
        part_at = partial + place * (BLOCK_M * BLOCK_V) + row[:, None] * BLOCK_V + v_dim[None, :]
        part = tl.load(part_at, mask=valid[:, None], other=0.0, cache_modifier=".cg")
        new_high = tl.maximum(high, part_high)
        anchor = tl.where(new_high == float("-inf"), 0.0, new_high)
        old, new = tl.exp2(high - anchor), tl.exp2(part_high - anchor)
        acc = acc * old[:, None] + part * new[:, None]
        norm = norm * old + part_norm * new
        high = new_high
    return acc, high, norm


@triton.jit(do_not_specialize=["window", "num_tokens", "front_tokens", "tile_room"])
def _attention_kernel(
    q,
    out,
    k_cache,
    v_cache,
    k_ranges,
    v_ranges,
    page_table,
    tiles,
    header,
    chunk_tile,
    counters,
    members,
    partial,
    partial_stats,
    shared_out,
    shared_lse,
    sinks,
    slopes,
    tree_seen,
    tree_tail,
    tree_positions,
    scale_log2,
    softcap,
    v_scale,
    window,
    num_tokens,
    front_tokens,
    tile_room,
    table_stride,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    G: tl.constexpr,
    KV_HEADS: tl.constexpr,
    H: tl.constexpr,
    VH: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    TREE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
    SLOPED: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUPED: tl.constexpr,
    SHARED: tl.constexpr,
    ZERO: tl.constexpr,
    TWO_PHASE: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    LATENT: tl.constexpr,
    BITS: tl.constexpr,
    TOKENS_PER_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    chunk = tl.program_id(0)
    trigger(PDL)
    # The plan, the page table and the lengths are inputs of the step: no kernel of the layers writes them.
    total = tl.load(header + TOTAL)
    per_chunk = tl.load(header + PER_CHUNK)
    tile = tl.load(chunk_tile + chunk)
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_H)
    v_dim = tl.arange(0, BLOCK_V)
    HEADS: tl.constexpr = G * KV_HEADS
    aligned = tl.load(header + ALIGNED)
    start, token, tokens, position, kv_low, kv_high, slot = _tile_of(tiles + tile, tile_room)
    wait(PDL)
    if ZERO:
        _zero_padding(
            out, tl.load(header + REAL_TOKENS) + chunk, num_tokens, tl.num_programs(0), HEADS * VH, BLOCK_V
        )  # fmt: skip
    at = chunk * per_chunk
    end = tl.minimum(at + per_chunk, total)
    while at < end:
        blocks = tl.maximum((kv_high - kv_low + BLOCK_N - 1) // BLOCK_N, 1)
        span = blocks
        if aligned == 1:
            span = (blocks + per_chunk - 1) // per_chunk * per_chunk
        kv_head = (at - start) // span
        head_start = start + kv_head * span
        block = at - head_start
        block_end = tl.minimum(blocks, block + end - at)

        valid = (row // G < tokens) & (row < TOKENS_PER_TILE * G)
        if GROUPED:
            member = tl.load(members + token + row // G, mask=valid, other=0).to(tl.int64)
            query = member % front_tokens
        else:
            query = (token + row // G).to(tl.int64)
        head = kv_head * G + row % G
        slope = tl.load(slopes + head, mask=valid, other=0.0) * _LOG2E if SLOPED else 0.0
        q_at = q + query[:, None] * q_token + head[:, None] * q_head
        if LATENT:
            q_tile = tl.load(q_at + v_dim[None, :], mask=valid[:, None] & (v_dim < VH)[None, :], other=0.0)
            q_rest = tl.load(q_at + VH + dim[None, :], mask=valid[:, None] & (dim < H - VH)[None, :], other=0.0)
        else:
            q_mask = valid[:, None]
            if BLOCK_H != H:
                q_mask = q_mask & (dim < H)[None, :]
            q_tile = tl.load(q_at + dim[None, :], mask=q_mask, other=0.0)
            q_rest = q_tile
        if HALF:
            q_tile = tl.clamp(q_tile.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
            q_rest = tl.clamp(q_rest.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        norm = tl.zeros([BLOCK_M], tl.float32)
        high = tl.full([BLOCK_M], float("-inf"), tl.float32)
        where = position + row // G
        bits, tail = where, where
        if TREE:
            bits = tl.load(tree_seen + query, mask=valid, other=0)
            tail = tl.load(tree_tail + query, mask=valid, other=0)
            where = tl.load(tree_positions + query, mask=valid, other=position).to(tl.int32)
        table = page_table + slot.to(tl.int64) * table_stride
        if TMA:
            k_base, v_base = k_cache, v_cache
        else:
            k_base, v_base = k_cache + kv_head * k_head, v_cache + kv_head * v_head
        k_range, v_range = k_ranges, v_ranges
        if BITS != 0:
            k_range, v_range = k_ranges + kv_head, v_ranges + kv_head
        low = kv_low + block * BLOCK_N
        high_end = kv_low + block_end * BLOCK_N
        if TWO_PHASE:
            # Blocks that every query sees in full need no mask.
            full = kv_high
            if TREE and not GROUPED:
                full = tl.minimum(full, tl.min(tl.where(valid, tail, kv_high), 0))
            elif CAUSAL and not GROUPED:
                full = tl.minimum(full, position + 1)
            full_end = kv_low + tl.maximum(full - kv_low, 0) // BLOCK_N * BLOCK_N
            if WINDOWED:
                # The first blocks reach beyond the window of the last query: masked, before the full ones.
                if CHUNKED:
                    edge = (position + tokens - 1) // window * window
                else:
                    edge = tl.maximum(position + tokens - window, 0)
                full_start = kv_low + (tl.maximum(edge - kv_low, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
                full_start = tl.minimum(tl.maximum(full_start, low), high_end)
                acc, high, norm = _attend_blocks(
                    acc, high, norm, q_tile, q_rest, where, k_base, v_base, k_range, v_range, kv_head,
                    table, low, full_start, kv_high,
                    scale_log2, softcap, window, k_token, v_token, slope, bits, tail,
                    True, CAUSAL, TREE, WINDOWED, CHUNKED, SLOPED, SOFTCAP, PRECISION, TMA, LATENT,
                    BITS, KV_HEADS, H, VH, PAGE, BLOCK_N, BLOCK_H, BLOCK_V,
                )  # fmt: skip
                low = full_start
            full_end = tl.minimum(tl.maximum(full_end, low), high_end)
            acc, high, norm = _attend_blocks(
                acc, high, norm, q_tile, q_rest, where, k_base, v_base, k_range, v_range, kv_head,
                table, low, full_end, kv_high,
                scale_log2, softcap, window, k_token, v_token, slope, bits, tail,
                False, CAUSAL, TREE, WINDOWED, CHUNKED, SLOPED, SOFTCAP, PRECISION, TMA, LATENT,
                BITS, KV_HEADS, H, VH, PAGE, BLOCK_N, BLOCK_H, BLOCK_V,
            )  # fmt: skip
            low = full_end
        acc, high, norm = _attend_blocks(
            acc, high, norm, q_tile, q_rest, where, k_base, v_base, k_range, v_range, kv_head,
            table, low, high_end, kv_high,
            scale_log2, softcap, window, k_token, v_token, slope, bits, tail,
            True, CAUSAL and not GROUPED, TREE and not GROUPED, WINDOWED, CHUNKED, SLOPED, SOFTCAP, PRECISION, TMA, LATENT,
            BITS, KV_HEADS, H, VH, PAGE, BLOCK_N, BLOCK_H, BLOCK_V,
        )  # fmt: skip

        first = head_start // per_chunk
        last = (head_start + blocks - 1) // per_chunk
        finish = first == last
        if first != last:
            place = (2 * chunk + (chunk == first).to(tl.int32)).to(tl.int64)
            stats = partial_stats + place * (2 * BLOCK_M) + row
            tl.store(stats, high, mask=valid)
            tl.store(stats + BLOCK_M, norm, mask=valid)
            part_at = partial + place * (BLOCK_M * BLOCK_V) + row[:, None] * BLOCK_V + v_dim[None, :]
            tl.store(part_at, acc, mask=valid[:, None])
            tl.debug_barrier()
            counter = counters + tile * KV_HEADS + kv_head
            done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            finish = done == last - first
            if finish:
                tl.store(counter, 0)
                acc, high, norm = _merge(partial, partial_stats, first, last, valid, BLOCK_M, BLOCK_V)
        if finish:
            place = query * HEADS + head
            out_mask = valid[:, None]
            if BLOCK_V != VH:
                out_mask = out_mask & (v_dim < VH)[None, :]
            if SHARED:
                spans = tl.load(tiles + SPANS * tile_room + tile)
                for level in range(spans):
                    front_at = place + tl.cast(level, tl.int64) * front_tokens * HEADS
                    lse = tl.load(shared_lse + front_at, mask=valid, other=float("-inf"))
                    front = tl.load(shared_out + front_at[:, None] * VH + v_dim[None, :], mask=out_mask, other=0.0)
                    top = tl.maximum(high, lse)
                    anchor = tl.where(top == float("-inf"), 0.0, top)
                    own, share = tl.exp2(high - anchor), tl.exp2(lse - anchor)
                    acc = acc * own[:, None] + front * share[:, None]
                    norm = norm * own + share
                    high = top
            if SINKS and not GROUPED:
                sink = tl.load(sinks + head, mask=valid, other=0.0) * _LOG2E
                top = tl.maximum(high, sink)
                shrink = tl.exp2(high - top)
                acc = acc * shrink[:, None]
                norm = norm * shrink + tl.exp2(sink - top)
            safe = tl.where(norm > 0.0, norm, 1.0)
            result = acc / safe[:, None]
            if GROUPED:
                front_at = member * HEADS + head
                tl.store(shared_lse + front_at, high + tl.log2(safe), mask=valid)
                tl.store(shared_out + front_at[:, None] * VH + v_dim[None, :], result, mask=out_mask)
            else:
                result = (result * v_scale).to(out.dtype.element_ty)
                tl.store(out + place[:, None] * VH + v_dim[None, :], result, mask=out_mask)
        at += block_end - block
        tile += ((kv_head == KV_HEADS - 1) & (block_end == blocks)).to(tl.int32)
        if aligned == 1:
            at = end
        if at < end:
            start, token, tokens, position, kv_low, kv_high, slot = _tile_of(tiles + tile, tile_room)


@triton.jit
def _tile_of(tile, tile_room):
    """The fields of a tile."""
    return (
        tl.load(tile + START * tile_room),
        tl.load(tile + TOKEN * tile_room),
        tl.load(tile + TOKENS * tile_room),
        tl.load(tile + POSITION * tile_room),
        tl.load(tile + KV_LOW * tile_room),
        tl.load(tile + KV_HIGH * tile_room),
        tl.load(tile + SLOT * tile_room),
    )


@triton.jit
def _zero_padding(out, first, num_tokens, step, WIDTH: tl.constexpr, BLOCK_V: tl.constexpr):
    """Zeroes the output of the tokens first, first + step, ... that belong to no row."""
    BLOCK: tl.constexpr = BLOCK_V * 8
    for token in range(first, num_tokens, step):
        for base in range(0, WIDTH, BLOCK):
            col = base + tl.arange(0, BLOCK)
            zero = tl.zeros([BLOCK], out.dtype.element_ty)
            tl.store(out + tl.cast(token, tl.int64) * WIDTH + col, zero, mask=col < WIDTH)


@dataclass(slots=True)
class Workspace:
    """Where programs leave partial results. One is enough for all launches of a stream: each leaves nothing behind."""

    partial: Tensor
    stats: Tensor
    queue: Tensor
    """int32 [2], zero between launches: how many programs that take one piece of work after the other have taken, and how
    many of them are done."""

    @property
    def num_chunks(self) -> int:
        return self.partial.shape[0] // 2

    @staticmethod
    def make(num_chunks: int, block_m: int, v_width: int, device: torch.device) -> Workspace:
        def room(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a graph would capture the zeroing of the queue: run once before")
        return Workspace(
            room(2 * num_chunks, block_m, power_of_two(v_width, 16)),
            room(2 * num_chunks, 2, block_m),
            torch.zeros(2, dtype=torch.int32, device=device),
        )


def attend(
    q_TNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    plan: planning.Plan,
    workspace: Workspace,
    out_TNV: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    chunk: int | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    shared: tuple[Tensor, Tensor] | None = None,
    zero_padding: bool = False,
    after_plan: bool = False,
    tree: TreeMask | None = None,
    latent: bool = False,
    ranges: Ranges | None = None,
) -> None:
    """Attends for the rows of the plan and fills their part of `out_TNV` (contiguous). `q_TNH` must have their tokens, those
    behind it need not.

    `shared` is (float32 [levels, F, N, V], float32 [levels, F, N]), F as in `SpanTensors.num_tokens`: a plan of spans leaves
    its results and log-sum-exps (base 2) there and doesn't touch `out_TNV`; a plan of rows merges what it finds there. With
    `zero_padding` tokens of no row become zero. `after_plan`: the plan may just have been queued, so this launch must not
    start before it ends. `latent`: `v_cache` is the first part of `k_cache`'s numbers. `ranges`: those of caches that hold
    codes.
    """
    _, num_heads, width = q_TNH.shape
    page_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    v_width = out_TNV.shape[2]
    shape = plan.shape
    front, lse = (workspace.partial, workspace.stats) if shared is None else shared
    tma = _suits_tma(q_TNH, k_cache, v_cache, shape)
    _attention_kernel[(plan.num_chunks,)](
        q_TNH,
        out_TNV,
        _descriptor(k_cache, shape) if tma else k_cache,
        _descriptor(v_cache, shape) if tma else v_cache,
        workspace.stats if ranges is None else ranges.keys,
        workspace.stats if ranges is None else ranges.values,
        page_table,
        plan.tiles,
        plan.header,
        plan.chunk_tile,
        plan.counters,
        plan.header if plan.members is None else plan.members,
        workspace.partial,
        workspace.stats,
        front,
        lse,
        workspace.stats if sinks is None else sinks,
        workspace.stats if slopes is None else slopes,
        plan.header if tree is None else tree.seen_T,
        plan.header if tree is None else tree.tail_T,
        plan.header if tree is None else tree.positions_T,
        scale * k_scale * _LOG2E.value,
        0.0 if softcap is None else softcap,
        v_scale,
        chunk or window or 0,
        out_TNV.shape[0],
        front.shape[1],
        plan.tiles.shape[1],
        page_table.stride(0),
        q_TNH.stride(0),
        q_TNH.stride(1),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(1),
        v_cache.stride(2),
        G=num_heads // kv_heads,
        KV_HEADS=kv_heads,
        H=width,
        VH=v_width,
        PAGE=page_size,
        CAUSAL=causal,
        TREE=tree is not None,
        WINDOWED=window is not None or chunk is not None,
        CHUNKED=chunk is not None,
        SLOPED=slopes is not None,
        SINKS=sinks is not None,
        SOFTCAP=softcap is not None,
        GROUPED=plan.members is not None,
        SHARED=shared is not None and plan.members is None,
        ZERO=zero_padding,
        TWO_PHASE=shape.block_m >= 64,
        HALF=_in_half(q_TNH, k_cache),
        PRECISION="ieee" if q_TNH.dtype == torch.float32 else "tf32",
        TMA=tma,
        LATENT=latent,
        BITS=0 if ranges is None else bits_of(k_cache, width),
        TOKENS_PER_TILE=plan.tokens_per_tile,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_H=power_of_two(width - v_width if latent else width, 16),
        BLOCK_V=power_of_two(v_width, 16),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **({"PDL": False} if after_plan else pdl_options(q_TNH.device)),
    )


def _in_half(q: Tensor, cache: Tensor) -> bool:
    """Whether products are computed in float16 although queries are bfloat16: a GPU converts 8-bit floats to float16 in one
    instruction for two of them, to bfloat16 by way of float32. All 8-bit floats are numbers of float16."""
    return q.dtype == torch.bfloat16 and cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def _suits_tma(q: Tensor, k_cache: Tensor, v_cache: Tensor, shape: planning.Shape) -> bool:
    """Whether whole blocks of KV can come through the copy engine: it pays where a tile does much work with a block."""
    return (
        shape.block_m >= 64
        and has_pdl(q.device)
        and k_cache.shape[1] % shape.block_n == 0
        and q.dtype.itemsize == 2
        and all(
            cache.dtype == q.dtype
            and cache.shape[3] == power_of_two(cache.shape[3], 16)
            and cache.stride(2) == cache.shape[3]
            and cache.stride(0) == cache.shape[1] * cache.stride(1)
            for cache in (k_cache, v_cache)
        )
    )


def _descriptor(cache: Tensor, shape: planning.Shape) -> object:
    from triton.tools.tensor_descriptor import TensorDescriptor

    num_pages, page_size, heads, width = cache.shape
    tokens = [num_pages * page_size, heads * width]
    return TensorDescriptor(cache, tokens, [cache.stride(1), 1], [shape.block_n, width])
