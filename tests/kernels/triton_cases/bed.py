"""What cases of Triton kernels have in common: the device, the axes that are covered, comparisons."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
Amount = Literal["each", "pairs", "all"]
"""How much of a table runs: every member of each axis at least once, every two members of different axes together at least
once, or every combination."""


@dataclass(frozen=True)
class Bed:
    """The device, the size of the inputs, and how many combinations of the cases' axes run."""

    device: torch.device
    large: bool
    rng: random.Random
    amount: Amount = "all"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float16, torch.float32) if self.large else (torch.float16, torch.float32)

    def cover(self, *axes: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Combinations of the axes' members, as many as `amount` asks for, and the same ones whatever the seed is."""
        if self.amount == "each":
            return each_member(*axes)
        return pairwise(*axes) if self.amount == "pairs" else list(product(*axes))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(dtype)

    def whole(self, *shape: int) -> Tensor:
        """Small whole numbers, whose sums are exact."""
        return torch.randint(-2, 3, shape, device=self.device).float()

    def ints(self, values: object, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype, device=self.device)

    def strided(self, tokens: int, heads: tuple[int, ...], width: int, dtype: torch.dtype) -> list[Tensor]:
        """Views of one fused projection."""
        fused = self.normal(tokens, sum(heads) * width, dtype=dtype)
        return [part.unflatten(1, (-1, width)) for part in fused.split([count * width for count in heads], 1)]


def each_member(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """So few combinations that every member of each axis occurs."""
    longest = max(len(axis) for axis in axes)
    return [tuple(axis[at % len(axis)] for axis in axes) for at in range(longest)]


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations such that every two members of different axes occur together: of those left the one that adds the most
    pairs, over and over."""
    left = list(product(*(range(len(axis)) for axis in axes)))
    pairs = {each: set(combinations(enumerate(each), 2)) for each in left}
    wanted, chosen = set().union(*pairs.values()), []
    while wanted:
        best = max(left, key=lambda each: len(pairs[each] & wanted))
        wanted -= pairs[best]
        chosen.append(tuple(axis[at] for axis, at in zip(axes, best, strict=True)))
    return chosen


Check = Callable[[], None]
Cases = Iterator[tuple[str, Check]]


@contextmanager
def poison() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Small relative to the whole, and nowhere wild."""
    assert got.shape == want.shape, (got.shape, want.shape)
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    if not want.numel():
        return
    a, b = got.double(), want.double()
    assert not a.isnan().any(), "not a number"
    limit = 2e-5 if dtype == torch.float32 else 1e-2
    error = float((a - b).norm() / b.norm().clamp(min=1e-12))
    assert error < limit, f"relative error {error:.2e}"
    worst = float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))
    assert worst < 5 * limit, f"worst entry off by {worst:.2e} of the largest"


def same_twice(function: Callable[[], Tensor]) -> Tensor:
    """The result, which a second run on a GPU must repeat bit for bit: a difference is a race. The interpreter runs one
    program after the other and has none."""
    with poison():
        first = function()
        if first.is_cuda:
            assert torch.equal(first, function()), "two runs differ"
    return first
