"""Adapters, by tokens that have one and tokens that have none."""

from functools import partial

import torch

from bough.kernels.lora import LoraStack, TokenAdapters, cpu as lora_cpu, reference as lora_reference, triton as lora
from triton_cases.bed import Bed, Cases, close, same_twice


def lora_cases(bed: Bed) -> Cases:
    shapes = (
        ((3072, (3072, 1024, 1024)), (8192, (3072,)), (3072, (16384,))) if bed.large
        else ((40, (24, 8, 9)), (200, (70,)), (700, (33, 33)))
    )  # fmt: skip
    ranks = ((256, 320), (16, 0, 3), (8,)) if bed.large else ((5, 20), (16, 0, 3), (33,))
    tokens = (1, 7, 64, 300) if bed.large else (1, 7, 70)
    for (depth, widths), ranks_S, count, shared, dtype in bed.cover(shapes, ranks, tokens, (True, False), bed.dtypes):
        name = f"lora {count}x{depth} to {widths} ranks {ranks_S} shared {shared} {dtype}"
        yield name, partial(_lora, bed, count, depth, widths, ranks_S, shared, dtype)


def _lora(
    bed: Bed,
    count: int,
    depth: int,
    widths: tuple[int, ...],
    ranks: tuple[int, ...],
    shared: bool,
    dtype: torch.dtype,
) -> None:
    parts = 1 if shared else len(widths)
    starts = [0, sum(widths)] if shared else [sum(widths[:at]) for at in range(len(widths) + 1)]
    gap = bed.rng.choice((0, 5))  # slots of a pool are wider than the ranks of what lies there
    offsets = [sum(ranks[:slot]) + gap * slot for slot in range(len(ranks))]
    total = sum(ranks) + gap * len(ranks)
    a = bed.normal(parts * total, depth, dtype=dtype, scale=depth**-0.5)
    b = bed.normal(sum(widths), total, dtype=dtype)
    for rank, offset in zip(ranks, offsets, strict=True):  # between them is NaN
        a[parts * (offset + rank) : parts * (offset + rank + gap)] = torch.nan
        b[:, offset + rank : offset + rank + gap] = torch.nan
    scales = bed.normal(len(ranks)).abs() + 0.5
    widest = sum(widths) if shared else max(widths)
    stack = LoraStack(
        a, b, scales, bed.ints(ranks), bed.ints(offsets), bed.ints(starts), parts, widest, max(ranks)
    )  # fmt: skip
    tokens = TokenAdapters(bed.ints([bed.rng.randint(0, len(ranks)) for _ in range(count)]))
    x = bed.normal(count, depth + 8, dtype=dtype)[:, :depth]
    out = bed.normal(count, sum(widths) + 16, dtype=dtype)
    want = out.float().clone()
    lora_reference.add_lora(want, x.float(), stack, tokens)

    def added() -> torch.Tensor:
        made = out.clone()
        lora.add_lora(made, x, stack, tokens)
        return made

    close(same_twice(added), want.to(dtype), dtype)
    none = TokenAdapters(torch.zeros_like(tokens.of_T))
    unchanged = out.clone()
    lora.add_lora(unchanged, x, stack, none)
    assert torch.equal(unchanged, out)
    if not bed.large:
        made = out.clone()
        lora_cpu.add_lora(made, x, stack, tokens)
        close(made, want.to(dtype), dtype)
