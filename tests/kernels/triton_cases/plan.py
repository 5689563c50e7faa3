"""Work lists of attention, against a model of them in plain Python."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from bough.kernels.attention import (
    fresh_hopper,
    plan as planning,
)
from bough.kernels.attention.inputs import (
    AttentionInputs,
)
from bough.kernels.attention.plan import Kind, Plan, Shape
from triton_cases.bed import Bed, Cases, poison


def plan_cases(bed: Bed) -> Cases:
    counts = (1, 7, 64, 100, 256, 300, 1024, 1500) if bed.large else (1, 5, 70, 260)
    kinds = ("decode", "short", "any", "prefixed")
    lengths = (40, 900, 30_000)
    axes = bed.cover(counts, kinds, lengths) if bed.large else [
        (*each, longest) for longest in lengths for each in bed.cover(counts, kinds)
    ]  # fmt: skip
    for count, rows, longest in axes:
        yield f"plan {count} {rows} rows up to {longest}", partial(_plan, bed, count, rows, longest)
    # Padded; cut, since some programs would have two rows; uncut, since most have two; padded.
    for rows in ((100, 600, 10, True), (140, 300, 6, False), (200, 300, 5, True), (24, 1000, 4, True)):
        yield f"plan {rows[0]} rows of {rows[1]}", partial(_even, bed, *rows)
    for count, passes, longest in bed.cover((1, 5, 64, 100), (1, 4), (100, 9000)):
        yield f"plan {passes} passes of {count} rows up to {longest}", partial(_chain, bed, count, passes, longest)
    for count, room in bed.cover((1, 8, 64, 500), (0, 400)):
        yield f"list fresh ones of {count} rows", partial(_listed, bed, count, room)


def _listed(bed: Bed, count: int, room: int) -> None:
    """Tiles of fresh rows as the device lists them, against those that the host cuts. `room`: tokens beyond the rows'."""
    rng, fresh_from = bed.rng, 64
    lengths = [rng.choice((0, 1, 63, 64, 128, 129, rng.randrange(1, 1000 // min(count, 8)))) for _ in range(count)]
    contexts = [rng.choice((0, 0, 17)) for _ in lengths]
    start = np.concatenate(([0], np.cumsum(lengths))).tolist()
    rows = [
        (first, n) for first, n, before in zip(start, lengths, contexts, strict=False) if n >= fresh_from > before == 0
    ]
    inputs = AttentionInputs(
        query_start_R1=bed.ints(start),
        kv_len_R=bed.ints([n + before for n, before in zip(lengths, contexts, strict=True)]),
        slots_R=bed.ints(range(count)),
        page_table=bed.ints([[0]]),
        loc_T=bed.ints([0] * (start[-1] + room), torch.int64),
        page_size=64,
        max_query=max(*lengths, 64) + room,
        max_kv=2000,
        k_caches=[],
        v_caches=[],
    )
    listed = planning.list_fresh(inputs, fresh_from)
    launches = fresh_hopper.cut(tuple(rows)).launches if rows else ()
    want = np.frombuffer(b"".join(launches), np.int32).reshape(-1, 2)
    assert int(listed.count) == len(want) <= len(listed.places)
    assert listed.places[: len(want)].tolist() == want.tolist()
    assert listed.longest >= max((n for _, n in rows), default=0)


def _even(bed: Bed, count: int, length: int, per_chunk: int, is_aligned: bool) -> None:
    """Rows of a length that may be padded, on a device with 132 multiprocessors."""
    inputs = AttentionInputs(
        query_start_R1=bed.ints(range(count + 1)),
        kv_len_R=bed.ints([length] * count),
        slots_R=bed.ints(range(count)),
        page_table=bed.ints([[0]]),
        loc_T=bed.ints([0] * count, torch.int64),
        page_size=64,
        max_query=1,
        max_kv=length,
        k_caches=[],
        v_caches=[],
    )
    kind = Kind(16, 1, None, True)
    before = planning.num_sms
    try:
        planning.num_sms = lambda device: 132
        with poison():
            got = planning.plan_rows(inputs, kind, Shape(16, 64, 9, 2, 1, may_pad=True), most_query=1)
    finally:
        planning.num_sms = before
    _same_plan(got, [(1, length - 1, row, row, 0, 0) for row in range(count)], kind, 132, count, in_order=False)
    assert got.header.tolist()[1::2] == [per_chunk, is_aligned]


def _plan(bed: Bed, count: int, rows: str, longest: int) -> None:
    """Work lists against a model of them in plain Python, whichever kernel makes them."""
    rng = bed.rng
    kv_heads, group = rng.choice((1, 2, 8)), rng.choice((1, 4))
    kind = Kind(kv_heads * group, kv_heads, rng.choice((None, 50)) if rows != "prefixed" else None, rng.random() < 0.8)
    block_n, few = 64 if bed.large else rng.choice((16, 64)), rng.random() < 0.3
    pads, programs = rng.random() < 0.5, rng.choice((None, 2, 31))
    shape = Shape(
        16, block_n, 4, 2, rng.choice((1, 4)), min_tokens=rng.choice((16, 320)), may_align=not few, most_programs=programs,
        may_pad=pads,
    )  # fmt: skip
    per_tile = shape.block_m // group
    most = {"decode": 1, "short": min(4, per_tile), "any": 2**30, "prefixed": 1}[rows]
    least, fresh_from = (rng.choice((1, 3)), rng.choice((30, 2**30))) if rows == "any" else (1, 2**30)
    lengths = [(rng.choice((1, 1, rng.randrange(0, 60)) if rows != "decode" else (1,)), 0) for _ in range(count)]
    lengths = [(query, rng.choice((0, 1, longest - 1, rng.randrange(longest)))) for query, _ in lengths]
    lengths += [(0, 0)] * rng.choice((0, 3))
    prefix = [rng.choice((0, context // block_n * block_n)) for _, context in lengths] if rows == "prefixed" else None
    spans = [rng.randrange(1, 4) if each else 0 for each in prefix or [0] * len(lengths)]
    start = np.concatenate(([0], np.cumsum([query for query, _ in lengths])))
    slots = np.random.permutation(len(lengths))
    inputs = AttentionInputs(
        query_start_R1=bed.ints(start),
        kv_len_R=bed.ints([sum(row) for row in lengths]),
        slots_R=bed.ints(slots),
        page_table=bed.ints([[0]]),
        loc_T=bed.ints([0] * (int(start[-1]) + 2), torch.int64),
        page_size=64,
        max_query=60,
        max_kv=longest + 60,
        k_caches=[],
        v_caches=[],
    )
    covered = zip(prefix or [0] * len(lengths), spans, strict=True)
    wanted = [
        (query, context, first, slot, *before)
        for (query, context), first, slot, before in zip(lengths, start.tolist(), slots.tolist(), covered, strict=False)
        if least <= query <= most and (context or query < fresh_from)
    ]
    sms = rng.choice((3, 132))
    before = planning.num_sms, planning._MOST_SHORT
    try:
        planning.num_sms = lambda device: sms
        for most_short in (before[1], 0):
            planning._MOST_SHORT = most_short
            with poison():
                got = planning.plan_rows(
                    inputs, kind, shape, least_query=least, most_query=most, fresh_from=fresh_from,
                    covered_2R=None if prefix is None else bed.ints([prefix, spans]),
                )  # fmt: skip
            in_order = len(lengths) > most_short or most > per_tile or most >= fresh_from
            _same_plan(got, wanted, kind, max(16, sms // kv_heads), int(start[-1]), in_order=in_order)
    finally:
        planning.num_sms, planning._MOST_SHORT = before


def _same_plan(
    got: Plan,
    rows: list[tuple[int, int, int, int, int, int]],
    kind: Kind,
    most_splits: int,
    real_tokens: int,
    *,
    in_order: bool,
) -> None:
    """`rows`: (queries, context, first token, slot, prefix, spans) of those that are planned. Not `in_order`: the longer
    ones first, by quarters of the longest, where they are not cut."""
    block_n, tiles, blocks = got.shape.block_n, [], []
    for query, context, first, slot, prefix, spans in rows:
        for offset in range(0, query, got.tokens_per_tile):
            tokens, position = min(query - offset, got.tokens_per_tile), context + offset
            high = min(context + query, position + tokens) if kind.causal else context + query
            low = 0 if kind.window is None else max(position - kind.window + 1, 0) // block_n * block_n
            low = prefix or low
            tiles.append([first + offset, tokens, position, low, high, slot, spans])
            blocks.append(max(-(-(high - low) // block_n), 1))
    assert got.target <= (got.shape.most_programs or got.target)
    units, total, longest = len(tiles) * kind.num_kv_heads, sum(blocks) * kind.num_kv_heads, max(blocks, default=0)
    per_chunk = max(-(-total // got.target), -(-longest // most_splits), got.shape.min_tokens // block_n, 1)
    room = got.num_chunks if got.shape.may_align else got.target
    aligned = units <= room and longest <= per_chunk
    if not aligned and room > got.target <= 2 * units and total * block_n <= units * planning.SHORT.value:
        aligned, per_chunk = True, 2 * per_chunk
    if not aligned and got.shape.may_pad and not in_order:
        for wider in (per_chunk + per_chunk * eighths // 8 for eighths in range(5)):
            if sum(-(-each // wider) for each in blocks) * kind.num_kv_heads <= got.target:
                aligned, per_chunk = True, wider
                break
        in_turn = -(-units // got.target)
        if not aligned and got.target < units <= got.num_chunks and in_turn * longest <= per_chunk + 2:
            aligned, per_chunk = True, longest
    if aligned:
        if not in_order:
            order = sorted(range(len(tiles)), key=lambda i: (longest - blocks[i]) * 4 // longest)
            tiles, blocks = [tiles[i] for i in order], [blocks[i] for i in order]
        blocks = [-(-each // per_chunk) * per_chunk for each in blocks]
    ends = np.cumsum([0] + [each * kind.num_kv_heads for each in blocks])
    assert got.header.tolist() == [int(ends[-1]), per_chunk, real_tokens, int(aligned)]
    assert -(-int(ends[-1]) // per_chunk) <= got.num_chunks
    expected = [[start, *tile] for start, tile in zip(ends.tolist(), tiles, strict=False)]
    assert got.tiles[:, : len(tiles)].T.tolist() == expected
    begins = np.arange(got.num_chunks) * per_chunk
    of_chunks = np.searchsorted(ends[:-1], begins, side="right") - 1
    assert got.chunk_tile.tolist() == np.maximum(of_chunks, 0).tolist()
    assert not got.counters.any()


def _chain(bed: Bed, count: int, passes: int, longest: int) -> None:
    """Plans of several passes at once are those of each of them."""
    rng = bed.rng
    kv_heads, group = rng.choice((1, 2, 8)), rng.choice((1, 4))
    kind = Kind(kv_heads * group, kv_heads, rng.choice((None, 50)), True)
    shape = Shape(16, 64, 4, 2, rng.choice((1, 4)), min_tokens=rng.choice((64, 192)), may_align=rng.random() < 0.5)
    first = np.array([rng.randrange(1, longest) for _ in range(count)])
    room = torch.zeros((passes, count + -count % 4), dtype=torch.int32, device=bed.device)
    room[:, :count] = bed.ints(first) + torch.arange(passes, dtype=torch.int32, device=bed.device)[:, None]
    kv_len_PR = room[:, :count]
    inputs = AttentionInputs(
        query_start_R1=bed.ints(np.arange(count + 1)),
        kv_len_R=kv_len_PR[0],
        slots_R=bed.ints(np.random.permutation(count)),
        page_table=bed.ints([[0]]),
        loc_T=bed.ints([0] * count, torch.int64),
        page_size=64,
        max_query=1,
        max_kv=longest + passes,
        k_caches=[],
        v_caches=[],
    )
    with poison():
        plans = planning.plan_chain(inputs, kind, shape, kv_len_PR)
        assert plans is not None
        assert len(plans) == passes
        for got, kv_len_R in zip(plans, kv_len_PR, strict=True):
            want = planning.plan_rows(replace(inputs, kv_len_R=kv_len_R), kind, shape, most_query=1)
            assert (got.shape, got.target, got.num_chunks) == (want.shape, want.target, want.num_chunks)
            assert torch.equal(got.tiles, want.tiles)
            assert torch.equal(got.header, want.header)
            assert torch.equal(got.chunk_tile, want.chunk_tile)
            assert torch.equal(got.counters, want.counters)
    most = planning._MOST_SHORT
    try:
        planning._MOST_SHORT = count - 1
        assert planning.plan_chain(inputs, kind, shape, kv_len_PR) is None
    finally:
        planning._MOST_SHORT = most
