"""Boards add up over processes, and their text is what Prometheus' own parser reads."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from prometheus_client.parser import text_string_to_metric_families

from bough.core.messages import End
from bough.observability.board import Board, Boards
from bough.observability.metrics import BY_NAME, MEANS, METRICS, PREFIX, Sheet, render, worked_out
from bough.observability.requests import RequestMeter

NAMES = {
    "up": "gauge",
    "heartbeat_age_seconds": "gauge",
    "cache_hit_rate": "gauge",
    "token_usage": "gauge",
    "num_running_reqs": "gauge",
    "num_prefilling_reqs": "gauge",
    "num_queue_reqs": "gauge",
    "num_queue_tokens": "gauge",
    "num_grammar_queue_reqs": "gauge",
    "num_used_tokens": "gauge",
    "num_cached_tokens": "gauge",
    "max_total_num_tokens": "gauge",
    "max_running_reqs": "gauge",
    "gen_throughput": "gauge",
    "prompt_throughput": "gauge",
    "decode_step_seconds": "gauge",
    "device_utilization": "gauge",
    "device_memory_used_bytes": "gauge",
    "device_memory_total_bytes": "gauge",
    "steps_total": "counter",
    "failed_steps_total": "counter",
    "oom_total": "counter",
    "computed_prompt_tokens_total": "counter",
    "retracted_requests_total": "counter",
    "forced_tokens_total": "counter",
    "spec_accept_length": "gauge",
    "spec_accept_rate": "gauge",
    "spec_verify_total": "counter",
    "media_items_total": "counter",
    "media_item_hits_total": "counter",
    "media_tower_tokens_total": "counter",
    "media_used_positions": "gauge",
    "spec_draft_tokens_total": "counter",
    "spec_accepted_tokens_total": "counter",
    "spec_accepted_by_position_total": "counter",
    "expert_balancedness": "gauge",
    "expert_rebalances_total": "counter",
    "expert_moves_total": "counter",
    "cut_grammars_total": "counter",
    "page_repairs_total": "counter",
    "engine_seconds_total": "counter",
    "num_live_reqs": "gauge",
    "queued_prompt_tokens": "gauge",
    "requests_submitted_total": "counter",
    "requests_total": "counter",
    "aborted_requests_total": "counter",
    "refused_requests_total": "counter",
    "deadline_exceeded_total": "counter",
    "prompt_tokens_total": "counter",
    "generation_tokens_total": "counter",
    "cached_tokens_total": "counter",
    "reasoning_tokens_total": "counter",
    "queue_time_seconds": "histogram",
    "prefill_time_seconds": "histogram",
    "decode_time_seconds": "histogram",
    "grammar_time_seconds": "histogram",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "http_requests_total": "counter",
    "background_failures_total": "counter",
    "key_requests_total": "counter",
    "key_prompt_tokens_total": "counter",
    "key_generation_tokens_total": "counter",
    "key_refused_total": "counter",
}
"""The names that dashboards and alerts are built on. One may be added; taking one away needs two releases' notice."""


def test_names_are_api() -> None:
    assert {metric.name: metric.kind for metric in METRICS} == NAMES
    assert all(metric.about.endswith(".") for metric in METRICS)


def read(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_every_family_is_in_the_text(tmp_path: Path) -> None:
    Sheet(tmp_path / "engine.board", "engine")
    Sheet(tmp_path / "api0.board", "api", paths=["/generate"])
    readings = worked_out(Boards(tmp_path).read(), up=True, heartbeat_age_s=0.25)
    text = render(readings, model='odd "name"\n')
    kinds = {family.name: family.type for family in text_string_to_metric_families(text.decode())}
    for name, kind in NAMES.items():
        assert kinds[PREFIX + (name.removesuffix("_total") if kind == "counter" else name)] == kind
    values = read(text)
    model = ("model_name", 'odd "name"\n')
    assert values[PREFIX + "up", frozenset({model})] == 1
    assert values[PREFIX + "heartbeat_age_seconds", frozenset({model})] == 0.25
    assert values[PREFIX + "requests_total", frozenset({model, ("finish_reason", "stop")})] == 0


def _count(path: str, times: int) -> None:
    sheet = Sheet(Path(path), "api", paths=["/generate"])
    cell = sheet.cell("http_requests_total", "/generate", "200")
    latency = sheet.histogram("e2e_request_latency_seconds")
    for _ in range(times):
        cell.add()
        latency.observe(0.3)


def test_several_workers_add_up(tmp_path: Path) -> None:
    """As with several API workers: whoever is asked gives the sum, also of those that have ended."""
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=_count, args=(str(tmp_path / f"api{at}.board"), 1000 * at)) for at in (1, 2, 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    values = read(render(Boards(tmp_path).read(), model="m"))
    labels = frozenset({("model_name", "m"), ("path", "/generate"), ("status", "200")})
    assert values[PREFIX + "http_requests_total", labels] == 6000
    assert values[PREFIX + "e2e_request_latency_seconds_count", frozenset({("model_name", "m")})] == 6000
    assert values[PREFIX + "e2e_request_latency_seconds_sum", frozenset({("model_name", "m")})] == pytest.approx(1800)


@given(st.lists(st.floats(0, 1000), max_size=60))
def test_histograms_count_like_brute_force(seen: list[float]) -> None:
    sheet = Sheet(None, "api")
    histogram = sheet.histogram("queue_time_seconds")
    for value in seen:
        histogram.observe(value)
    values = read(render(sheet.board.read(), model="m"))
    for bound in BY_NAME["queue_time_seconds"].bounds:
        key = (PREFIX + "queue_time_seconds_bucket", frozenset({("model_name", "m"), ("le", f"{bound:g}")}))
        assert values[key] == sum(value <= bound for value in seen)
    assert values[PREFIX + "queue_time_seconds_count", frozenset({("model_name", "m")})] == len(seen)


def test_a_half_written_or_foreign_board_is_left_out(tmp_path: Path) -> None:
    Board(tmp_path / "good.board", ["a"]).cells[0] = 3
    (tmp_path / "empty.board").write_bytes(b"")
    (tmp_path / "foreign.board").write_bytes(b"x" * 4096)
    assert Boards(tmp_path).read() == {"a": 3}


def test_shares_of_several_engines_are_averaged(tmp_path: Path) -> None:
    for number, (share, steps) in enumerate(((0.5, 3), (1.0, 4))):
        sheet = Sheet(tmp_path / f"engine{number}.board", "engine")
        sheet.cell("expert_balancedness").set(share)
        sheet.cell("steps_total").add(steps)
    readings = Boards(tmp_path, means=MEANS).read()
    assert (readings["expert_balancedness"], readings["steps_total"]) == (0.75, 7)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def measured() -> tuple[RequestMeter, Clock, Sheet]:
    sheet, clock = Sheet(None, "api"), Clock()
    return RequestMeter(sheet, clock), clock, sheet


def value(sheet: Sheet, name: str, **labels: str) -> float:
    return read(render(sheet.board.read(), model="m"))[PREFIX + name, frozenset({("model_name", "m"), *labels.items()})]


def test_a_streamed_request_is_measured_where_its_client_sees_it() -> None:
    meter, clock, sheet = measured()
    meter.submitted(1, 10)
    clock.now += 0.5
    meter.news(1, 1, None)
    for _ in range(4):
        clock.now += 0.1
        meter.news(1, 1, None)
    clock.now += 0.2
    meter.news(1, 2, End(reason="stop", prompt_tokens=10, completion_tokens=7, cached_tokens=4, queued_s=0.1))
    assert value(sheet, "time_to_first_token_seconds_sum") == pytest.approx(0.5)
    assert value(sheet, "inter_token_latency_seconds_count") == 6
    assert value(sheet, "inter_token_latency_seconds_sum") == pytest.approx(0.6)
    assert value(sheet, "e2e_request_latency_seconds_sum") == pytest.approx(1.1)
    assert value(sheet, "requests_total", finish_reason="stop") == 1
    assert value(sheet, "num_live_reqs") == 0
    readings = worked_out(sheet.board.read(), up=True, heartbeat_age_s=0)
    assert readings["cache_hit_rate"] == 0.4


def test_an_answer_in_one_piece_is_measured_by_the_engine() -> None:
    meter, clock, sheet = measured()
    meter.submitted(1, 10)
    clock.now += 2
    meter.news(1, 5, End(reason="length", completion_tokens=5, queued_s=0.25, prefill_s=0.5, decode_s=1.0))
    assert value(sheet, "time_to_first_token_seconds_sum") == pytest.approx(0.75)
    assert value(sheet, "inter_token_latency_seconds_count") == 4
    assert value(sheet, "inter_token_latency_seconds_sum") == pytest.approx(1.0)


def test_endings_are_counted_once_by_kind() -> None:
    meter, _, sheet = measured()
    for request in range(6):
        meter.submitted(request, 1)
    meter.news(0, 0, End(reason="abort", code="aborted"))
    meter.news(1, 0, End(reason="abort", code="deadline_exceeded"))
    meter.given_up(2, "given_up")
    meter.given_up(2, "given_up")
    meter.given_up(3, "error")
    meter.news(4, 0, End(reason="error"))
    assert value(sheet, "aborted_requests_total") == 2
    assert value(sheet, "deadline_exceeded_total") == 1
    assert value(sheet, "requests_total", finish_reason="error") == 2
    assert value(sheet, "requests_total", finish_reason="given_up") == 1
    assert value(sheet, "num_live_reqs") == 1
