"""What the ranks of one axis do together, as a protocol; `Alone` is the form for one rank.

Every rank of an axis makes the same calls in the same order. All ranks get the same bits: a sum is taken in the order of
ranks, in float32 for 16-bit types and rounded once, or it is made in one place and handed to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from bough.core.errors import BoughError

_HALF: Final = (torch.bfloat16, torch.float16)


class RankLost(BoughError):
    """A rank did not take part in a collective: it has died, hangs, or can't be reached."""


class Collectives(Protocol):
    """One rank's end. Calls return when this rank may go on: on a GPU, when the work is queued."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks. `x` may be overwritten and returned."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """`x` of every rank, stacked in the order of ranks: [...] -> [size, ...]. Shapes are equal on all ranks."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size, ...] -> [...]: the sum over ranks of what each holds at this rank's place."""
        ...

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Rows of `x` go to ranks: the first `send[0]` to rank 0, and so on. Returns the rows that came, `receive[r]` of
        them from rank r, in the order of ranks."""
        ...

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """`x` of rank `source`. On other ranks `x` has its shape and type, may be overwritten, and is returned."""
        ...

    def send(self, x: Tensor, to: int) -> None:
        """Gives `x` to one rank, which calls `receive`. `x` may be changed afterwards."""
        ...

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Fills `x` with what rank `source` sends next, and returns it."""
        ...

    def barrier(self) -> None:
        """Returns once every rank has called it. Waits on the host."""
        ...

    def close(self) -> None:
        """Frees what the channel holds; the last call a rank makes."""
        ...


class Alone:
    """The collectives of one rank."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x[0]

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x

    def send(self, x: Tensor, to: int) -> None:
        raise AssertionError("there is no other rank")

    def receive(self, x: Tensor, source: int) -> Tensor:
        raise AssertionError("there is no other rank")

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


ALONE: Final = Alone()


def ordered_sum(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """The sum of tensors of one shape, the first two first: the sum that every implementation gives, to the bit."""
    dtype = parts[0].dtype
    total = parts[0].float() if dtype in _HALF else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(dtype)
