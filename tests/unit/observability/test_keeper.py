"""Background tasks that fail are started again, logged, and reported until they are well."""

from __future__ import annotations

import asyncio
import logging

import pytest

from bough.observability import keeper as module
from bough.observability.keeper import Keeper


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_S", (0.001, 0.004))


async def test_a_task_that_fails_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    failed: list[str] = []
    keeper = Keeper(failed.append, clock=lambda: now)
    begun: list[int] = []
    well = asyncio.Event()

    async def work() -> None:
        begun.append(1)
        if len(begun) < 4:
            raise OSError(24, "Too many open files")
        well.set()
        await asyncio.Event().wait()

    with caplog.at_level(logging.ERROR):
        task = keeper.keep("errands", work)
        await asyncio.wait_for(well.wait(), 20)
    assert len(begun) == 4
    assert failed == ["errands"] * 3
    assert "Too many open files" in caplog.text
    assert "failed 3 times" in keeper.troubles()["errands"]
    now += 11.0
    assert keeper.troubles() == {}, "it has run long enough"
    await keeper.close()
    assert task.cancelled()


async def test_what_ends_well_is_over_and_what_waits_is_in_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper()
    done = keeper.keep("done", lambda: asyncio.sleep(0))
    await asyncio.wait_for(done, 20)
    assert keeper.troubles() == {}
    monkeypatch.setattr(module, "_PAUSE_S", (60.0, 60.0))

    async def broken() -> None:
        raise RuntimeError

    keeper.keep("broken", broken)
    await asyncio.sleep(0.01)
    assert list(keeper.troubles()) == ["broken"]
    await keeper.close()


def test_pauses_grow_and_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_S", (0.5, 30.0))
    now = 1000.0
    keeper = Keeper(clock=lambda: now)
    pauses = [keeper.stumbled("x", OSError()) for _ in range(9)]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    now += 100.0
    assert keeper.stumbled("x", OSError()) == 0.5
