"""Watching a real server: top, profile, a dump and its replay, log lines that machines read."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import ENDLESS, ROOT, Server, body

from tests.waiting import until

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "entrypoints"))

from collector import Collector

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def bough(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bough", *arguments], capture_output=True, text=True, timeout=300, cwd=ROOT, check=False,
        env={**os.environ, "COLUMNS": "120", **environ},
    )  # fmt: skip


def test_a_day_in_the_life(tmp_path: Path) -> None:
    """One server with everything on, since starting one takes its time."""
    collector = Collector()
    flags = (
        "--otlp-endpoint", collector.url, "--admin-api-key", "b0ss", "--dump-dir", str(tmp_path / "dump"),
        "--profile-dir", str(tmp_path / "profiles"), "--log-format", "json", "--log-requests",
        "--max-running-requests", "4",
    )  # fmt: skip
    with Server(*flags) as server:
        secret = "nobody should read this in a log"
        assert server.ask(body(secret, tokens=5, rid="told")).status_code == 200
        _top(server)
        _profile(server, tmp_path)
        _configure_logging(server)
        _traced(server)
        bad = server.ask({"text": 5})
        assert bad.status_code == 400
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(60) == 0
        log = server.log()
    collector.server.shutdown()
    _spans(collector)
    _lines(log, secret)
    _replay(tmp_path / "dump", secret)


def _busy(server: Server, count: int) -> list[threading.Thread]:
    threads = [
        threading.Thread(
            target=server.ask, args=(body(f"story {at}", tokens=ENDLESS, rid=f"story-{at}"), 600), daemon=True
        )
        for at in range(count)
    ]
    for thread in threads:
        thread.start()
    assert until(lambda: server.state()["running"] >= min(count, 4), 60)
    assert until(lambda: server.live() == count, 60)
    return threads


def _enough(server: Server, threads: list[threading.Thread]) -> None:
    """Nobody needs the rest of their stories."""
    boss = {"authorization": "Bearer b0ss"}
    told = httpx.post(f"{server.url}/abort_request", json={"abort_all": True}, headers=boss, timeout=60)
    assert told.status_code == 200
    for thread in threads:
        thread.join(60)
    assert until(lambda: server.live() == 0, 60)


def _top(server: Server) -> None:
    threads = _busy(server, 6)
    shown = bough("top", "--once", "--url", server.url, "--api-key", "b0ss")
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"running\s+4 of 4", shown.stdout)
    assert re.search(r"queued\s+2", shown.stdout)
    assert len(re.findall(r"story-\d", shown.stdout)) == 6
    plain = bough("top", "--once", "--url", server.url, BOUGH_ADMIN_API_KEY="", BOUGH_API_KEY="")
    assert plain.returncode == 0, plain.stderr
    assert "story-" not in plain.stdout, "names of requests are for the admin"
    _enough(server, threads)


def _profile(server: Server, directory: Path) -> None:
    threads = _busy(server, 1)
    recorded = bough("profile", "--url", server.url, "--steps", "20", "--name", "one", BOUGH_ADMIN_API_KEY="b0ss")
    assert recorded.returncode == 0, recorded.stderr
    assert "microseconds" in recorded.stdout
    (file,) = (directory / "profiles" / "one").iterdir()
    assert str(file) in recorded.stdout
    trace: dict[str, Any] = json.loads(file.read_text())
    assert len(trace["traceEvents"]) > 100
    _enough(server, threads)


TRACE = "0af7651916cd43dd8448eb211c80319c"


def _configure_logging(server: Server) -> None:
    """What is logged can be changed while the server runs, by the admin."""

    def post(key: str, **fields: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{server.url}/configure_logging", json=fields, headers=headers, timeout=60)

    assert post("wrong", log_requests=False).status_code == 401
    everybody = ["api0", "detokenizer", "engine"]
    told = {"success": True, "log_level": "info", "log_requests": False, "processes": everybody}
    # Named are those that answered within a second; who was slow does as it was told all the same.
    assert until(lambda: post("b0ss", log_requests=False).json() == told, 60)
    assert server.ask(body(tokens=2, rid="unseen")).status_code == 200
    assert post("b0ss", log_requests=True, log_level="debug").json()["log_level"] == "debug"
    assert server.ask(body(tokens=2, rid="seen again")).status_code == 200
    assert until(lambda: "seen again" in server.log(), 60)
    assert "unseen" not in server.log()
    assert post("b0ss", log_level="info").json()["log_requests"] is True


def _traced(server: Server) -> None:
    """One whole answer and one stream, both parts of a client's own trace."""
    for number, stream in enumerate((False, True)):
        parent = {"traceparent": f"00-{TRACE}-b7ad6b716920333{number}-01"}
        request = body(list(range(100 + number, 2900)), tokens=6, stream=stream, rid=f"traced-{number}")
        assert server.ask(request, headers=parent).status_code == 200


def _spans(collector: Collector) -> None:
    """The collector got both requests' whole way: API process, engine, and back."""
    for number in range(2):
        (root,) = (
            span
            for span in collector.spans
            if span.trace_id.hex() == TRACE and span.parent_span_id.hex() == f"b7ad6b716920333{number}"
        )
        assert root.name == "POST /generate"
        told = {item.key: item.value for item in root.attributes}
        assert told["gen_ai.usage.input_tokens"].int_value == 2800 - number
        assert told["gen_ai.usage.output_tokens"].int_value == 6
        inner = sorted(
            (span for span in collector.spans if span.parent_span_id == root.span_id),
            key=lambda span: span.start_time_unix_nano,
        )
        names = [span.name for span in inner]
        assert names[:2] == ["prepare", "queue"], "the API process, then the engine"
        assert names[2:-2] == ["prefill"] * (len(names) - 4)
        assert len(names) >= 6, "a long prompt is computed in several steps"
        assert names[-2:] == ["decode", "deliver"], "and back"
        end = root.start_time_unix_nano
        for span in inner:
            assert span.trace_id == root.trace_id
            assert end - 1_000_000 <= span.start_time_unix_nano <= span.end_time_unix_nano
            end = span.end_time_unix_nano
        assert end <= root.end_time_unix_nano + 1_000_000
    assert not [span for span in collector.spans if "health" in span.name], "probes are not traced"


def _lines(log: str, secret: str) -> None:
    parsed = [json.loads(line) for line in log.splitlines()]
    assert {"api0", "engine"} <= {line["process"] for line in parsed}
    for line in parsed:
        assert {"time", "level", "process", "logger", "message"} <= set(line)
    (asked,) = (line for line in parsed if line["message"] == "request" and line["rid"] == "told")
    assert asked["max_new_tokens"] == 5
    (ended,) = (line for line in parsed if line["message"] == "request ended" and line["rid"] == "told")
    assert ended["completion_tokens"] == 5
    assert ended["finish_reason"] == "length"
    assert secret not in log
    assert any("tokens/s out" in line["message"] for line in parsed), "a line about throughput every few seconds"


def _replay(dump: Path, secret: str) -> None:
    (file,) = dump.iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert any(line["body"].get("text") == secret for line in lines)
    assert {line["status"] for line in lines} >= {200, 400}
    assert "authorization" not in file.read_text()
    with Server() as again:
        few = dump.parent / "few.jsonl"
        kept = [
            line
            for line in lines
            if line["status"] == 200 and line["body"].get("rid", "").startswith(("told", "traced"))
        ]
        assert len(kept) == 3
        few.write_text("\n".join(json.dumps(line) for line in kept))
        sent = bough("replay", str(few), "--url", again.url, "--speed", "0")
        assert sent.returncode == 0, sent.stdout + sent.stderr
        assert "3 requests" in sent.stdout
        assert again.metrics()["requests_submitted_total"] == 3


def test_log_switches_reach_every_process() -> None:
    """Whichever of three API workers is told, all of them and the engine do as it says."""
    flags = (
        "--api-workers",
        "3",
        "--admin-api-key",
        "b0ss",
        "--log-level",
        "warning",
        "--decode-log-interval-s",
        "0.2",
    )
    everybody = ["api0", "api1", "api2", "detokenizer", "engine"]
    with Server(*flags) as server:

        def switched(**fields: Any) -> bool:
            """Whether all have heard; further workers come a little later, and who is slow is not named."""
            headers = {"authorization": "Bearer b0ss"}
            ask = lambda: httpx.post(f"{server.url}/configure_logging", json=fields, headers=headers, timeout=60).json()
            return bool(until(lambda: ask().get("processes") == everybody, 120))

        assert switched()
        assert server.ask(body(tokens=40, rid="quiet")).status_code == 200
        assert not re.search(r" info ", server.log())
        assert switched(log_level="info", log_requests=True)
        for at in range(24):  # each a connection of its own, which any worker may take
            assert server.ask(body(tokens=20, rid=f"loud-{at}")).status_code == 200
        told = server.log()
        assert all(f"rid=loud-{at}" in told for at in range(24))
        busy = lambda: server.ask(body(tokens=200)).status_code == 200
        told_rate = lambda: busy() and re.search(r" info +engine ", server.log())
        assert until(told_rate, 60), "the engine's line about throughput"
        assert switched(log_level="error", log_requests=False)
        before = len(server.log())
        for at in range(12):
            assert server.ask(body(tokens=20, rid=f"hush-{at}")).status_code == 200
        time.sleep(0.5)
        assert " info " not in server.log()[before:]
