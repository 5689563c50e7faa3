# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The work list of a step's attention, made on the device so that a captured graph serves any mixture of rows.

A *tile* is up to `block_m` rows of (query token, head of one KV head's group) against a stretch of a row's KV. Tiles, their
KV heads and their KV blocks, in this order, form one *stream* of blocks, which is cut into equal *chunks*, one a program.
A (tile, KV head) cut over several chunks is put together by whichever program finishes last. Equal chunks keep every
multiprocessor busy to the end whatever the lengths; one long row is cut to fill the device.

Where no row is longer than a chunk, or there are enough short rows to fill the device uncut, cutting costs more than it
evens out: every (tile, KV head) then starts a chunk of its own (its stretch of the stream is padded to whole chunks), and
only rows far longer than the average are cut. Longer ones of up to 1,024 decode rows come first then, so that programs end
at about the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.attention.fresh_hopper import TILE, Listed
from bough.kernels.attention.inputs import AttentionInputs
from bough.kernels.launching import Launcher, cdiv, num_sms, power_of_two, wait

# Fields of a tile: rows of `Plan.tiles`.
START = tl.constexpr(0)
"""Where the tile's blocks start in the stream."""
TOKEN = tl.constexpr(1)
"""First query token (for spans: first entry of the member list)."""
TOKENS = tl.constexpr(2)
POSITION = tl.constexpr(3)
"""KV index of the first query."""
KV_LOW = tl.constexpr(4)
KV_HIGH = tl.constexpr(5)
SLOT = tl.constexpr(6)
SPANS = tl.constexpr(7)
"""Spans of the shared pass that cover the KV tokens before KV_LOW."""
NUM_FIELDS = 8
FIELDS = tl.constexpr(NUM_FIELDS)
# Fields of `Plan.header`.
TOTAL = tl.constexpr(0)
PER_CHUNK = tl.constexpr(1)
REAL_TOKENS = tl.constexpr(2)
ALIGNED = tl.constexpr(3)
"""1: every (tile, KV head) starts a chunk."""
NUM_HEADER = 4
HEADER = tl.constexpr(NUM_HEADER)

SHORT = tl.constexpr(768)
"""KV tokens of a row, on average, up to which rows stay uncut."""
RANKS = tl.constexpr(4)
"""Classes of length that uncut rows are sorted into, the longest first."""
PADS = tl.constexpr(5)
"""Sizes of padded chunks that are tried, each an eighth larger than the one before."""
MERGING = tl.constexpr(2)
"""Blocks that a program may read more for leaving rows uncut, where there are more rows than programs. 200 rows of 5 blocks
of 64 latents, cut into chunks of 8, took 32.1 us on an H200, where 100 uncut rows of 10 blocks took 27.9."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a kernel cuts its work. `block_n` must divide the page size or be a multiple of it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int
    min_tokens: int = 128
    """A chunk holds at least this many KV tokens: shorter ones cost more in merging than they save."""
    may_align: bool = False
    """Leave rows uncut where they fill the device."""
    sms_per_program: int = 1
    """Multiprocessors that work on a chunk together."""
    most_programs: int | None = None
    """Programs that the device runs at once, where clusters of multiprocessors leave some of them over."""
    may_pad: bool = False
    """Let rows begin chunks of their own where that takes no more programs than the device runs at once, or leave them uncut
    where that takes hardly longer: a chunk with the end of one row and the beginning of another merges twice. Of rows with
    one tile each."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a plan depends on besides the step: layers of one kind share a plan."""

    num_heads: int
    num_kv_heads: int
    window: int | None
    causal: bool

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(slots=True)
class Plan:
    """A work list on the device and the buffers its launches share."""

    shape: Shape
    target: int
    """Programs that fill the device."""
    num_chunks: int
    """Programs of a launch: enough for any cut."""
    tokens_per_tile: int
    tiles: Tensor
    """int32 [NUM_FIELDS, most tiles]."""
    header: Tensor
    chunk_tile: Tensor
    """int32 [num_chunks]: the tile in which the chunk starts."""
    counters: Tensor
    """int32 [most tiles, KV heads], zero between launches of the plan's users: chunks of a tile that are done."""
    prefixed: bool = False
    """Rows may begin with spans that a shared pass covers."""
    members: Tensor | None = None
    """For shared spans: int32, level * `SpanTensors.num_tokens` + query token of each member."""


@triton.jit
def _search(ends, value, count, STEPS: tl.constexpr):
    """How many of the first `count` entries of the ascending array are <= value."""
    low = value * 0
    high = low + count
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        entry = tl.load(ends + middle, mask=open_, other=0)
        right = open_ & (entry <= value)
        low = tl.where(right, middle + 1, low)
        high = tl.where(open_ & (entry > value), middle, high)
    return low


@triton.jit
def _seen(num_kv, position, tokens, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The stretch of KV that the queries of a tile see."""
    high = num_kv
    if CAUSAL:
        high = tl.minimum(high, position + tokens)
    low = high * 0
    if WINDOWED:
        low = tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
    return low, high


@triton.jit
def _put(tiles, tile_room, tile, start, token, tokens, position, low, high, slot, spans, mask):
    """Writes the fields of tiles."""
    tl.store(tiles + START * tile_room + tile, start, mask=mask)
    tl.store(tiles + TOKEN * tile_room + tile, token, mask=mask)
    tl.store(tiles + TOKENS * tile_room + tile, tokens, mask=mask)
    tl.store(tiles + POSITION * tile_room + tile, position, mask=mask)
    tl.store(tiles + KV_LOW * tile_room + tile, low, mask=mask)
    tl.store(tiles + KV_HIGH * tile_room + tile, high, mask=mask)
    tl.store(tiles + SLOT * tile_room + tile, slot, mask=mask)
    tl.store(tiles + SPANS * tile_room + tile, spans, mask=mask)


@triton.jit
def _put_header(header, total, per_chunk, real_tokens, aligned):
    tl.store(header + TOTAL, total)
    tl.store(header + PER_CHUNK, per_chunk)
    tl.store(header + REAL_TOKENS, real_tokens)
    tl.store(header + ALIGNED, aligned)


@triton.jit
def _fill(array, begin, end, value):
    """Writes one number to a stretch of an array."""
    LANES: tl.constexpr = 1024
    lane = tl.arange(0, LANES)
    for base in range(begin, end, LANES):
        tl.store(array + base + lane, lane * 0 + value, mask=base + lane < end)


@triton.jit
def _chunk_size(total, longest, units, min_blocks, max_splits, num_chunks, target, BLOCK_N: tl.constexpr):
    """(Blocks of a chunk, whether (tile, KV head) pairs start chunks of their own), for a stream of `total` blocks and as
    many pairs as there are `units`, with at most `longest` blocks each.

    There are `target` chunks, or where `num_chunks` leaves room for it, one or more a pair. With more than `max_splits`
    pieces a tile, merging would cost more than it saves.
    """
    per_chunk = tl.maximum((total + target - 1) // target, (longest + max_splits - 1) // max_splits)
    per_chunk = tl.maximum(per_chunk, min_blocks)
    aligned = ((units <= num_chunks) & (longest <= per_chunk)).to(tl.int32)
    if (aligned == 0) & (num_chunks > target) & (2 * units >= target) & (total * BLOCK_N <= units * SHORT):
        aligned += 1
        per_chunk *= 2
    return per_chunk, aligned


@triton.jit
def _padded_size(blocks, longest, units, per_chunk, aligned, kv_heads, num_chunks, target, may_pad):
    """(Blocks of a chunk, whether tiles start chunks of their own): the least size, up to half as large again as
    `per_chunk`, with which padded tiles of these `blocks` make no more than `target` chunks; the longest one's, if several
    in turn are hardly more than `per_chunk`; otherwise what was given."""
    size = per_chunk
    if (aligned == 0) & (may_pad == 1):
        for eighths in tl.static_range(PADS):
            wider = per_chunk + per_chunk * eighths // 8
            chunks = tl.sum((blocks + wider - 1) // wider, 0) * kv_heads
            if (aligned == 0) & (chunks <= target):
                aligned += 1
                size = wider
        in_turn = (units + target - 1) // target
        if (aligned == 0) & (units > target) & (units <= num_chunks) & (in_turn * longest <= per_chunk + MERGING):
            aligned += 1
            size = longest
    return size, aligned


@triton.jit
def _align(tiles, per_chunk, num_tiles, tile_room, kv_heads, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):
    """Moves the tiles' starts so that each (tile, KV head) begins a chunk; returns the stream's new length."""
    lane = tl.arange(0, BLOCK)
    total = 0
    tl.debug_barrier()
    for base in range(0, num_tiles, BLOCK):
        tile = base + lane
        real = tile < num_tiles
        low = tl.load(tiles + KV_LOW * tile_room + tile, mask=real, other=0)
        high = tl.load(tiles + KV_HIGH * tile_room + tile, mask=real, other=0)
        blocks = tl.maximum((high - low + BLOCK_N - 1) // BLOCK_N, 1)
        work = tl.where(real, (blocks + per_chunk - 1) // per_chunk * kv_heads, 0)
        start = total + tl.cumsum(work, 0) - work
        tl.store(tiles + START * tile_room + tile, start * per_chunk, mask=real)
        total += tl.sum(work, 0)
    return total * per_chunk


@triton.jit
def _cut(
    header,
    chunk_tile,
    tiles,
    total,
    longest,
    num_tiles,
    tile_room,
    kv_heads,
    real_tokens,
    min_blocks,
    max_splits,
    num_chunks,
    target,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cuts the stream into chunks, and finds the tile in which each of them starts."""
    per_chunk, aligned = _chunk_size(
        total, longest, num_tiles * kv_heads, min_blocks, max_splits, num_chunks, target, BLOCK_N
    )  # fmt: skip
    if aligned == 1:
        total = _align(tiles, per_chunk, num_tiles, tile_room, kv_heads, BLOCK_N, BLOCK)
    _put_header(header, total, per_chunk, real_tokens, aligned)
    tl.debug_barrier()
    for base in range(0, num_chunks, BLOCK):
        chunk = base + tl.arange(0, BLOCK)
        tile = _search(tiles, chunk * per_chunk, num_tiles, STEPS) - 1
        tl.store(chunk_tile + chunk, tl.maximum(tile, 0), mask=chunk < num_chunks)


@triton.jit(
    do_not_specialize=[
        "R", "tile_room", "kv_heads", "tokens_per_tile", "least_query", "most_query", "window", "fresh_from",
        "min_blocks", "max_splits", "num_chunks", "target",
    ]
)  # fmt: skip
def _plan_kernel(
    query_start,
    kv_len,
    slots,
    covered,
    row_tiles,
    tiles,
    header,
    chunk_tile,
    counters,
    R,
    tile_room,
    kv_heads,
    tokens_per_tile,
    least_query,
    most_query,
    window,
    fresh_from,
    min_blocks,
    max_splits,
    num_chunks,
    target,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    _fill(counters, 0, tile_room * kv_heads, 0)
    num_tiles = 0
    for base in range(0, R, BLOCK):
        row = base + lane
        inside = row < R
        first = tl.load(query_start + row, mask=inside, other=0)
        query = tl.load(query_start + row + 1, mask=inside, other=0) - first
        context = tl.load(kv_len + row, mask=inside, other=0) - query
        mine = inside & (query >= least_query) & (query <= most_query) & ((context != 0) | (query < fresh_from))
        count = tl.where(mine, (query + tokens_per_tile - 1) // tokens_per_tile, 0)
        tl.store(row_tiles + row, num_tiles + tl.cumsum(count, 0), mask=inside)
        num_tiles += tl.sum(count, 0)
    tl.debug_barrier()
    total = 0
    longest = 0
    for base in range(0, tile_room, BLOCK):
        tile = base + lane
        real = tile < num_tiles
        row = _search(row_tiles, tl.where(real, tile, -1), R, STEPS)
        row = tl.minimum(row, R - 1)
        before = tl.load(row_tiles + row - 1, mask=real & (row > 0), other=0)
        offset = (tile - before) * tokens_per_tile
        first = tl.load(query_start + row, mask=real, other=0)
        query = tl.load(query_start + row + 1, mask=real, other=0) - first
        num_kv = tl.load(kv_len + row, mask=real, other=0)
        tokens = tl.minimum(query - offset, tokens_per_tile)
        position = num_kv - query + offset
        low, high = _seen(num_kv, position, tokens, window, CAUSAL, WINDOWED, BLOCK_N)
        spans = tile * 0
        if SHARED:
            low = tl.load(covered + row, mask=real, other=0)
            spans = tl.load(covered + R + row, mask=real, other=0)
        blocks = tl.maximum((high - low + BLOCK_N - 1) // BLOCK_N, 1)
        blocks = tl.where(real, blocks, 0)
        work = blocks * kv_heads
        start = total + tl.cumsum(work, 0) - work
        slot = tl.load(slots + row, mask=real, other=0)
        _put(tiles, tile_room, tile, start, first + offset, tokens, position, low, high, slot, spans, real)
        total += tl.sum(work, 0)
        longest = tl.maximum(longest, tl.max(blocks, 0))
    real_tokens = tl.load(query_start + R)
    _cut(
        header, chunk_tile, tiles, total, longest, num_tiles, tile_room, kv_heads, real_tokens, min_blocks, max_splits,
        num_chunks, target, BLOCK_N, STEPS, BLOCK,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "R", "tile_room", "kv_heads", "least_query", "most_query", "window", "min_blocks", "max_splits", "num_chunks",
        "aligned_chunks", "target", "kv_stride", "chunk_stride", "counter_stride", "may_pad",
    ]
)  # fmt: skip
def _plan_short_kernel(
    query_start,
    kv_len,
    slots,
    covered,
    tiles,
    header,
    chunk_tile,
    counters,
    R,
    tile_room,
    kv_heads,
    least_query,
    most_query,
    window,
    min_blocks,
    max_splits,
    num_chunks,
    aligned_chunks,
    target,
    kv_stride,
    chunk_stride,
    counter_stride,
    may_pad,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """`_plan_kernel` where no row has more than one tile, and all fit into a block: rows say where their tiles and chunks
    go, and nothing is looked for. Each program makes a plan, for lengths of its own. `aligned_chunks`: the most with which
    `_chunk_size` may start tiles with chunks of their own."""
    wait(PDL)  # lengths may just have been written
    pass_ = tl.program_id(0)
    kv_len += pass_ * kv_stride
    tiles += pass_ * (FIELDS * tile_room)
    header += pass_ * HEADER
    chunk_tile += pass_ * chunk_stride
    counters += pass_ * counter_stride
    row = tl.arange(0, BLOCK)
    inside = row < R
    first = tl.load(query_start + row, mask=inside, other=0)
    query = tl.load(query_start + row + 1, mask=inside, other=0) - first
    num_kv = tl.load(kv_len + row, mask=inside, other=0)
    slot = tl.load(slots + row, mask=inside, other=0)
    real_tokens = tl.load(query_start + R)
    mine = inside & (query >= least_query) & (query <= most_query)
    position = num_kv - query
    low, high = _seen(num_kv, position, query, window, CAUSAL, WINDOWED, BLOCK_N)
    spans = row * 0
    if SHARED:
        low = tl.load(covered + row, mask=inside, other=0)
        spans = tl.load(covered + R + row, mask=inside, other=0)
    blocks = tl.where(mine, tl.maximum((high - low + BLOCK_N - 1) // BLOCK_N, 1), 0)
    count = mine.to(tl.int32)
    num_tiles = tl.sum(count, 0)
    longest = tl.max(blocks, 0)
    units = num_tiles * kv_heads
    per_chunk, aligned = _chunk_size(
        tl.sum(blocks, 0) * kv_heads, longest, units, min_blocks, max_splits, aligned_chunks, target, BLOCK_N
    )  # fmt: skip
    per_chunk, aligned = _padded_size(
        blocks, longest, units, per_chunk, aligned, kv_heads, num_chunks, target, may_pad
    )  # fmt: skip
    rank = (longest - blocks) * RANKS // tl.maximum(longest, 1) * aligned
    room = blocks
    longest_room = longest
    if aligned == 1:
        room = (blocks + per_chunk - 1) // per_chunk * per_chunk
        longest_room = (longest + per_chunk - 1) // per_chunk * per_chunk
    work = room * kv_heads
    total = tl.sum(work, 0)
    # Tiles and blocks before a row's are summed together: there are fewer than 4096 rows.
    both = work.to(tl.int64) * 4096 + count
    before = both * 0
    ranked = tl.sum(before, 0)
    for each in tl.static_range(RANKS):
        here = tl.where(rank == each, both, 0)
        before = tl.where(rank == each, ranked + tl.cumsum(here, 0) - here, before)
        ranked += tl.sum(here, 0)
    tile = (before % 4096).to(tl.int32)
    start = (before // 4096).to(tl.int32)
    chunk = (start + per_chunk - 1) // per_chunk
    last_chunk = (start + work + per_chunk - 1) // per_chunk
    _put(tiles, tile_room, tile, start, first, query, position, low, high, slot, spans, mine)
    _put_header(header, total, per_chunk, real_tokens, aligned)
    _fill(counters, 0, tile_room * kv_heads, 0)
    for base in range(0, (longest_room * kv_heads + per_chunk - 1) // per_chunk, CHUNKS):
        place = chunk[:, None] + base + tl.arange(0, CHUNKS)[None, :]
        tl.store(chunk_tile + place, tile[:, None] + place * 0, mask=place < last_chunk[:, None])
    _fill(chunk_tile, (total + per_chunk - 1) // per_chunk, num_chunks, tl.maximum(num_tiles - 1, 0))


_SHORT = Launcher(_plan_short_kernel)


@triton.jit(
    do_not_specialize=[
        "R", "S", "front_tokens", "tile_room", "kv_heads", "tokens_per_tile", "min_blocks", "max_splits", "num_chunks",
        "target",
    ]
)  # fmt: skip
def _plan_spans_kernel(
    query_start,
    slots,
    rows,
    start,
    span_first,
    span_last,
    span_level,
    member_end,
    members,
    covered,
    span_tiles,
    tiles,
    header,
    chunk_tile,
    counters,
    R,
    S,
    front_tokens,
    tile_room,
    kv_heads,
    tokens_per_tile,
    min_blocks,
    max_splits,
    num_chunks,
    target,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Members are query tokens of the spans' rows, span after span: `member_end` says where those of each of `rows` end."""
    lane = tl.arange(0, BLOCK)
    _fill(counters, 0, tile_room * kv_heads, 0)
    _fill(covered, 0, 2 * R, 0)
    num_rows = tl.load(start + S)
    num_members = 0
    for base in range(0, num_rows, BLOCK):
        place = base + lane
        inside = place < num_rows
        row = tl.load(rows + place, mask=inside, other=0)
        query = tl.load(query_start + row + 1, mask=inside, other=0) - tl.load(query_start + row, mask=inside, other=0)
        tl.store(member_end + place, num_members + tl.cumsum(query, 0), mask=inside)
        num_members += tl.sum(query, 0)
    tl.debug_barrier()
    for base in range(0, num_rows, BLOCK):
        place = base + lane
        inside = place < num_rows
        row = tl.load(rows + place, mask=inside, other=0)
        span = _search(start, tl.where(inside, place, 0), S + 1, STEPS) - 1
        last = tl.load(span_last + span, mask=inside, other=0)
        level = tl.load(span_level + span, mask=inside, other=0)
        tl.atomic_max(covered + row, last, mask=inside, sem="relaxed", scope="cta")
        tl.atomic_max(covered + R + row, level + 1, mask=inside, sem="relaxed", scope="cta")
    num_tiles = 0
    for base in range(0, S, BLOCK):
        span = base + lane
        inside = span < S
        first, end = _members_of(start, member_end, span, inside)
        count = (end - first + tokens_per_tile - 1) // tokens_per_tile
        tl.store(span_tiles + span, num_tiles + tl.cumsum(count, 0), mask=inside)
        num_tiles += tl.sum(count, 0)
    for base in range(0, num_members, BLOCK):
        member = base + lane
        inside = member < num_members
        place = _search(member_end, tl.where(inside, member, -1), num_rows, STEPS)
        before = tl.load(member_end + place - 1, mask=inside & (place > 0), other=0)
        row = tl.load(rows + place, mask=inside, other=0)
        span = _search(start, tl.where(inside, place, 0), S + 1, STEPS) - 1
        level = tl.load(span_level + span, mask=inside, other=0)
        token = tl.load(query_start + row, mask=inside, other=0) + member - before
        tl.store(members + member, level * front_tokens + token, mask=inside)
    tl.debug_barrier()
    total = 0
    longest = 0
    for base in range(0, tile_room, BLOCK):
        tile = base + lane
        real = tile < num_tiles
        span = tl.minimum(_search(span_tiles, tl.where(real, tile, -1), S, STEPS), S - 1)
        before = tl.load(span_tiles + span - 1, mask=real & (span > 0), other=0)
        first, end = _members_of(start, member_end, span, real)
        member = first + (tile - before) * tokens_per_tile
        low = tl.load(span_first + span, mask=real, other=0)
        high = tl.load(span_last + span, mask=real, other=0)
        leader = tl.load(rows + tl.load(start + span, mask=real, other=0), mask=real, other=0)
        blocks = tl.where(real, (high - low + BLOCK_N - 1) // BLOCK_N, 0)
        work = blocks * kv_heads
        start_at = total + tl.cumsum(work, 0) - work
        tokens = tl.minimum(end - member, tokens_per_tile)
        slot = tl.load(slots + leader, mask=real, other=0)
        _put(tiles, tile_room, tile, start_at, member, tokens, high, low, high, slot, tile * 0, real)
        total += tl.sum(work, 0)
        longest = tl.maximum(longest, tl.max(blocks, 0))
    _cut(
        header, chunk_tile, tiles, total, longest, num_tiles, tile_room, kv_heads, 0, min_blocks, max_splits,
        num_chunks, target, BLOCK_N, STEPS, BLOCK,
    )  # fmt: skip


@triton.jit
def _members_of(start, member_end, span, mask):
    """Where a span's members begin and end."""
    low = tl.load(start + span, mask=mask, other=0)
    high = tl.load(start + span + 1, mask=mask, other=0)
    first = tl.load(member_end + low - 1, mask=mask & (low > 0), other=0)
    end = tl.load(member_end + high - 1, mask=mask & (high > 0), other=0)
    return first, end


_MOST_UNITS = 4096
"""(Tile, KV head) pairs that may stay uncut: each program has room for a partial result, needed or not."""


def _room(kind: Kind, shape: Shape, most_tiles: int, device: torch.device, *, is_short: bool = False) -> Plan:
    """`is_short`: `_plan_short_kernel` makes the plan."""
    target = max(1, num_sms(device) * shape.ctas_per_sm // shape.sms_per_program)
    if shape.most_programs is not None:
        target = min(target, shape.most_programs)
    num_chunks = target
    units = most_tiles * kind.num_kv_heads
    if shape.may_align and target <= 2 * units <= 2 * _MOST_UNITS:
        num_chunks += units
    elif shape.may_pad and is_short:
        num_chunks = max(target, min(units, _MOST_UNITS))
    return Plan(
        shape=shape,
        target=target,
        num_chunks=num_chunks,
        tokens_per_tile=shape.block_m // kind.group,
        tiles=torch.empty((NUM_FIELDS, most_tiles), dtype=torch.int32, device=device),
        header=torch.empty(NUM_HEADER, dtype=torch.int32, device=device),
        chunk_tile=torch.empty(num_chunks, dtype=torch.int32, device=device),
        counters=torch.empty((most_tiles, kind.num_kv_heads), dtype=torch.int32, device=device),
    )


def _limits(kind: Kind, shape: Shape, device: torch.device) -> tuple[int, int]:
    """(fewest blocks a chunk holds, most chunks a tile is cut into)."""
    return max(1, shape.min_tokens // shape.block_n), max(16, num_sms(device) // kind.num_kv_heads)


def _sizes(most: int) -> dict[str, int]:
    """Search steps and lanes for arrays of up to `most` entries, in few variants: each is a kernel to compile and load."""
    if most <= 64:
        return {"STEPS": 7, "BLOCK": 64}
    if most <= 1024:
        return {"STEPS": 11, "BLOCK": 1024}
    return {"STEPS": most.bit_length() + 1, "BLOCK": 1024}


_MOST_SHORT = 1024
"""Rows of one tile each that are planned at once."""


def _short_sizes(rows: int) -> tuple[int, int]:
    """(Rows, chunks of each at a time), in few variants as well."""
    return (64, 32) if rows <= 64 else (256, 16) if rows <= 256 else (1024, 8)


def plan_rows(
    inputs: AttentionInputs,
    kind: Kind,
    shape: Shape,
    *,
    least_query: int = 1,
    most_query: int = 2**30,
    fresh_from: int = 2**30,
    covered_2R: Tensor | None = None,
) -> Plan:
    """Plans the rows with `least_query` to `most_query` query tokens, but not those without context and with at least
    `fresh_from` of them. `covered_2R`: of `plan_spans`."""
    device, rows = inputs.kv_len_R.device, inputs.num_rows
    per_tile = shape.block_m // kind.group
    most_tiles = rows if most_query <= per_tile else inputs.num_tokens // per_tile + rows
    is_short = rows <= _MOST_SHORT and most_query <= per_tile and most_query < fresh_from
    plan = _room(kind, shape, max(1, min(inputs.num_tokens, most_tiles)), device, is_short=is_short)
    plan.prefixed = covered_2R is not None
    if is_short:
        covered = inputs.kv_len_R if covered_2R is None else covered_2R
        _plan_short(inputs, kind, plan, covered, inputs.kv_len_R[None], least_query, most_query, (0, 0))
        return plan
    min_blocks, max_splits = _limits(kind, shape, device)
    tile_room = plan.tiles.shape[1]
    scratch = torch.empty(rows, dtype=torch.int32, device=device)
    _plan_kernel[(1,)](
        inputs.query_start_R1,
        inputs.kv_len_R,
        inputs.slots_R,
        scratch if covered_2R is None else covered_2R,
        scratch,
        plan.tiles,
        plan.header,
        plan.chunk_tile,
        plan.counters,
        rows,
        tile_room,
        kind.num_kv_heads,
        per_tile,
        least_query,
        most_query,
        kind.window or 0,
        fresh_from,
        min_blocks,
        max_splits,
        plan.num_chunks,
        plan.target,
        CAUSAL=kind.causal,
        WINDOWED=kind.window is not None,
        SHARED=covered_2R is not None,
        BLOCK_N=shape.block_n,
        **_sizes(max(rows, tile_room)),
        num_warps=8,
    )
    return plan


@triton.jit(do_not_specialize=["R", "fresh_from"])
def _list_kernel(query_start, kv_len, places, count, R, fresh_from, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Program n lists the tiles that are the n-th of their rows, behind all that are later ones of theirs."""
    number = tl.program_id(0)
    row = tl.arange(0, BLOCK)
    inside = row < R
    first = tl.load(query_start + row, mask=inside, other=0)
    query = tl.load(query_start + row + 1, mask=inside, other=0) - first
    context = tl.load(kv_len + row, mask=inside, other=0) - query
    tiles = tl.where(inside & (context == 0) & (query >= fresh_from), (query + ROWS - 1) // ROWS, 0)
    mine = tiles > number
    place = tl.sum(tl.maximum(tiles - 1 - number, 0), 0) + tl.cumsum(mine.to(tl.int32), 0) - 1
    tokens = tl.minimum(query - number * ROWS, ROWS)
    tl.store(places + 2 * place, first, mask=mine)
    tl.store(places + 2 * place + 1, tokens * 65536 + number, mask=mine)
    if number == 0:
        tl.store(count, tl.sum(tiles, 0))


def list_fresh(inputs: AttentionInputs, fresh_from: int) -> Listed:
    """The tiles of rows without context that have at least `fresh_from` (one or more) tokens."""
    device, rows = inputs.kv_len_R.device, inputs.num_rows
    longest = min(inputs.max_query, inputs.num_tokens)
    most = inputs.num_tokens // TILE + min(rows, inputs.num_tokens // fresh_from)
    places = torch.empty((max(1, most), 2), dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    _list_kernel[(max(1, cdiv(longest, TILE)),)](
        inputs.query_start_R1, inputs.kv_len_R, places, count, rows, fresh_from, ROWS=TILE, BLOCK=power_of_two(rows, 16)
    )
    return Listed(places, count, longest)


def plan_chain(inputs: AttentionInputs, kind: Kind, shape: Shape, kv_len_PR: Tensor) -> list[Plan] | None:
    """Plans of P passes over the same rows, with one query each and lengths of their own, made at once. None: there are too
    many rows."""
    device, rows, passes = inputs.kv_len_R.device, inputs.num_rows, len(kv_len_PR)
    if rows > _MOST_SHORT or shape.block_m < kind.group:
        return None
    first = _room(kind, shape, max(1, rows), device, is_short=True)

    def several(one: Tensor) -> Tensor:
        """Each begins at a multiple of 16 bytes."""
        return torch.empty((passes, one.numel() + -one.numel() % 4), dtype=one.dtype, device=device)

    tiles, header = several(first.tiles), several(first.header)
    chunk_tile, counters = several(first.chunk_tile), several(first.counters)
    plans = [
        replace(
            first,
            tiles=tiles[each].view(first.tiles.shape),
            header=header[each],
            chunk_tile=chunk_tile[each, : first.num_chunks],
            counters=counters[each, : first.counters.numel()].view(first.counters.shape),
        )
        for each in range(passes)
    ]
    strides = chunk_tile.stride(0), counters.stride(0)
    _plan_short(inputs, kind, plans[0], inputs.kv_len_R, kv_len_PR, 1, 1, strides)
    return plans


def _plan_short(
    inputs: AttentionInputs,
    kind: Kind,
    plan: Plan,
    covered: Tensor,
    kv_len_PR: Tensor,
    least_query: int,
    most_query: int,
    strides: tuple[int, int],
) -> None:
    """Makes `plan`, and one for each further row of `kv_len_PR` behind it: `strides` of chunks and of counters on."""
    rows, device = inputs.num_rows, inputs.kv_len_R.device
    aligned_chunks = plan.num_chunks if plan.shape.may_align else plan.target
    _SHORT.launch(
        (len(kv_len_PR), 1),
        (
            inputs.query_start_R1, kv_len_PR, inputs.slots_R, covered,
            plan.tiles, plan.header, plan.chunk_tile, plan.counters,
        ),
        (),
        (),
        (kind.causal, kind.window is not None, plan.prefixed, plan.shape.block_n, *_short_sizes(rows)),
        num_warps=8,
        counts=(
            rows, plan.tiles.shape[1], kind.num_kv_heads, least_query, most_query, kind.window or 0,
            *_limits(kind, plan.shape, device), plan.num_chunks, aligned_chunks, plan.target, kv_len_PR.stride(0),
            *strides, int(plan.shape.may_pad),
        ),
    )  # fmt: skip


def plan_spans(inputs: AttentionInputs, kind: Kind, shape: Shape) -> tuple[Plan, Tensor]:
    """Plans the pass over the shared spans. Returns the plan and int32 [2, R]: the KV tokens it covers of each row, and in
    how many spans."""
    shared = inputs.shared
    assert shared is not None
    device, rows = inputs.kv_len_R.device, inputs.num_rows
    spans, most_rows = shared.last_S.shape[0], shared.rows_M.shape[0]
    per_tile = shape.block_m // kind.group
    most_members = min(most_rows * inputs.max_query, shared.levels * shared.num_tokens)
    plan = _room(kind, shape, max(1, most_members // per_tile + spans), device)
    plan.members = torch.empty(most_members, dtype=torch.int32, device=device)
    covered_2R = torch.empty((2, rows), dtype=torch.int32, device=device)
    min_blocks, max_splits = _limits(kind, shape, device)
    tile_room = plan.tiles.shape[1]
    _plan_spans_kernel[(1,)](
        inputs.query_start_R1,
        inputs.slots_R,
        shared.rows_M,
        shared.start_S1,
        shared.first_S,
        shared.last_S,
        shared.level_S,
        torch.empty(most_rows, dtype=torch.int32, device=device),
        plan.members,
        covered_2R,
        torch.empty(spans, dtype=torch.int32, device=device),
        plan.tiles,
        plan.header,
        plan.chunk_tile,
        plan.counters,
        rows,
        spans,
        shared.num_tokens,
        tile_room,
        kind.num_kv_heads,
        per_tile,
        min_blocks,
        max_splits,
        plan.num_chunks,
        plan.target,
        BLOCK_N=shape.block_n,
        **_sizes(max(most_rows, spans + 1, tile_room)),
        num_warps=8,
    )
    return plan, covered_2R
