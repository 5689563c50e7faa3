"""A loop that the waiting thread turns itself: alone, among other threads, from coroutines, interrupted, and at its end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bough.engine_client.driver import Driver, DriverClosed


@pytest.fixture(params=[0.0, 0.1], ids=["sleeps", "waits-busily"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    made = Driver("test-driver", busy_s=request.param)
    yield made
    made.close(wait_s=30)
    assert not made._thread.is_alive()


async def where(seconds: float = 0.0) -> int:
    await asyncio.sleep(seconds)
    return threading.get_ident()


def test_a_lone_call_stays_in_its_thread(driver: Driver) -> None:
    assert [driver.run(where(0.001)) for _ in range(5)] == [threading.get_ident()] * 5


def _worked(driver: Driver, wait_s: float) -> float:
    """Processor time that a caller's wait took."""
    before_s = time.thread_time()
    driver.run(where(wait_s))
    return time.thread_time() - before_s


def test_only_the_beginning_of_a_callers_own_wait_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.engine_client.selector._LATE_S", 60.0)  # whatever else runs on this machine
    made = Driver("test-driver", busy_s=0.1)
    try:
        # On a crowded machine a thread may get hardly any of the processor within a twentieth of a second.
        assert any(_worked(made, 0.05) > 0.01 for _ in range(100))
        assert _worked(made, 0.5) < 0.3
        assert made._thread.ident is not None
        clock = time.pthread_getcpuclockid(made._thread.ident)
        made.submit(where(0.3)).result(30)
        assert time.clock_gettime(clock) < 0.1, "the background thread waits for others, and sleeps"
    finally:
        made.close(wait_s=30)


def test_tasks_go_on_with_the_next_call(driver: Driver) -> None:
    heard: list[int] = []

    async def begin() -> asyncio.Task[None]:
        async def tick() -> None:
            while True:
                heard.append(len(heard))
                await asyncio.sleep(0)

        return asyncio.create_task(tick())

    task = driver.run(begin())
    before = len(heard)
    time.sleep(0.02)
    assert len(heard) == before, "nobody turns the loop between calls"
    driver.run(where(0.01))
    assert len(heard) > before

    async def end() -> None:
        task.cancel()

    driver.run(end())


def test_many_threads_share_one_loop(driver: Driver) -> None:
    loops: set[int] = set()
    done: list[int] = []

    async def one(number: int) -> int:
        loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(0.001 * (number % 7))
        return number

    def calls(base: int) -> None:
        for number in range(base, base + 30):
            done.append(driver.run(one(number)))

    threads = [threading.Thread(target=calls, args=(1000 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(done) == [1000 * n + i for n in range(8) for i in range(30)]
    assert loops == {id(driver.loop)}


def test_whoever_waits_longest_is_served_when_the_turning_thread_leaves(driver: Driver) -> None:
    answers: list[int] = []
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> int:
        begun.set()
        await go_on.wait()
        return threading.get_ident()

    other = threading.Thread(target=lambda: answers.append(driver.run(wait())))

    async def start_other() -> None:
        other.start()
        await begun.wait()

    driver.run(start_other())
    driver.call_soon(go_on.set)
    other.join(30)
    assert answers == [driver._thread.ident]


async def test_within_another_loop_the_background_thread_turns(driver: Driver) -> None:
    assert driver.run(where()) == driver._thread.ident
    assert await asyncio.wrap_future(driver.submit(where(0.01))) == driver._thread.ident


def test_the_background_thread_rests_and_the_caller_turns_again(driver: Driver) -> None:
    assert driver.submit(where()).result(30) == driver._thread.ident
    give_up = time.monotonic() + 30
    while driver.run(where()) != threading.get_ident():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_the_background_thread_leaves_the_loop_to_calls_that_follow_one_another_closely(driver: Driver) -> None:
    assert driver.submit(where()).result(30) == driver._thread.ident
    assert [driver.run(where(0.01)) for _ in range(30)] == [threading.get_ident()] * 30


def test_the_loop_is_handed_over_many_times(driver: Driver) -> None:
    """Threads that submit, callbacks and lone calls take turns; nobody is forgotten, nor stopped by another's end."""
    done: list[int] = []

    def alternate(number: int) -> None:
        for turn in range(200):
            if turn % 3 == number % 3:
                driver.submit(where()).result(30)
            elif turn % 3:
                driver.run(where(0.0001 * (turn % 2)))
            else:
                driver.call_soon(done.append, -1)
                driver.run(where())
        done.append(number)

    threads = [threading.Thread(target=alternate, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(number for number in done if number >= 0) == [0, 1, 2, 3]


def test_errors_are_the_callers(driver: Driver) -> None:
    async def fail() -> None:
        raise ZeroDivisionError("on purpose")

    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            driver.run(fail())
    assert driver.run(where()) == threading.get_ident()


def test_an_interrupt_cancels_the_work_and_nothing_else(driver: Driver) -> None:
    ended: list[str] = []

    async def work() -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            driver.run(work())
    assert ended == ["cancelled"] * 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert driver.run(where()) == threading.get_ident()


def test_an_interrupt_within_a_calls_last_turn_does_not_stop_the_next_call(driver: Driver) -> None:
    async def interrupted_as_it_ends() -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        asyncio.get_running_loop().call_soon(interrupt)

    with pytest.raises(KeyboardInterrupt):
        driver.run(interrupted_as_it_ends())
    assert driver.run(where(0.01)) == threading.get_ident()


def test_cancelling_a_submitted_call_ends_it(driver: Driver) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(100)
        finally:
            ended.set()

    future = driver.submit(work())
    assert begun.wait(30)
    future.cancel()
    assert ended.wait(30)


def test_idle_costs_nothing(driver: Driver) -> None:
    driver.submit(where()).result(30)
    assert driver._thread.ident is not None
    clock = time.pthread_getcpuclockid(driver._thread.ident)
    time.sleep(0.3)
    before = time.clock_gettime(clock)
    time.sleep(0.5)
    assert time.clock_gettime(clock) - before < 0.1


def test_the_end_leaves_nothing_open_and_nobody_waiting() -> None:
    before = set(os.listdir("/proc/self/fd"))
    made = Driver("test-driver")
    made.run(where())
    made.submit(where()).result(30)
    made.close(wait_s=30)
    made.close(wait_s=30)
    with pytest.raises(DriverClosed, match="shut down"):
        made.run(where())
    made.call_soon(print)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_whoever_waits_at_the_end_is_told_so() -> None:
    """One thread turns the loop, others wait for it, and some submit at the very end."""
    for late_s in (0.0, 0.05):
        made = Driver("test-driver")
        told: list[str] = []

        def wait(seconds: float, driver: Driver = made, told: list[str] = told) -> None:
            try:
                driver.run(where(seconds))
            except DriverClosed:
                told.append("closed")

        threads = [threading.Thread(target=wait, args=(100.0,), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(late_s)
        made.close(wait_s=30)
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"
        assert told == ["closed"] * 4
        assert made.loop.is_closed()


def test_whoever_waits_for_what_ends_with_the_loop_is_told_so() -> None:
    made = Driver("test-driver")
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go_on.wait(30)

    async def at_once() -> int:
        return 7

    made.call_soon(hold)
    assert begun.wait(30)
    future = made.submit(at_once())  # begins in the turn in which the loop is stopped, and ends in the next
    made.close(wait_s=0)
    go_on.set()
    assert future.result(30) == 7
    made._thread.join(30)
    assert made.loop.is_closed()


def test_a_thread_that_the_end_stops_at_once_knows_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be through with the loop before the thread that closes has come any further."""
    made = Driver("test-driver")
    told: list[type[BaseException]] = []
    begun = threading.Event()

    async def wait() -> None:
        begun.set()
        await asyncio.sleep(100)

    def turn() -> None:
        try:
            made.run(wait())
        except Exception as error:
            told.append(type(error))

    thread = threading.Thread(target=turn, daemon=True)
    thread.start()
    assert begun.wait(30)
    wake = made.loop.call_soon_threadsafe

    def wake_and_linger(*arguments: Any) -> Any:
        handle = wake(*arguments)
        time.sleep(0.1)
        return handle

    monkeypatch.setattr(made.loop, "call_soon_threadsafe", wake_and_linger)
    made.close(wait_s=30)
    thread.join(30)
    assert told == [DriverClosed]


async def test_a_coroutine_that_waits_at_the_end_is_told_so() -> None:
    made = Driver("test-driver")
    future = asyncio.wrap_future(made.submit(where(100.0)))
    await asyncio.sleep(0.02)
    made.close(wait_s=30)
    with pytest.raises(DriverClosed):
        await asyncio.wait_for(future, 30)


def test_a_cancelled_call_tidies_up_although_the_turning_thread_leaves(driver: Driver) -> None:
    tidied = threading.Event()
    begun = threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(100)
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            tidied.set()

    async def turn() -> None:
        """Leaves as soon as the other call was cancelled, before that has ended."""
        future = driver.submit(work())
        while not begun.is_set():
            await asyncio.sleep(0)
        future.cancel()

    driver.run(turn())
    assert tidied.wait(10), "nobody turns the loop for what the call does at its end"
    give_up_s = time.monotonic() + 10
    while driver._calls and time.monotonic() < give_up_s:  # the loop counts it out in its next turn
        time.sleep(0.001)
    assert driver._calls == 0


def test_a_call_cancelled_before_it_begins_never_does(driver: Driver) -> None:
    begun: list[int] = []

    async def work() -> None:
        begun.append(1)

    async def turn() -> None:
        driver.submit(work()).cancel()
        while driver._calls:
            await asyncio.sleep(0)

    driver.run(turn())
    assert not begun
