"""Ranks as threads of one process: the same collectives as between processes, in microseconds and without set-up.

results = run_ranks(Layout(tp=2), lambda mesh: build(mesh).forward(x))
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, Queue
from typing import Any, TypeVar

import torch
from torch import Tensor

from bough.config.layout import AxisName, Layout
from bough.distributed.collectives import Collectives, RankLost, ordered_sum
from bough.distributed.mesh import Mesh, make_mesh

T = TypeVar("T")


class Meeting:
    """Where the threads of one group exchange what they bring, call by call."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.parcels: dict[tuple[int, int], Queue[Tensor]] = {
            (source, to): Queue() for source in range(size) for to in range(size)
        }
        self._changed = threading.Condition()
        self._brought: dict[int, dict[int, Any]] = {}
        """By call: what each rank brought..."""
        self._taken: dict[int, int] = {}
        """...and how many have seen it."""
        self._broken = ""

    def exchange(self, call: int, rank: int, what: str, brought: T) -> list[T]:
        """What every rank brought to a call, in the order of ranks. Raises `RankLost` if one does not come."""
        with self._changed:
            pile = self._brought.setdefault(call, {})
            pile[rank] = (what, brought)
            self._changed.notify_all()
            met = self._changed.wait_for(lambda: len(pile) == self.size or self._broken, self.timeout_s)
            if self._broken or not met:
                absent = sorted(set(range(self.size)) - set(pile))
                raise RankLost(what=self._broken or f"ranks {absent} did not come to {what}, call {call}")
            self._taken[call] = self._taken.get(call, 0) + 1
            if self._taken[call] == self.size:
                del self._brought[call], self._taken[call]
        kinds = {kind for kind, _ in pile.values()}
        if len(kinds) > 1:
            raise RankLost(what=f"ranks differ in call {call}: {', '.join(sorted(kinds))}")
        return [pile[each][1] for each in range(self.size)]

    def break_up(self, why: str) -> None:
        """Every rank that waits, or comes later, gets `RankLost`."""
        with self._changed:
            self._broken = self._broken or why
            self._changed.notify_all()


class ThreadCollectives:
    """A thread's end of a meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank
        self._calls = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return ordered_sum(self._exchange("all_reduce", x.clone()))

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange("all_gather", x.clone()))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return ordered_sum([part[self._rank] for part in self._exchange("reduce_scatter", x.clone())])

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        parts = self._exchange("all_to_all", x.clone().split_with_sizes(list(send)))
        came = [part[self._rank] for part in parts]
        if [len(rows) for rows in came] != list(receive):
            raise RankLost(what=f"{[len(rows) for rows in came]} rows came, {list(receive)} were expected")
        return torch.cat(came)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        sent = self._exchange("broadcast", x.clone() if self._rank == source else None)[source]
        assert sent is not None
        return sent.clone()

    def send(self, x: Tensor, to: int) -> None:
        self._meeting.parcels[self._rank, to].put(x.clone())

    def receive(self, x: Tensor, source: int) -> Tensor:
        try:
            return x.copy_(self._meeting.parcels[source, self._rank].get(timeout=self._meeting.timeout_s))
        except Empty:
            raise RankLost(what=f"rank {source} did not send") from None

    def barrier(self) -> None:
        self._exchange("barrier", None)

    def close(self) -> None:
        pass

    def _exchange(self, what: str, brought: T) -> list[T]:
        self._calls += 1
        return self._meeting.exchange(self._calls, self._rank, what, brought)


class ThreadMeshes:
    """The meshes of all ranks of a layout, in one process."""

    def __init__(self, layout: Layout, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._meetings: dict[tuple[int, ...], Meeting] = {}
        self.meshes = [make_mesh(layout, rank, self._connect) for rank in range(layout.size)]

    def break_up(self, why: str) -> None:
        for meeting in self._meetings.values():
            meeting.break_up(why)

    def _connect(self, _axis: AxisName, ranks: list[int], place: int) -> Collectives:
        meeting = self._meetings.setdefault(tuple(ranks), Meeting(len(ranks), self._timeout_s))
        return ThreadCollectives(meeting, place)


def run_ranks(layout: Layout, main: Callable[[Mesh], T], timeout_s: float = 60.0) -> list[T]:
    """Runs `main` in one thread per rank and returns what they return. The first error ends all of them, and is raised."""
    ranks = ThreadMeshes(layout, timeout_s)
    results: list[T | None] = [None] * layout.size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.no_grad():
                results[rank] = main(ranks.meshes[rank])
        except BaseException as error:
            errors.append(error)
            ranks.break_up(f"rank {rank} has failed: {error}")

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank{rank}") for rank in range(layout.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]
