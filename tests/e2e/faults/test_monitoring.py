"""The dashboard and the alerts ask for metrics that a live server has, and the numbers mean what they say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from serving import ROOT, Server, body

from bough.observability.metrics import KEY_METRICS, METRICS
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MONITORING = ROOT / "deploy" / "monitoring"
_NAME = re.compile(r"bough:[a-z0-9_]+")


def queries() -> Iterator[tuple[str, str]]:
    """(where, expression) of everything that asks Prometheus."""
    for path in sorted((MONITORING / "grafana" / "dashboards").glob("*.json")):
        dashboard = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.name}: {panel['title']}", target["expr"]
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                yield f"{path.name}: {variable['name']}", variable["query"]["query"]
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alerts.yaml: {rule['alert']}", rule["expr"]


def test_every_query_finds_its_metrics(steady: Server) -> None:
    assert steady.ask(body()).status_code == 200
    text = httpx.get(f"{steady.url}/metrics", timeout=60).text
    series: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series.setdefault(sample.name, set()).update(sample.labels)
    series |= {f"bough:{metric.name}": {"key"} for metric in KEY_METRICS}  # which only servers with keys have
    found = list(queries())
    assert len(found) > 30
    for where, expression in found:
        names = _NAME.findall(expression)
        assert names, where
        for name in names:
            assert name in series, f"{where} asks for {name}"
        for inner in re.findall(r"by \(([^)]*)\)", expression):
            for label in (each.strip() for each in inner.split(",")):
                assert any(label in series[name] for name in names), f"{where} groups by {label}"
        assert expression.count("(") == expression.count(")"), where


def test_the_dashboard_shows_every_metric() -> None:
    asked = {name for _, expression in queries() for name in _NAME.findall(expression)}
    bare = {re.sub(r"_bucket$", "", name.removeprefix("bough:")) for name in asked}
    hidden = {"cache_hit_rate", "prompt_throughput", "num_live_reqs", "requests_submitted_total", "max_running_reqs",
              "reasoning_tokens_total"}  # fmt: skip
    assert {metric.name for metric in METRICS} - bare == hidden


def test_compose_file_mounts_what_exists() -> None:
    compose = yaml.safe_load((MONITORING / "docker-compose.yaml").read_text())
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            if volume.startswith("./"):
                assert (MONITORING / volume.split(":")[0]).exists()
    assert (
        yaml.safe_load((MONITORING / "prometheus.yaml").read_text())["scrape_configs"][0]["metrics_path"] == "/metrics"
    )


def test_whichever_worker_is_asked_tells_the_same(steady: Server) -> None:
    """Two API workers: new connections land on either, and both know of all requests."""
    before = steady.metrics()
    for _ in range(20):
        assert steady.ask(body("Once upon a time " * 20, tokens=3)).status_code == 200
    assert until(lambda: steady.metrics()["num_running_reqs"] == 0, 60)
    assert until(lambda: steady.metrics()["steps_total"] > before["steps_total"], 60)
    told = [steady.metrics() for _ in range(12)]
    for each in told:
        assert each["requests_submitted_total"] - before["requests_submitted_total"] == 20
        assert each["generation_tokens_total"] - before["generation_tokens_total"] == 60
        assert each["e2e_request_latency_seconds_count"] - before["e2e_request_latency_seconds_count"] == 20
        assert each["inter_token_latency_seconds_count"] - before["inter_token_latency_seconds_count"] == 40
    assert 0 < told[0]["cache_hit_rate"] <= 1
    assert steady.metrics(path="/generate", status="200")["http_requests_total"] >= 20
    assert Path(ROOT / "deploy").is_dir()


def test_a_real_timeline(steady: Server) -> None:
    missed = [share_missed(steady, first) for first in range(10, 16)]
    assert min(missed) < 0.5, "the spans are where the time went, unless the machine stood still between two of them"


def share_missed(steady: Server, first: int) -> float:
    """What the spans of a request leave out of its time, of which 40 ms is the least that counts."""
    asked = steady.ask(body(list(range(first, 1000)), tokens=6), headers={"x-trace": "1"})
    (told,) = json.loads(asked.headers["x-trace"])["answers"]
    names = [span["name"] for span in told["spans"]]
    assert names[:2] == ["prepare", "queue"]
    assert "prefill" in names
    assert names[-2:] == ["decode", "deliver"]
    end = 0.0
    for span in told["spans"]:
        assert span["start_ms"] >= end - 0.01, "spans follow each other, also across processes"
        end = span["start_ms"] + span["ms"]
    total = sum(span["ms"] for span in told["spans"])
    whole = 1e3 * float(asked.json()["meta_info"]["e2e_latency"])
    return abs(whole - total) / max(whole, 40)


def test_a_dead_server_is_an_alert() -> None:
    """It tells nothing: what Prometheus itself knows must do."""
    rules = {
        rule["alert"]: rule["expr"]
        for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    }
    job = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())["scrape_configs"][0]["job_name"]
    parts = {part.strip() for part in rules["BoughNotReady"].split(" or ")}
    assert {f'up{{job="{job}"}} == 0', f'absent(up{{job="{job}"}})', "bough:up == 0"} == parts
