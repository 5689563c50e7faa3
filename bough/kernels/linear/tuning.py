"""Measures the skinny kernel's configurations against the vendor's library, with weights that are cold in L2."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bough.kernels.activation.triton import silu_mul
from bough.kernels.choices import facts_of
from bough.kernels.linear.skinny import SkinnyTiling, reserve, skinny
from bough.kernels.linear.table import TOKEN_BUCKETS, early, entries, entry_name, save

_COLD_BYTES = 256 << 20
"""Distinct weights used in turn, several times the L2 of any device."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A product to tune for: "linear" or "silu_mul" with a weight [rows, depth]."""

    operation: str
    rows: int
    depth: int
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Measured:
    """What tuning found for one shape and token count."""

    shape: LinearShape
    tokens: int
    library_us: float
    best_us: float
    best: SkinnyTiling | None
    all_us: dict[SkinnyTiling, float]


def candidates(operation: str, tokens: int, hopper: bool) -> Iterator[SkinnyTiling]:
    """Configurations worth measuring. Two weight tiles a step (silu_mul) halve the rows of a tile."""
    halves = 2 if operation == "silu_mul" else 1
    if tokens <= 16:
        yield SkinnyTiling(64 // halves, 256, 4, 3, 2, tma=hopper)
        yield SkinnyTiling(32, 256 // halves, 4, 4, 3, tma=hopper)
        yield SkinnyTiling(16, 512 // halves, 4, 4, 3, tma=hopper)
        yield SkinnyTiling(64, 128 // halves, 4, 5, 2, tma=False)
    if tokens <= 32:
        if hopper:
            yield early(operation)
        for programs in (1, 2, 4):
            yield SkinnyTiling(64, 128 // halves, 4, 6 - programs // 2, programs, tma=hopper)
        yield SkinnyTiling(64, 128 // halves, 4, 4, 0, tma=hopper)
        yield SkinnyTiling(128, 128 // halves, 8, 4, 1, tma=hopper)
    if 16 < tokens <= 64:
        yield SkinnyTiling(128 // halves, 64, 4, 5, 2, tma=hopper)
        yield SkinnyTiling(128 // halves, 128, 8, 4, 1, tma=hopper)
        yield SkinnyTiling(64, 64, 4, 6, 2, tma=hopper)
    if 32 < tokens <= 128:
        yield SkinnyTiling(256 // halves, 64, 8, 4, 1, tma=hopper)
        yield SkinnyTiling(128 // halves, 64, 8, 4, 0, tma=hopper)


def time_us(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Median microseconds of one call, from a graph that makes them all, replayed."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    took = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(float(begin.elapsed_time(end)) * 1e3 / len(calls))
    return statistics.median(took)


def measure(
    shape: LinearShape, tokens: int, device: torch.device, configs: Sequence[SkinnyTiling] | None = None
) -> Measured:
    """Times the library and the configurations (default: all candidates); one that the device can't hold is passed over."""
    reserve(device)
    copies = max(2, min(64, -(-_COLD_BYTES // (shape.rows * shape.depth * 2))))
    weights = [torch.randn(shape.rows, shape.depth, dtype=shape.dtype, device=device) for _ in range(copies)]
    x = torch.randn(tokens, shape.depth, dtype=shape.dtype, device=device)
    gated = shape.operation == "silu_mul"
    turns = weights * max(1, 16 // copies)

    def library(weight: Tensor) -> Tensor:
        product = F.linear(x, weight)
        return silu_mul(product) if gated else product

    library_us = time_us([partial(library, w) for w in turns])
    timed: dict[SkinnyTiling, float] = {}
    hopper = facts_of(device.type, device.index).capability >= (9, 0)
    for config in dict.fromkeys(configs or candidates(shape.operation, tokens, hopper)):
        try:
            calls = [partial(skinny, x, w, config, silu_mul=gated) for w in turns]
            timed[config] = time_us(calls)
        except OutOfResources:
            continue
    best = min(timed, key=lambda config: timed[config], default=None)
    if best is None or timed[best] >= library_us:
        return Measured(shape, tokens, library_us, library_us, None, timed)
    return Measured(shape, tokens, library_us, timed[best], best, timed)


def tune(
    shapes: Iterable[LinearShape],
    device: torch.device,
    *,
    buckets: Sequence[int] = TOKEN_BUCKETS,
    again: bool = False,
) -> list[Measured]:
    """Measures the shapes that have no entry yet (all of them if `again`), saves the table, returns what was measured."""
    found = []
    table = entries(device)
    for shape in shapes:
        for tokens in buckets:
            key = entry_name(shape.operation, tokens, shape.rows, shape.depth, shape.dtype)
            if key in table and not again:
                continue
            measured = measure(shape, tokens, device)
            table[key] = measured.best
            found.append(measured)
    if found:
        save(device)
    return found
