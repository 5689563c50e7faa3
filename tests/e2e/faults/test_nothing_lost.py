"""One server without many descriptors, told to end in the middle of everything: no batch is lost, no answer is passed off as
whole that was cut, and newcomers hear why they are refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import ENDLESS, Server, body

from bough.entrypoints.batches import BatchRunner, BatchStore, FileStore
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

COMPLETIONS = "/v1/completions"
DESCRIPTORS = 96
LINE_TOKENS = 4000
"""So many take longer than the server's drain timeout, on any machine."""
KEY = {"authorization": "Bearer first"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lost")


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    (place / "keys.yaml").write_text("first: first\n")
    flags = ["--batch-dir", str(place / "batches"), "--drain-timeout", "2", "--api-keys-file", str(place / "keys.yaml")]
    with Server(*flags, descriptors=DESCRIPTORS) as running:
        yield running


def make_batch(server: Server, count: int, tokens: int) -> str:
    asked = {"prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    lines = [{"custom_id": str(at), "method": "POST", "url": COMPLETIONS, "body": asked} for at in range(count)]
    text = "\n".join(map(json.dumps, lines)).encode()
    with httpx.Client(base_url=server.url, headers=KEY, timeout=60) as client:
        made = client.post("/v1/files", files={"file": text}, data={"purpose": "batch"}).json()
        wanted = {"input_file_id": made["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        return str(client.post("/v1/batches", json=wanted).json()["id"])


def status(server: Server, batch: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/v1/batches/{batch}", headers=KEY, timeout=60).json()
    return found


def metric(server: Server, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", headers=KEY, timeout=60).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"bough:{name}{{"))


def test_keys_are_read_again_on_sighup(server: Server, place: Path) -> None:
    """In every process that has to know them, without an end of any."""
    children = server.children

    def opens(key: str) -> int:
        return httpx.get(f"{server.url}/v1/models", headers={"x-api-key": key}, timeout=60).status_code

    assert (opens("first"), opens("second")) == (200, 401)
    (place / "keys.yaml").write_text("first: first\nsecond: second\n")
    os.kill(server.process.pid, signal.SIGHUP)
    assert until(lambda: opens("second") == 200, 60), server.log()
    assert opens("first") == 200
    for pid in children.values():
        os.kill(pid, signal.SIGHUP)  # whoever sends it to all of them ends none
    assert opens("first") == 200
    assert server.children == children


def test_no_descriptors_for_a_while(server: Server, place: Path) -> None:
    """A batch goes on where it was, whatever it met meanwhile."""
    batch = make_batch(server, 200, 40)
    assert until(lambda: status(server, batch)["status"] == "in_progress", 60)
    address = ("127.0.0.1", httpx.URL(server.url).port or 0)
    with contextlib.ExitStack() as idle:
        with contextlib.suppress(OSError):
            for _ in range(DESCRIPTORS + 20):
                idle.enter_context(socket.create_connection(address, timeout=5))
        assert until(lambda: "Too many open files" in server.log(), 60), "it has met the end of them"
        time.sleep(1.5)
    assert until(lambda: status(server, batch)["status"] == "completed", 120), server.log()
    assert status(server, batch)["request_counts"] == {"total": 200, "completed": 200, "failed": 0}
    ready = httpx.get(f"{server.url}/readyz", timeout=60)
    assert ready.status_code == 200
    if "'batches' failed" in server.log():
        assert metric(server, "background_failures_total") > 0
    again = make_batch(server, 1, 4)
    assert until(lambda: status(server, again)["status"] == "completed", 120), "and the runner takes the next one"


ASKED: dict[str, dict[str, Any]] = {
    "/generate": body(tokens=ENDLESS),
    "/v1/completions": {"prompt": "a", "max_tokens": ENDLESS, "temperature": 0},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": ENDLESS, "temperature": 0},
    "/v1/responses": {"input": "a", "max_output_tokens": ENDLESS, "temperature": 0},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": ENDLESS, "temperature": 0},
    "/api/chat": {
        "model": "default",
        "messages": [{"role": "user", "content": "a"}],
        "options": {"num_predict": ENDLESS, "temperature": 0},
    },
}


class Asking(threading.Thread):
    """One request, streamed or not, until its end."""

    def __init__(self, server: Server, path: str, streams: bool) -> None:
        super().__init__(daemon=True)
        self.path, self.streams = path, streams
        self.status, self.text = 0, ""
        self._url = server.url + path
        self._body = {**ASKED[path], "stream": streams}
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, headers=KEY, timeout=60) as reply:
            self.status = reply.status_code
            self.text = "".join(reply.iter_text())


def test_the_end_cuts_nothing_silently(server: Server, place: Path) -> None:
    batch = make_batch(server, 3, LINE_TOKENS)
    asking = [Asking(server, path, streams) for path in ASKED for streams in (False, True)]
    assert until(lambda: "in_progress" in status(server, batch)["status"], 60)
    assert until(lambda: metric(server, "num_live_reqs") == len(asking) + 3, 60), "they are all being answered"
    os.kill(server.process.pid, signal.SIGTERM)
    assert until(lambda: server.status("/readyz") == 503, 60)
    refused = httpx.post(f"{server.url}/generate", json=body(), headers=KEY, timeout=60)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    assert refused.headers["connection"] == "close"
    assert server.process.wait(60) == 0, server.log()
    for each in asking:
        each.join(60)
        if each.streams:
            assert each.status == 200
            last = [line for line in each.text.splitlines() if line.strip() and "[DONE]" not in line][-1]
            assert "cut off" in last, (each.path, last)
            assert "error" in last, (each.path, last)
        else:
            assert each.status == 503, (each.path, each.text)
            assert "cut off" in each.text
    stored = BatchStore(place / "batches")
    kept = next(found for found in stored.all() if found.id == batch)
    assert kept.status == "in_progress"
    asyncio.run(_work_off(place, batch))


async def _work_off(place: Path, batch: str) -> None:
    """The next process answers what was left, and every line is told once."""
    files, batches = FileStore(place / "batches"), BatchStore(place / "batches")

    async def call(endpoint: str, asked: dict[str, Any], tenant: str) -> tuple[int, str, dict[str, Any]]:
        assert tenant == "first"
        return 200, "id", {"choices": [{"finish_reason": "length"}], "usage": {"completion_tokens": LINE_TOKENS}}

    runner = BatchRunner(files, batches, call, frozenset({COMPLETIONS}))
    runner.start()
    while batches.get(batch, "first").status != "completed":
        await asyncio.sleep(0.02)
    await runner.close()
    done = batches.get(batch, "first")
    assert done.output_file_id is not None
    told = [json.loads(line) for line in files.path(files.get(done.output_file_id, "first")).read_text().splitlines()]
    assert sorted(each["custom_id"] for each in told) == ["0", "1", "2"]
    assert {each["response"]["body"]["choices"][0]["finish_reason"] for each in told} == {"length"}
    assert {each["response"]["body"]["usage"]["completion_tokens"] for each in told} == {LINE_TOKENS}
