"""Every collective with inputs that only its rank knows, and what numpy says must come out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bough.distributed.mesh import Axis

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
SHAPES = ((3,), (5, 64), (257, 130))


def brought(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """What a rank brings to a call."""
    generator = torch.Generator().manual_seed(1000 * rank + sum(shape))
    if dtype is torch.int64:
        return torch.randint(-1000, 1000, shape, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


def in_order(parts: list[Tensor]) -> Tensor:
    """The sum in the order of ranks, rounded once: numpy's, element by element."""
    dtype = parts[0].dtype
    total = parts[0].float().numpy().copy() if dtype.is_floating_point else parts[0].numpy().copy()
    for part in parts[1:]:
        total += (part.float() if dtype.is_floating_point else part).numpy()
    return torch.from_numpy(np.asarray(total)).to(dtype)


def calls(axis: Axis) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, what came out, what must) of each collective on this rank."""
    talk, rank, size = axis.talk, axis.rank, axis.size
    for dtype in DTYPES:
        for shape in SHAPES:
            name = f"{dtype} {shape}"
            parts = [brought(each, dtype, *shape) for each in range(size)]
            yield f"all_reduce {name}", talk.all_reduce(parts[rank].clone()), in_order(parts)
            yield f"all_gather {name}", talk.all_gather(parts[rank]), torch.stack(parts)
            stacks = [brought(each, dtype, size, *shape) for each in range(size)]
            summed = in_order([stack[rank] for stack in stacks])
            yield f"reduce_scatter {name}", talk.reduce_scatter(stacks[rank]), summed
            source = size - 1
            mine = parts[rank].clone() if rank == source else torch.zeros_like(parts[rank])
            yield f"broadcast {name}", talk.broadcast(mine, source), parts[source]
    counts = [[(3 * source + 2 * to) % 5 for to in range(size)] for source in range(size)]
    rows = [brought(each, torch.float32, sum(counts[each]), 7) for each in range(size)]
    came = talk.all_to_all(rows[rank], counts[rank], [counts[each][rank] for each in range(size)])
    parts = [rows[each].split(counts[each])[rank] for each in range(size)]
    yield "all_to_all", came, torch.cat(parts)
    if size > 1:
        ahead, behind = (rank + 1) % size, (rank - 1) % size
        for turn in range(2):  # even ranks first: no implementation needs room for what nobody takes yet
            if rank % 2 == turn:
                talk.send(brought(rank, torch.bfloat16, 9, 4), ahead)
            if behind % 2 == turn:
                got = talk.receive(torch.empty(9, 4, dtype=torch.bfloat16), behind)
                yield f"send {turn}", got, brought(behind, torch.bfloat16, 9, 4)
    strided = brought(rank, torch.float32, 8, 12).t()[::2]
    expected = torch.stack([brought(each, torch.float32, 8, 12).t()[::2] for each in range(size)])
    yield "a view", talk.all_gather(strided), expected
    empty: Any = talk.all_reduce(torch.empty(0, 4))
    yield "nothing", empty, torch.empty(0, 4)
    talk.barrier()


def check(axis: Axis) -> int:
    """Makes every call. Returns how many; raises AssertionError if one gives other bits than numpy."""
    done = 0
    for name, came, expected in calls(axis):
        assert came.dtype == expected.dtype, name
        assert came.shape == expected.shape, name
        assert torch.equal(came, expected), name
        done += 1
    return done
