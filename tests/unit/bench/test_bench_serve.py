"""`bough bench serve` against a server whose timing is known."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_fake_server import TimedServer

from bough.bench.load import arrivals
from bough.cli import bench
from bough.core.errors import BoughError, ConfigError, Unavailable
from tests.covers import long


def run_json(capsys: pytest.CaptureFixture[str], fake: TimedServer, *flags: str) -> dict[str, Any]:
    capsys.readouterr()
    base = ("serve", "--base-url", fake.url, "--input-len", "8", "--json")
    assert bench.run([*base, "--num-prompts", "6", "--output-len", "5", *flags]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def once_undisturbed(measure: Callable[[], bool]) -> bool:
    """Whether a measurement is right on a machine that stalls now and then."""
    return any(measure() for _ in range(8))


@pytest.mark.parametrize("backend", ["native", "openai-chat", *map(long, ("openai", "vllm-chat", "sglang-oai"))])
def test_latencies_are_those_of_the_server(
    capsys: pytest.CaptureFixture[str], timed: TimedServer, backend: str
) -> None:
    def measure() -> bool:
        timed.forget()
        timed.meet = 2
        facts = run_json(capsys, timed, "--backend", backend, "--max-concurrency", "2")
        assert (facts["completed"], facts["failed"]) == (6, 0)
        assert facts["total_output_tokens"] == 30
        assert facts["total_input_tokens"] == 66
        assert facts["cache_hit_rate"] == pytest.approx(4 / 11)
        assert facts["output_throughput"] == pytest.approx(30 / facts["duration"])
        assert facts["max_in_flight"] == timed.most_at_once == 2
        return (
            50 <= facts["median_ttft_ms"] < 200
            and 20 <= facts["median_tpot_ms"] < 80
            and 20 <= facts["median_itl_ms"] < 80
            and 130 <= facts["median_e2e_ms"] < 600
        )

    assert once_undisturbed(measure)


@pytest.fixture
def quick_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the client may be late; here that is not the question."""
    monkeypatch.setattr("bough.bench.report._LATE_MS", math.inf)
    monkeypatch.setattr("bough.bench.report._BUSY", math.inf)


@pytest.mark.usefixtures("quick_client")
def test_a_finite_rate_is_kept_and_named_as_the_limit(capsys: pytest.CaptureFixture[str], timed: TimedServer) -> None:
    def measure() -> bool:
        timed.forget()
        facts = run_json(capsys, timed, "--request-rate", "20", "--arrival", "fixed", "--num-prompts", "20")
        sent = sorted(timed.times)[1:]  # the first was the warm-up
        gaps = [after - before for before, after in itertools.pairwise(sent)]
        return statistics.mean(gaps) == pytest.approx(0.05, rel=0.2) and facts["limit"] == "rate"

    assert once_undisturbed(measure)


@pytest.mark.usefixtures("quick_client")
def test_a_server_that_falls_behind_is_named(capsys: pytest.CaptureFixture[str], timed: TimedServer) -> None:
    timed.first_s = 0.3
    facts = run_json(capsys, timed, "--request-rate", "100", "--max-concurrency", "1", "--output-len", "1")
    assert facts["limit"] == "cap"
    facts = run_json(capsys, timed, "--output-len", "1")
    assert facts["limit"] == "server"


def test_goodput_counts_only_what_is_within_all_limits(capsys: pytest.CaptureFixture[str], timed: TimedServer) -> None:
    facts = run_json(capsys, timed, "--goodput", "ttft:100000", "tpot:100000")
    assert facts["good_share"] == 1.0
    assert facts["request_goodput"] == pytest.approx(facts["request_throughput"])
    facts = run_json(capsys, timed, "--goodput", "ttft:100000", "tpot:0.001")
    assert facts["request_goodput"] == 0.0


def test_client_processes_share_the_requests(capsys: pytest.CaptureFixture[str], timed: TimedServer) -> None:
    timed.meet = 7
    facts = run_json(capsys, timed, "--client-processes", "2", "--num-prompts", "7")
    assert facts["completed"] == 7
    assert len(timed.bodies) == 8
    assert timed.most_at_once == 7


def test_without_streaming_only_whole_answers_are_timed(capsys: pytest.CaptureFixture[str], timed: TimedServer) -> None:
    def measure() -> bool:
        facts = run_json(capsys, timed, "--disable-stream", "--backend", "openai")
        assert facts["total_output_tokens"] == 30
        assert "mean_ttft_ms" not in facts
        return 130 <= facts["median_e2e_ms"] < 600

    assert once_undisturbed(measure)
    with pytest.raises(ConfigError, match="no first token"):
        run_json(capsys, timed, "--disable-stream", "--goodput", "ttft:5")


def test_failed_requests_are_told_and_not_averaged(capsys: pytest.CaptureFixture[str], timed: TimedServer) -> None:
    timed.fail_after = 4  # with the warm-up, three of six are answered
    facts = run_json(capsys, timed)
    assert (facts["completed"], facts["failed"]) == (3, 3)
    assert any("out of order" in error for error in facts["errors"])
    assert facts["total_output_tokens"] == 15
    timed.fail_after = 0
    with pytest.raises(BoughError, match="warm-up"):
        run_json(capsys, timed)


def test_what_is_asked_reaches_the_server(capsys: pytest.CaptureFixture[str], timed: TimedServer) -> None:
    extra = '{"sampling_params": {"temperature": 0.7}, "priority": 3}'
    run_json(capsys, timed, "--dataset", "random-ids", "--extra-request-body", extra, "--disable-ignore-eos")
    path, body = timed.bodies[-1]
    assert path == "/generate"
    assert len(body["input_ids"]) == 8
    assert all(0 <= token < 100 for token in body["input_ids"])
    assert body["sampling_params"] == {"temperature": 0.7, "max_new_tokens": 5}
    assert body["priority"] == 3
    timed.forget()
    run_json(capsys, timed, "--backend", "openai-chat")
    path, body = timed.bodies[-1]
    assert path == "/v1/chat/completions"
    assert body["model"] == "timed"
    assert body["ignore_eos"] is True
    assert len(body["messages"][0]["content"].split()) == 8


def test_files_and_tables(capsys: pytest.CaptureFixture[str], timed: TimedServer, tmp_path: Path) -> None:
    record, picture = tmp_path / "runs.jsonl", tmp_path / "run.png"
    flags = ["--num-prompts", "4", "--output-len", "3", "--input-len", "4", "--repeat", "2", "--output-details"]
    if has_matplotlib():
        flags += ["--plot", str(picture)]
    assert bench.run(["serve", "--base-url", timed.url, *flags, "--json", str(record)]) == 0
    out = capsys.readouterr().out
    for said in ("requests/s", "TTFT", "verdict:", "in flight", "over 2 runs"):
        assert said in out
    report = json.loads(record.read_text())
    assert len(report["runs"]) == 2
    assert len(report["requests"]) == 4
    if has_matplotlib():
        assert picture.read_bytes().startswith(b"\x89PNG")


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def test_plot_says_what_it_needs(timed: TimedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    with pytest.raises(ConfigError, match="matplotlib"):
        bench.run(["serve", "--base-url", timed.url, "--plot", "x.png"])
    assert not timed.bodies


def test_bad_addresses_and_flags() -> None:
    with pytest.raises(Unavailable, match="no server answers"):
        bench.run(["serve", "--base-url", "http://127.0.0.1:1"])
    with pytest.raises(ConfigError, match="goodput"):
        bench.run(["serve", "--goodput", "speed:3"])
    with pytest.raises(ConfigError, match="places"):
        bench.run(["serve", "--max-concurrency", "1", "--client-processes", "2"])


def test_arrivals() -> None:
    assert arrivals(3, math.inf, "poisson", 1) == [0.0, 0.0, 0.0]
    assert arrivals(3, 4.0, "fixed", 1) == [0.0, 0.25, 0.5]
    times = arrivals(20_001, 50.0, "poisson", 1)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.05)  # exponential: spread equals mean
    assert arrivals(5, 50.0, "poisson", 1) != arrivals(5, 50.0, "poisson", 2)
