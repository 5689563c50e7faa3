"""Pages that are copied, and how steps begin and end, with drafts in lines and in trees."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from random_trees import tree_step
from torch import Tensor

from bough.kernels.draft_chain import (
    ChainPages,
    ChainRows,
    ChainSide,
    reference as chain_reference,
    triton as chain_triton,
)
from bough.kernels.draft_tree import reference as tree_reference, triton as tree_triton
from bough.kernels.pages import reference as pages_reference, triton as pages_triton
from bough.kernels.step_end import reference as end_reference, triton as step_end
from bough.kernels.step_start import SlotState, reference as start_reference, triton as start
from triton_cases.bed import Bed, Cases, close, poison


def page_cases(bed: Bed) -> Cases:
    for dtype in (*bed.dtypes, torch.uint8):
        yield f"pages {dtype}", partial(_pages, bed, dtype)


def _pages(bed: Bed, dtype: torch.dtype) -> None:
    """Caches of several widths, one of them with pages of an odd number of bytes."""
    widths = [(9, 16, 2, 24)] * 3 + [(9, 16, 2, 8)] * 2 + [(9, 1, 3, 5)]
    caches = [torch.randint(0, 100, width, device=bed.device).to(dtype) for width in widths]
    expected = [cache.clone() for cache in caches]
    pages = bed.rng.sample(range(9), 8)
    source, target = bed.ints(pages[:4], torch.int64), bed.ints(pages[4:], torch.int64)
    pages_reference.copy_pages(expected, source, target)
    pages_triton.copy_pages(caches, source, target)
    for got, want in zip(caches, expected, strict=True):
        assert torch.equal(got, want)


def start_cases(bed: Bed) -> Cases:
    for rows, writes in (
        ((1, 0), (1, 258), (64, 384), (300, 7), (1500, 1300)) if bed.large else ((1, 0), (5, 300), (40, 9), (260, 1100))
    ):
        for most_drafts in (0, 3):
            name = f"start of {rows} rows, {writes} pages, {most_drafts} drafts"
            yield name, partial(_start, bed, rows, writes, most_drafts)


def _slot_state(bed: Bed, num_slots: int, pages_per_slot: int, page_size: int, most_drafts: int) -> SlotState:
    state = SlotState.make(num_slots, pages_per_slot, bed.device, most_drafts=most_drafts, line_parts=(1, 1, 3))
    for each, most in (
        (state.table_entries, 1000), (state.last_token, 2**40), (state.num_output, 500), (state.drafts, 2**40),
        (state.kv_len, pages_per_slot * page_size - most_drafts - 1),
    ):  # fmt: skip
        each.copy_(bed.ints(np.random.randint(0, most, each.shape), each.dtype))
    return state


def _copied(each: object) -> SimpleNamespace:
    names = getattr(each, "__slots__", None) or vars(each)
    held = {name: getattr(each, name) for name in names}
    return SimpleNamespace(**{name: value.clone() for name, value in held.items() if isinstance(value, Tensor)})


def _copied_state(state: SlotState) -> SlotState:
    entries = state.table_entries.clone()
    parts = entries.split_with_sizes([table.numel() for table in state.tables])
    return SlotState(
        tables=tuple(part.view(table.shape) for part, table in zip(parts, state.tables, strict=True)),
        table_entries=entries,
        last_token=state.last_token.clone(),
        kv_len=state.kv_len.clone(),
        num_output=state.num_output.clone(),
        drafts=state.drafts.clone(),
        room=state.room.clone(),
    )


def _start(bed: Bed, rows: int, writes: int, most_drafts: int) -> None:
    """Rows that the device completes, then some that it must not touch; padding writes one page over and over."""
    slots, pages_per_slot, page_size = rows + 5, 40, bed.rng.choice((1, 16, 48))
    state = _slot_state(bed, slots, pages_per_slot, page_size, most_drafts)
    places = state.table_entries.numel()
    at = bed.ints(np.random.permutation(places - 1)[: min(writes, places - 1)], torch.int64)
    pages = bed.ints(np.random.randint(0, 1000, len(at)))
    at[len(at) // 2 :], pages[len(at) // 2 :] = places - 1, 0
    num_query = 1 + np.random.randint(0, most_drafts + 1, rows)
    given, tokens = 7, int(num_query.sum())
    owner, first = np.repeat(np.arange(rows), num_query), np.repeat(np.cumsum(num_query) - num_query, num_query)
    place, of_rows = np.arange(tokens) - first, np.random.permutation(slots)[:rows]
    ids = np.where(place == 0, -1, np.where(np.random.rand(tokens) < 0.5, -1 - place, 77))
    room = state.kv_len.cpu().numpy()[of_rows] + num_query - np.random.randint(0, 2, rows)
    longs = partial(bed.ints, dtype=torch.int64)
    inputs = SimpleNamespace(
        table_at_U=at,
        table_pages_U=pages,
        derived=bed.ints([tokens, rows, tokens]),
        ids_T=longs([*ids, *range(given)]),
        positions_T=longs([*place, *range(given)]),
        token_slots_T=longs([*of_rows[owner], *[slots] * given]),
        loc_T=longs([*room[owner], *[-1] * given]),
        kv_len_R=bed.ints([*num_query, given]),
        slots_R=bed.ints([*of_rows, slots]),
        sample_slots_L=longs([*of_rows[owner], slots]),
        counter_L=longs([*place, 3]),
    )
    want_state, want = _copied_state(state), _copied(inputs)
    start_reference.start_step(want_state, want, page_size)  # type: ignore[arg-type]
    start.start_step(state, inputs, page_size)  # type: ignore[arg-type]
    for name in vars(want):
        assert torch.equal(getattr(inputs, name), getattr(want, name)), name
    assert torch.equal(state.table_entries, want_state.table_entries)
    sizes = [page_size, page_size, -(-page_size // 3)]
    got, want = start.locate(state, inputs, sizes), start_reference.locate(state, inputs, sizes)  # type: ignore[arg-type]
    for at, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(ours, theirs), f"line {at + 1}"


def end_cases(bed: Bed) -> Cases:
    for rows in (1, 64, 1500) if bed.large else (1, 9, 140):
        yield f"end of {rows} rows", partial(_end, bed, rows)
        for width in (2, 5, 16):
            for blocks in (False, True):
                yield f"{rows} rows verify {width}", partial(_verify, bed, rows, width, blocks)


def _samples(bed: Bed, rows: int, width: int) -> SimpleNamespace:
    """Sampling rows of a step with up to `width` samples each; drafts are few different ids, so that many are right."""
    count = np.random.randint(1, width + 1, rows)
    tokens = int(count.sum())
    longs = partial(bed.ints, dtype=torch.int64)
    return SimpleNamespace(
        ids_T=longs(np.random.randint(0, 2, tokens + 3)),
        positions_T=longs(np.random.randint(0, 500, tokens + 3)),
        sample_at_L=longs([*range(3, tokens + 3), 0, 0]),
        sample_slots_L=longs([*np.repeat(np.random.permutation(rows + 3)[:rows], count), rows + 3, rows + 3]),
        counter_L=longs([*np.random.randint(0, 100, tokens), 0, 0]),
        sample_start_R1=bed.ints([0, *np.cumsum(count), tokens, tokens]),
        tokens=tokens,
    )


def _end(bed: Bed, rows: int) -> None:
    state, inputs = _slot_state(bed, rows + 3, 4, 16, 0), _samples(bed, rows, 1)
    drawn = bed.ints(np.random.randint(0, 2**40, inputs.tokens + 1), torch.int64)
    expected = _copied_state(state)
    end_reference.advance(expected, inputs, drawn)  # type: ignore[arg-type]
    step_end.advance(state, inputs, drawn)  # type: ignore[arg-type]
    for name in ("last_token", "kv_len", "num_output", "drafts"):
        assert torch.equal(getattr(state, name)[: rows + 3], getattr(expected, name)[: rows + 3]), name


def _verify(bed: Bed, rows: int, width: int, blocks: bool) -> None:
    state, inputs = _slot_state(bed, rows + 3, 4, 16, 0), _samples(bed, rows, width)
    drawn = bed.ints(np.random.randint(0, 2, inputs.tokens + 2), torch.int64)
    blocked = bed.ints(np.random.rand(inputs.tokens + 2) < 0.1, torch.bool) if blocks else None
    expected = _copied_state(state)
    want = end_reference.verify(expected, inputs, drawn, rows + 2, width, blocked)  # type: ignore[arg-type]
    got = step_end.verify(state, inputs, drawn, rows + 2, width, blocked)  # type: ignore[arg-type]
    assert torch.equal(got, want)
    for name in ("last_token", "kv_len", "num_output", "drafts"):
        assert torch.equal(getattr(state, name)[: rows + 3], getattr(expected, name)[: rows + 3]), name


def tree_cases(bed: Bed) -> Cases:
    for rows, most, width in ((1, 4, 3), (9, 7, 4), (140, 15, 6)):
        for blocks in (False, True):
            yield f"{rows} trees of {most}", partial(_tree, bed, rows, most, width, blocks)


def _tree(bed: Bed, rows: int, most: int, width: int, blocks: bool) -> None:
    """Steps with trees, and tokens of other rows behind them, from their start to the KV of their paths."""
    case = tree_step(bed.rng, rows, most, width, page_size=bed.rng.choice((1, 16)))
    results = []
    for each in (tree_reference, tree_triton):
        state, inputs, caches = case.made(bed.device)
        step = each.start_tree(state, inputs, inputs.sample_at_L)
        drawn, blocked = case.drawn.to(bed.device), case.blocked.to(bed.device) if blocks else None
        path = each.walk_tree(state, inputs, step, drawn, case.num_rows, width, blocked)
        each.gather_path(caches, inputs.loc_T, path)
        kept = (*caches, state.last_token[:-1], state.kv_len[:-1], state.num_output[:-1])
        parts = (step.seen_T, step.tail_T, step.positions_T, step.counter_L, inputs.positions_T, inputs.counter_L)
        results.append((*parts, path.result, path.from_L, path.from_T, *kept))
    for number, (want, got) in enumerate(zip(*results, strict=True)):
        assert torch.equal(want, got), number


def chain_cases(bed: Bed) -> Cases:
    for count, places, page_size in bed.cover((1, 5, 64, 200), (1, 4), (1, 16, 64)):
        yield (
            f"chain {count} rows, {places} places, pages of {page_size}",
            partial(_ahead, bed, count, places, page_size),
        )
    sides = ((False, True), (True, False))
    for widths, dtype, gathered, normed in bed.cover(((64, 64), (96, 32), (4096, 2048)), bed.dtypes, sides, sides):
        yield f"sides {widths} {dtype} {gathered} {normed}", partial(_sides, bed, widths, dtype, gathered, normed)
    yield "sides, both gathered and normed", partial(_sides, bed, (64, 128), torch.bfloat16, (True, True), (True, True))
    yield "sides as they are", partial(_sides, bed, (64, 128), torch.float32, (False, False), (False, False))


def _ahead(bed: Bed, count: int, places: int, page_size: int) -> None:
    """Rows with pages for all places, for some and for none, and rows in the spare slot."""
    rng, slots, pages = bed.rng, count + 2, 12
    spare = slots
    room = [rng.randrange(pages * page_size + 1) for _ in range(slots)] + [pages * page_size]
    taken = [spare if rng.random() < 0.2 else slot for slot in rng.sample(range(slots), count)]
    kv_len = [max(0, room[slot] + rng.randrange(-places - 1, 3)) for slot in taken]
    rows = ChainRows(*(bed.ints(each, torch.int64) for each in (taken, kv_len, [rng.randrange(2**40) for _ in taken])))
    table = bed.ints(np.random.randint(0, 1000, (slots + 1, pages)))
    where = ChainPages(bed.ints(room, torch.int64), table, page_size)
    with poison():
        got = chain_triton.look_ahead(rows, where, places)
    want = chain_reference.look_ahead(rows, where, places)
    for name, mine, other in zip(want._fields, got, want, strict=True):
        assert mine.dtype == other.dtype, name
        assert torch.equal(mine, other), name
        assert mine.dim() == 1 or mine.stride(0) * mine.itemsize % 16 == 0, name
    for place in range(places):
        for row, (slot, length) in enumerate(zip(taken, kv_len, strict=True)):
            position = length + place
            fits = slot != spare and position < room[slot]
            at = int(table[slot, position // page_size]) * page_size + position % page_size if fits else -1
            assert int(got.loc_PR[place, row]) == at
            assert int(got.kv_len_PR[place, row]) == (1 if slot == spare else max(1, min(position + 1, room[slot])))


def _sides(
    bed: Bed, widths: tuple[int, int], dtype: torch.dtype, gathered: tuple[bool, bool], normed: tuple[bool, bool]
) -> None:
    made = []
    for width, gathers, norms in zip(widths, gathered, normed, strict=True):
        x = bed.normal(40 if gathers else 7, width + 8, dtype=dtype)[:, :width]
        at = bed.ints(np.random.randint(0, 40, 7), torch.int64) if gathers else None
        weight = bed.normal(width, dtype=dtype) if norms else None
        made.append(ChainSide(x, at, weight, *((1e-5, bed.rng.choice((0.0, 1.0))) if norms else ())))
    with poison():
        got = chain_triton.side_by_side(*made)
    close(got, chain_reference.side_by_side(*made), dtype)
    assert got.shape == (7, sum(widths))
    some = chain_triton.side_by_side(*(side._replace(x=side.x.t().contiguous().t()) for side in made))
    close(some, got, dtype)
