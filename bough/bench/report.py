"""The report of a load test: rates, latencies, goodput, and what was the bottleneck."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bough.bench.load import RequestResult, ShareResult
from bough.core.errors import ConfigError

Json = dict[str, Any]

LATENCIES = ("ttft", "tpot", "itl", "e2e")
GOODPUT_NAMES = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2e", "e2el": "e2e"}
_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per later token",
    "itl": "between tokens",
    "e2e": "whole request",
}
_BUSY = 0.85
"""Share of a core from which the client counts as the limit."""
_LATE_MS = 25.0
"""Milliseconds by which its timers may fire late."""
_KEPT_UP = 0.95
"""Share of the offered rate that a server which keeps up reaches at least, between its first and its last answer."""
_SPANS = 2.0
"""Arrivals must last this many times as long as a request takes; otherwise the run does not show a steady state."""
_SLOWED = 1.5
"""How much longer late requests take than early ones if a queue grows."""
_FULL = 0.9
"""Share of the cap that counts as full."""


def goodput_limits(given: Sequence[str]) -> dict[str, float]:
    """`["ttft:200", "tpot:50"]` as milliseconds by name. Raises `ConfigError`."""
    limits: dict[str, float] = {}
    for item in given:
        name, _, value = item.partition(":")
        try:
            limits[GOODPUT_NAMES[name.lower()]] = float(value)
        except (KeyError, ValueError):
            raise ConfigError(
                what=f"--goodput {item!r} can't be read",
                why="it must be NAME:MILLISECONDS with ttft, tpot or e2e",
                fix="for example --goodput ttft:200 tpot:50",
            ) from None
    return limits


def summarise(
    result: ShareResult, *, rate: float, max_concurrency: int, limits: Mapping[str, float], streamed: bool
) -> Json:
    """Every number of the report, by the names other benchmarks use."""
    done = [each for each in result.outcomes if not each.error]
    begun = min((each.sent_s for each in result.outcomes), default=0.0)
    duration = max(max((each.ended_s for each in result.outcomes), default=0.0) - begun, 1e-9)
    inputs, outputs = sum(each.input_tokens for each in done), sum(each.output_tokens for each in done)
    cached = sum(each.cached_tokens for each in done)
    facts: Json = {
        "duration": duration,
        "completed": len(done),
        "failed": len(result.outcomes) - len(done),
        "errors": _errors(result.outcomes),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_cached_tokens": cached,
        "cache_hit_rate": cached / inputs if inputs else 0.0,
        "request_throughput": len(done) / duration,
        "input_throughput": inputs / duration,
        "output_throughput": outputs / duration,
        "total_throughput": (inputs + outputs) / duration,
        "peak_output_throughput": _peak(done),
        "concurrency": sum(each.ended_s - each.sent_s for each in result.outcomes) / duration,
        "max_in_flight": max(in_flight(result.outcomes)[1], default=0),
        "offered_throughput": _per_second([each.due_s for each in result.outcomes]),
        "steady_throughput": _per_second([each.ended_s for each in done]),
        "arrival_span": _span_s([each.due_s for each in result.outcomes]),
        "slowdown": _slowdown(result.outcomes),
        "client_busy": result.busy,
        "client_lag_ms": result.lag_ms,
    }
    series = latencies_ms(done)
    for name in LATENCIES if streamed else ("e2e",):
        facts |= _spread(name, series[name])
    if limits:
        facts |= _goodput(done, limits, duration)
    facts["limit"], facts["verdict"] = verdict(facts, rate=rate, max_concurrency=max_concurrency)
    return facts


def latencies_ms(done: Sequence[RequestResult]) -> dict[str, list[float]]:
    """Milliseconds by kind: one per request, and for `itl` one per token after the first."""
    return {
        "ttft": [1000 * (each.first_s - each.sent_s) for each in done if each.first_s],
        "tpot": [1000 * _tpot_s(each) for each in done if each.output_tokens > 1 and each.first_s],
        "itl": [1000 * gap for each in done for gap in each.gaps_s],
        "e2e": [1000 * (each.ended_s - each.sent_s) for each in done],
    }


def _tpot_s(outcome: RequestResult) -> float:
    last_s = outcome.arrivals[-1][0] if outcome.arrivals else outcome.ended_s
    return (last_s - outcome.first_s) / (outcome.output_tokens - 1)


def _spread(name: str, values: Sequence[float]) -> Json:
    if not values:
        return {f"{kind}_{name}_ms": 0.0 for kind in ("mean", "median", "std", "p90", "p95", "p99", "max")}
    array = np.asarray(values)
    p90, p95, p99 = np.percentile(array, (90, 95, 99))
    return {
        f"mean_{name}_ms": float(array.mean()),
        f"median_{name}_ms": float(np.median(array)),
        f"std_{name}_ms": float(array.std()),
        f"p90_{name}_ms": float(p90),
        f"p95_{name}_ms": float(p95),
        f"p99_{name}_ms": float(p99),
        f"max_{name}_ms": float(array.max()),
    }


def _goodput(done: Sequence[RequestResult], limits: Mapping[str, float], duration: float) -> Json:
    def good(outcome: RequestResult) -> bool:
        own = {
            "ttft": 1000 * (outcome.first_s - outcome.sent_s),
            "tpot": 1000 * _tpot_s(outcome) if outcome.output_tokens > 1 else 0.0,
            "e2e": 1000 * (outcome.ended_s - outcome.sent_s),
        }
        return all(own[name] <= limit for name, limit in limits.items())

    within = sum(good(outcome) for outcome in done)
    return {
        "goodput_limits_ms": dict(limits),
        "request_goodput": within / duration,
        "good_share": within / len(done) if done else 0.0,
    }


def _errors(outcomes: Sequence[RequestResult]) -> dict[str, int]:
    counted: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error:
            counted[outcome.error] = counted.get(outcome.error, 0) + 1
    return dict(sorted(counted.items(), key=lambda item: -item[1])[:5])


def _peak(done: Sequence[RequestResult]) -> float:
    """Maximum number of output tokens in any second."""
    seconds: dict[int, int] = {}
    for outcome in done:
        for at_s, new in outcome.arrivals:
            seconds[int(at_s)] = seconds.get(int(at_s), 0) + new
    return float(max(seconds.values(), default=0))


def in_flight(outcomes: Sequence[RequestResult]) -> tuple[list[float], list[int]]:
    """The times at which the number of requests in flight changed, and the numbers."""
    changes = [(each.sent_s, 1) for each in outcomes] + [(each.ended_s, -1) for each in outcomes]
    times, counts, now = [], [], 0
    for at_s, change in sorted(changes):
        now += change
        times.append(at_s)
        counts.append(now)
    return times, counts


def verdict(facts: Json, *, rate: float, max_concurrency: int) -> tuple[str, str]:
    """The bottleneck (client, rate, short, cap or server) and a sentence with the reason."""
    busy, lag_ms = facts["client_busy"], facts["client_lag_ms"]
    if busy > _BUSY or lag_ms > _LATE_MS:
        why = f"it used {100 * busy:.0f} % of a core and its timers fired {lag_ms:.0f} ms late"
        return "client", f"the client was the limit: {why}; use more --client-processes, or another machine"
    if max_concurrency and facts["concurrency"] >= _FULL * max_concurrency:
        return "cap", f"the server, with {max_concurrency} requests at once: the cap was full all the time"
    if math.isinf(rate):
        return "server", f"the server was the limit (the client used {100 * busy:.0f} % of a core)"
    offered, steady = facts["offered_throughput"], facts["steady_throughput"]
    rates = f"{facts['request_throughput']:.2f} of the {offered:.2f} requests/s offered were answered"
    long_enough = facts["arrival_span"] >= _SPANS * facts["median_e2e_ms"] / 1000
    if steady >= _KEPT_UP * offered and long_enough:
        return "rate", f"the server kept up: {rates}; raise --request-rate to find its limit"
    if facts["slowdown"] < _SLOWED and not long_enough:
        return (
            "short",
            f"the run was too short to tell: {rates}, most of it was its end; use more --num-prompts",
        )
    return "server", f"the server was the limit: {rates}, and late ones took {facts['slowdown']:.1f} times as long"


def _span_s(times_s: Sequence[float]) -> float:
    return max(times_s, default=0.0) - min(times_s, default=0.0)


def _per_second(times_s: Sequence[float]) -> float:
    """Events per second between the first and the last; 0 if they came at once."""
    span_s = _span_s(times_s)
    return (len(times_s) - 1) / span_s if span_s > 0 else 0.0


def _slowdown(outcomes: Sequence[RequestResult]) -> float:
    """How much longer the last quarter of the requests took than the first, from when they were due: medians."""
    ordered = sorted(outcomes, key=lambda each: each.due_s)
    quarter = max(1, len(ordered) // 4)
    took = [each.ended_s - each.due_s for each in ordered]
    early, late = (float(np.median(part)) if part else 0.0 for part in (took[:quarter], took[-quarter:]))
    return late / early if early > 0 else 1.0


def show(facts: Json, title: str) -> str:
    """The report for a terminal."""
    total = facts["completed"] + facts["failed"]
    rows = [
        ("completed", f"{facts['completed']} of {total}"),
        ("duration", f"{facts['duration']:.2f} s"),
        ("requests/s", f"{facts['request_throughput']:.2f}{_offer(facts)}"),
        ("input tokens/s", f"{facts['input_throughput']:,.1f}"),
        ("output tokens/s", f"{facts['output_throughput']:,.1f}{_peak_shown(facts)}"),
        ("in flight", f"mean {facts['concurrency']:.1f}, most {facts['max_in_flight']}"),
        ("prompt tokens cached", f"{100 * facts['cache_hit_rate']:.1f} %"),
    ]
    if "request_goodput" in facts:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in facts["goodput_limits_ms"].items())
        rows.append(
            (
                "goodput",
                f"{facts['request_goodput']:.2f} requests/s within {limits} ({100 * facts['good_share']:.0f} %)",
            )
        )
    lines = [title, "", *(f"  {name:<22} {text}" for name, text in rows), ""]
    lines.append(f"  {'milliseconds':<28}" + "".join(f"{kind:>10}" for kind in ("mean", "median", "p90", "p99")))
    for name in LATENCIES:
        if f"mean_{name}_ms" in facts:
            numbers = (facts[f"{kind}_{name}_ms"] for kind in ("mean", "median", "p90", "p99"))
            label = f"{name.upper()} ({_NAMES[name]})"
            lines.append(f"  {label:<28}" + "".join(f"{number:>10.2f}" for number in numbers))
    lines += [f"  failed {count} x: {error}" for error, count in facts["errors"].items()]
    return "\n".join([*lines, "", f"  verdict: {facts['verdict']}"])


def _offer(facts: Json) -> str:
    offered = facts["offered_throughput"]
    return f"   (of {offered:.2f} offered)" if offered else ""


def _peak_shown(facts: Json) -> str:
    peak = facts["peak_output_throughput"]
    return f"   (peak {peak:,.0f})" if peak else ""


def histogram(outcomes: Sequence[RequestResult], buckets: int = 8) -> str:
    """Histogram of the number of requests in flight over time."""
    times, counts = in_flight(outcomes)
    most = max(counts, default=0)
    if not most:
        return ""
    width = math.ceil((most + 1) / buckets)
    held = [0.0] * math.ceil((most + 1) / width)
    for at, count in enumerate(counts[:-1]):
        held[count // width] += times[at + 1] - times[at]
    total = sum(held) or 1.0
    lines = ["  in flight   share of the time"]
    for number, seconds in enumerate(held):
        low, high = number * width, number * width + width - 1
        label = f"{low}" if low == high else f"{low}-{high}"
        lines.append(f"  {label:>9}   {'#' * round(40 * seconds / total):<40} {100 * seconds / total:5.1f} %")
    return "\n".join(lines)


def confidence(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval (Student's t)."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, 0.0
    table = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
    factor = table[len(values) - 2] if len(values) - 2 < len(table) else 1.96
    return mean, factor * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def need_matplotlib() -> None:
    """Raises `ConfigError` if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            what="--plot needs matplotlib", why="it is not installed", fix="pip install matplotlib, or leave out --plot"
        )


def plot(outcomes: Sequence[RequestResult], path: str, title: str) -> None:
    """Writes a PNG: latencies as distributions, requests in flight and output tokens per second over time."""
    need_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = [each for each in outcomes if not each.error]
    figure, panels = pyplot.subplots(2, 3, figsize=(15, 8))
    for panel, (name, values) in zip(panels.flat, latencies_ms(done).items(), strict=False):
        ordered = np.sort(np.asarray(values)) if values else np.zeros(1)
        panel.plot(ordered, np.linspace(0, 100, len(ordered)))
        panel.set(title=f"{name.upper()}: {_NAMES[name]}", xlabel="ms", ylabel="% of them within")
    times, counts = in_flight(outcomes)
    panels.flat[4].step(times, counts, where="post")
    panels.flat[4].set(title="in flight", xlabel="s", ylabel="requests")
    arrived = np.asarray([at_s for each in done for at_s, new in each.arrivals for _ in range(new)])
    if len(arrived):
        rate, edges = np.histogram(arrived, bins=np.arange(0, math.ceil(arrived.max()) + 1))
        panels.flat[5].step(edges[:-1], rate, where="post")
    panels.flat[5].set(title="output", xlabel="s", ylabel="tokens/s")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, format="png")
    pyplot.close(figure)
