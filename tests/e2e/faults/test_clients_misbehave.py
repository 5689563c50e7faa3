"""Clients that leave, hurry, flood and probe: the memory comes back, others are served, refusals say when to return."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from serving import ENDLESS, Server, body

from tests.covers import cover
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def settled(server: Server, within_s: float = 60) -> bool:
    """Nothing runs and no page is held."""
    return bool(until(lambda: server.live() == 0 and server.held_pages() == 0, within_s))


# -- leaving ----------------------------------------------------------------------------------------------------------


def leave_after(server: Server, request: dict[str, Any], moment: Any) -> None:
    """Asks, waits until `moment` holds, and closes the connection."""

    async def run() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            asking = asyncio.ensure_future(client.post(f"{server.url}/generate", json=request))
            await asyncio.to_thread(lambda: until(lambda: asking.done() or moment(), 60, 0.005))
            assert not asking.done(), "it was to leave before its answer"
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize(("stage", "stream"), cover(["prefilling", "decoding", "queued", "compiling"], [False, True]))
def test_leaving_at_each_stage_frees_the_memory(stage: str, stream: bool) -> None:
    """Pages are back within two steps of the abort, which the simulation proves to the step; here through all
    processes, with a real connection that closes."""
    server = STAGED.server()
    request = body(list(range(3, 20_000)), tokens=10_000, stream=stream)
    if stage == "decoding":
        request = body("Once upon a time", tokens=ENDLESS, stream=stream)
    elif stage == "compiling":
        request["sampling_params"]["regex"] = (
            f"(({'|'.join('ab' * n for n in range(1, 60))}){{1,80}}){'c' * (1 + stream)}"
        )
    before = server.state()["counters"]
    hogs = []
    if stage == "queued":
        pool = ThreadPoolExecutor(2)
        hogs = [pool.submit(server.ask, body(f"hog {at}", tokens=ENDLESS, rid=f"hog-{at}")) for at in range(2)]
        assert until(lambda: server.state()["running"] == 2, 60)
    moments = {
        "prefilling": lambda: server.state()["prefilling"] > 0,
        "decoding": lambda: server.state()["running"] > 0,
        "queued": lambda: server.state()["queued"] > 0,
        "compiling": lambda: server.live() > 0,
    }
    leave_after(server, request, moments[stage])
    if stage == "queued":
        assert until(lambda: server.state()["queued"] == 0, 60)
        assert server.state()["running"] == 2, "it did not wait for those before it"
        for at in range(2):
            httpx.post(f"{server.url}/abort_request", json={"rid": f"hog-{at}"}, timeout=60)
        assert all(hog.result().status_code == 200 for hog in hogs)
    assert settled(server)
    after = server.state()["counters"]
    assert after["aborted"] == before["aborted"] + 1 + len(hogs)
    assert server.ask(body()).status_code == 200


class _Staged:
    """One server of two slots and small steps for all stages."""

    def __init__(self) -> None:
        self._made: Server | None = None

    def server(self) -> Server:
        if self._made is None:
            self._made = Server("--max-running-requests", "2", "--chunked-prefill-size", "64")
        return self._made

    def end(self) -> None:
        if self._made is not None:
            self._made.end()


STAGED = _Staged()


@pytest.fixture(scope="module", autouse=True)
def _end_staged() -> Any:
    yield
    STAGED.end()


async def _come_and_go(server: Server, count: int, at_once: int) -> list[str]:
    """Random clients: some wait for their answer, most leave at a random moment. Returns what went wrong."""
    rng = random.Random(11)
    wrong: list[str] = []
    gate = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        tokens = rng.choice([1, 8, 60, 400, 2000])
        stream, patience = rng.random() < 0.5, rng.choice([0.002, 0.01, 0.05, 0.2, None])
        words = " ".join(rng.choice(["apple", "pear", "plum"]) for _ in range(rng.choice([1, 20, 200])))
        if patience is None:
            tokens = min(tokens, 8)
        request = body(f"{rng.randrange(5)} {words}", tokens=tokens, stream=stream)
        async with gate:
            try:
                asked = client.post(f"{server.url}/generate", json=request)
                answer = await asyncio.wait_for(asked, patience or 60)
                if answer.status_code not in (200, 429):
                    wrong.append(f"{number}: {answer.status_code} {answer.text[:100]}")
            except TimeoutError:
                pass
            except httpx.HTTPError as error:
                wrong.append(f"{number}: {error!r}")

    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        await asyncio.gather(*(one(client, number) for number in range(count)))
    return wrong


def come_and_go(server: Server, count: int) -> None:
    before = server.state()["pages"]
    wrong = asyncio.run(_come_and_go(server, count, at_once=24))
    assert not wrong, wrong[:5]
    # A worker that was slow may yet hear of a client who came and went: so all of it is waited for.
    assert until(lambda: server.live() == 0 and server.metrics()["num_live_reqs"] == 0, 60), server.state()
    whole = lambda pages: pages["free"] + pages["cached"] == pages["total"]
    assert until(lambda: whole(server.state()["pages"]), 60), "every page is free or cached"
    unlocked = lambda pages: pages["evictable"] == pages["cached"]
    assert until(lambda: unlocked(server.state()["pages"]), 60), "nothing is locked"
    assert server.state()["pages"]["repairs"] == before["repairs"] == 0
    flushed = httpx.post(f"{server.url}/flush_cache?timeout=60", timeout=90)
    assert flushed.status_code == 200
    assert until(lambda: server.state()["pages"]["free"] == before["total"], 60), "the pool is back at its baseline"


def test_clients_come_and_go(steady: Server) -> None:
    come_and_go(steady, 120)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_thousand_clients_come_and_go(steady: Server) -> None:
    come_and_go(steady, 10_000)


# -- hurrying ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request(steady: Server, stream: bool) -> None:
    before = steady.metrics()
    began = time.monotonic()
    answer = steady.ask(body(tokens=ENDLESS, stream=stream), headers={"x-deadline-ms": "3000"})
    assert 3 <= time.monotonic() - began < 20, "the whole answer takes longer"
    if stream:
        assert answer.status_code == 200
        assert "deadline" in answer.text
    else:
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert settled(steady)
    assert steady.metrics()["deadline_exceeded_total"] == before["deadline_exceeded_total"] + 1


def test_a_deadline_that_is_kept_changes_nothing(steady: Server) -> None:
    free = steady.ask(body(tokens=5)).json()
    hurried = steady.ask({**body(tokens=5), "deadline_ms": 30_000})
    assert hurried.status_code == 200
    assert hurried.json()["output_ids"] == free["output_ids"]


# -- flooding ---------------------------------------------------------------------------------------------------------


def test_a_flood_is_refused_with_a_time_to_return(steady: Server) -> None:
    """More than fits the bound at once: the rest gets 429 quickly, whoever was let in gets an answer."""
    before = steady.metrics()["refused_requests_total"]
    count = 200
    with ThreadPoolExecutor(64) as pool:
        asked = [pool.submit(steady.ask, body(f"flood {at}", tokens=40)) for at in range(count)]
        asked += [pool.submit(steady.ask, body(tokens=40) | {"text": ["flood"] * 200}) for _ in range(4)]
        answers = [each.result() for each in asked]
    statuses = {status: sum(each.status_code == status for each in answers) for status in (200, 429)}
    assert sum(statuses.values()) == len(answers), {each.status_code for each in answers}
    assert statuses[200] > 0
    refused = [each for each in answers if each.status_code == 429]
    assert refused
    for each in refused:
        assert 1 <= int(each.headers["retry-after"]) <= 60
        assert each.json()["error"]["code"] == "overloaded"
    assert settled(steady)
    assert steady.metrics()["refused_requests_total"] >= before + len(refused)
    assert steady.ask(body()).status_code == 200, "and it is over"


# -- probing ----------------------------------------------------------------------------------------------------------


def test_a_thousand_probes_cost_nothing(steady: Server) -> None:
    paths = ["/livez", "/readyz", "/health", "/health_generate"]
    with httpx.Client(base_url=steady.url, timeout=60) as client:

        def took(method: str, path: str, **given: Any) -> float:
            began = time.monotonic()
            assert client.request(method, path, **given).status_code == 200
            return time.monotonic() - began

        tokens = [took("POST", "/generate", json=body(tokens=1)) for _ in range(30)]
        assert settled(steady)
        assert until(lambda: steady.metrics()["num_running_reqs"] == 0, 60)
        before, numbers = steady.state(), steady.metrics()
        probes = [took("GET", paths[at % 4]) for at in range(1000)]
    assert statistics.median(probes) < statistics.median(tokens), "less than a token of the tiniest model"
    after = steady.state()
    assert after["counters"] == before["counters"], "no step, no request, no token"
    assert after["pages"] == before["pages"]
    counted = steady.metrics()
    assert counted["requests_submitted_total"] == numbers["requests_submitted_total"]
    assert counted["http_requests_total"] - numbers["http_requests_total"] < 10, "probes are not traffic"


def test_health_does_not_flap_during_long_prefills(steady: Server) -> None:
    seconds = float(os.environ.get("BOUGH_TEST_PREFILL_S", "6"))
    prompts = [[at, *range(10, 3900)] for at in range(3, 2000)]
    give_up = time.monotonic() + seconds
    statuses: set[int] = set()
    with ThreadPoolExecutor(4) as pool:
        running = {pool.submit(steady.ask, body(prompts.pop(), tokens=1)) for _ in range(4)}
        while time.monotonic() < give_up:
            statuses.add(steady.status("/health"))
            done = {each for each in running if each.done()}
            assert all(each.result().status_code == 200 for each in done)
            running = (running - done) | {pool.submit(steady.ask, body(prompts.pop(), tokens=1)) for _ in done}
            time.sleep(0.02)
        assert all(each.result().status_code == 200 for each in running)
    assert statuses == {200}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_health_does_not_flap_for_minutes(steady: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOUGH_TEST_PREFILL_S", "300")
    test_health_does_not_flap_during_long_prefills(steady)


# -- what the device can't do -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_out_of_memory_costs_a_retry_and_then_one_request() -> None:
    """Step 6 runs out of memory once; then every step that brings token 777 in, once more than a request may."""
    with Server(step_faults="oom@6,oom@TOKEN:777,oom@TOKEN:777,raise@TOKEN:888") as server:
        lone = server.ask(body([9, 8, 7], tokens=12))
        assert lone.status_code == 200, "the step was tried again"
        assert until(lambda: server.metrics()["oom_total"] == 1, 30)
        failed = server.ask(body([5, 777, 6]))
        assert failed.status_code == 500
        message = failed.json()["error"]["message"]
        assert "out of memory" in message
        assert "on purpose" not in message, "what exactly failed is for the log"
        broken = server.ask(body([5, 888, 6]))
        assert broken.status_code == 500
        assert "on purpose" not in broken.text
        assert server.ask(body([9, 8, 7], tokens=12)).json()["output_ids"] == lone.json()["output_ids"]
        assert until(lambda: server.metrics()["oom_total"] == 3, 30)
        assert until(lambda: server.metrics()["failed_steps_total"] == 4, 30)
        assert server.status() == 200
        assert "failed on purpose" in server.log()
        assert settled(server)
