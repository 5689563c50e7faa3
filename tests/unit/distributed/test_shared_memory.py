"""Collectives in shared memory, with ranks as threads: they differ from processes in nothing but their address space."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import brought, check, in_order

from bough.distributed import shared_memory
from bough.distributed.collectives import RankLost
from bough.distributed.mesh import Axis
from bough.distributed.shared_memory import Patience, SharedMemoryCollectives, segment_bytes
from bough.ipc.segment import Segment
from bough.kernels.cpu_build import library


def run(size: int, main: Callable[[Axis], Any], *, native: bool = True, timeout_s: float = 60.0) -> list[Any]:
    """What `main` returns on each rank, or the error it raised."""
    if native and library() is None:
        pytest.skip("no compiler")
    segment = Segment.create(segment_bytes(size))
    results: list[Any] = [None] * size

    def rank_main(rank: int) -> None:
        talk = SharedMemoryCollectives(segment, rank, size, patience=Patience(timeout_s), native=native)
        try:
            results[rank] = main(Axis(rank, size, talk))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    segment.close()
    return results


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("native", [True, False])
def test_every_collective(size: int, native: bool) -> None:
    counts = run(size, check, native=native)
    assert all(isinstance(count, int) and count > 40 for count in counts), counts


def test_what_is_longer_than_a_slot_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", 4096)
    monkeypatch.setattr(shared_memory, "_MAIL_BYTES", 16)
    monkeypatch.setattr(shared_memory, "_TWO_SHOT_BYTES", 1024)
    counts = run(3, check)
    assert all(isinstance(count, int) and count > 40 for count in counts), counts


def test_sums_of_special_numbers_are_torch_s() -> None:
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), 65504.0, 1e-8, -0.0, 3.3895e38, 1.0])

    def main(axis: Axis) -> list[torch.Tensor]:
        mine = special.roll(axis.rank)
        return [axis.talk.all_reduce(mine.to(dtype)) for dtype in (torch.bfloat16, torch.float16, torch.float32)]

    for results in run(2, main):
        for dtype, came in zip((torch.bfloat16, torch.float16, torch.float32), results, strict=True):
            expected = in_order([special.to(dtype), special.roll(1).to(dtype)])
            assert torch.equal(came.nan_to_num(nan=12.0), expected.nan_to_num(nan=12.0)), dtype


def test_many_calls_in_a_row_do_not_overtake_one_another() -> None:
    """Ranks that come early or late at random: a slot that is filled again too soon would be seen."""

    def main(axis: Axis) -> bool:
        generator = torch.Generator().manual_seed(axis.rank)
        for turn in range(400):
            if torch.rand((), generator=generator) < 0.05:
                threading.Event().wait(0.001)
            came = axis.talk.all_reduce(torch.full((64,), float(turn * 7 + axis.rank)))
            if not torch.equal(came, torch.full((64,), float(3 * turn * 7 + 3))):
                return False
        return True

    assert run(3, main) == [True, True, True]


def test_what_is_sent_ahead_waits_for_its_reader() -> None:
    """A pipeline's first stage may be several steps ahead: at most the mailbox's room."""

    def main(axis: Axis) -> bool:
        if axis.rank == 0:
            for turn in range(20):
                axis.talk.send(brought(turn, torch.float32, 100, 50), 1)
            return True
        threading.Event().wait(0.05)
        return all(
            torch.equal(axis.talk.receive(torch.empty(100, 50), 0), brought(turn, torch.float32, 100, 50))
            for turn in range(20)
        )

    assert run(2, main) == [True, True]


@pytest.mark.parametrize("native", [True, False])
def test_who_does_not_come_is_named(native: bool) -> None:
    def main(axis: Axis) -> None:
        axis.talk.barrier()
        if axis.rank != 2:
            axis.talk.all_reduce(torch.zeros(3))

    first, second, third = run(3, main, native=native, timeout_s=0.5)
    assert third is None
    for error in (first, second):
        assert isinstance(error, RankLost)
        assert "rank 2 did not come" in error.what
        assert "all_reduce" in error.what


def test_a_rank_can_end_the_group() -> None:
    def main(axis: Axis) -> None:
        if axis.rank == 1:
            axis.talk.break_up()  # type: ignore[attr-defined]
        else:
            axis.talk.all_gather(torch.zeros(3))

    error, _ = run(2, main)
    assert isinstance(error, RankLost)
    assert "another rank has ended the group" in error.what
