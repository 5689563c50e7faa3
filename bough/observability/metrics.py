"""All metrics in one table, how processes write them, and how they are rendered in Prometheus' text format.

Names are part of the API and checked by a test. Each process writes its metrics to its own board (`Sheet`). The API
worker that serves /metrics reads all boards and sums them (`render`), so that every worker returns the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric as Family

from bough.observability.board import Board

PREFIX = "bough:"
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

Kind = Literal["gauge", "counter", "histogram"]

_SHORT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_TOKENS = tuple(float(4**power) for power in range(1, 11))

ENDINGS = ("stop", "length", "abort", "error", "given_up")
PHASES = ("receive", "plan", "commit", "launch", "mask", "wait", "settle", "send")
DRAFT_PLACES = tuple(str(place) for place in range(1, 17))
"""Positions in a draft that are counted separately; later positions count as the last one."""
STATUSES = ("200", "400", "401", "403", "404", "405", "409", "413", "422", "429", "431", "499", "500", "503", "504")
OTHER = "other"
"""Label value for unknown values, so that clients cannot create new series."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric with all its series."""

    name: str
    kind: Kind
    about: str
    by: Literal["engine", "api", "keys", "reader"]
    """Which process writes it. `keys`: the API workers, on boards that grow. `reader`: computed when the metrics are
    read."""
    labels: Mapping[str, tuple[str, ...]] | None = None
    """Possible values of each label; empty: known only at run time."""
    bounds: tuple[float, ...] = ()
    is_mean: bool = False
    """Several engines have the mean of their values, not the sum."""

    def series(self, open_values: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        """All combinations of label values. `open_values`: values of the label that is known only at run time."""
        return list(product(*(known or open_values for known in (self.labels or {}).values())))


METRICS: tuple[Metric, ...] = (
    Metric("up", "gauge", "1 while the server accepts requests.", "reader"),
    Metric("heartbeat_age_seconds", "gauge", "Seconds since the last iteration of the engine's loop.", "reader"),
    Metric("cache_hit_rate", "gauge", "Share of prompt tokens found in the prefix cache, since the start.", "reader"),
    Metric("token_usage", "gauge", "Share of KV memory that requests hold.", "reader"),
    # -- the engine ---------------------------------------------------------------------------------------------
    Metric("num_running_reqs", "gauge", "Requests being computed.", "engine"),
    Metric("num_prefilling_reqs", "gauge", "Of those, requests whose prompt is not computed yet.", "engine"),
    Metric("num_queue_reqs", "gauge", "Requests waiting for memory.", "engine"),
    Metric("num_queue_tokens", "gauge", "Prompt tokens of waiting requests.", "engine"),
    Metric("num_grammar_queue_reqs", "gauge", "Requests waiting for their grammar.", "engine"),
    Metric("num_used_tokens", "gauge", "KV tokens that requests hold.", "engine"),
    Metric(
        "num_cached_tokens", "gauge",
        "KV tokens kept for reuse; evicted when a request needs the memory.", "engine",
    ),
    Metric("max_total_num_tokens", "gauge", "KV tokens that fit into memory.", "engine"),
    Metric("max_running_reqs", "gauge", "Requests that can be computed at once.", "engine"),
    Metric("gen_throughput", "gauge", "Tokens generated per second, recently.", "engine"),
    Metric("prompt_throughput", "gauge", "Prompt tokens computed per second, recently.", "engine"),
    Metric("decode_step_seconds", "gauge", "Median duration of recent decode steps.", "engine", is_mean=True),
    Metric("device_utilization", "gauge", "Share of recent time in which the device was busy.", "engine", is_mean=True),
    Metric("device_memory_used_bytes", "gauge", "Device memory in use.", "engine"),
    Metric("device_memory_total_bytes", "gauge", "Device memory in total.", "engine"),
    Metric("steps_total", "counter", "Steps of the model.", "engine"),
    Metric("failed_steps_total", "counter", "Steps that failed.", "engine"),
    Metric("oom_total", "counter", "Steps that ran the device out of memory.", "engine"),
    Metric(
        "computed_prompt_tokens_total", "counter",
        "Prompt tokens computed, including those computed again after retractions.", "engine",
    ),
    Metric(
        "retracted_requests_total", "counter",
        "Times a request was retracted: it lost its memory and was computed again.", "engine",
    ),
    Metric("forced_tokens_total", "counter", "Tokens that a grammar forced; they are not sampled.", "engine"),
    Metric(
        "spec_accept_length", "gauge",
        "Tokens per request and decode step, recently, with speculative decoding.", "engine", is_mean=True,
    ),
    Metric("spec_accept_rate", "gauge", "Share of draft tokens accepted, recently.", "engine", is_mean=True),
    Metric("spec_verify_total", "counter", "Rows of decode steps, with speculative decoding.", "engine"),
    Metric("media_items_total", "counter", "Images and other media of prompts that were admitted.", "engine"),
    Metric("media_item_hits_total", "counter", "Media whose embeddings were stored already.", "engine"),
    Metric("media_tower_tokens_total", "counter", "Patches that encoders have computed.", "engine"),
    Metric("media_used_positions", "gauge", "Positions of the embedding store in use.", "engine"),
    Metric("spec_draft_tokens_total", "counter", "Draft tokens verified.", "engine"),
    Metric("spec_accepted_tokens_total", "counter", "Draft tokens accepted.", "engine"),
    Metric(
        "spec_accepted_by_position_total", "counter", "Draft tokens accepted, by position in the draft.",
        "engine", {"position": DRAFT_PLACES},
    ),
    Metric(
        "expert_balancedness", "gauge",
        "Mean load of ranks with different experts / the largest, recently.", "engine", is_mean=True,
    ),
    Metric("expert_rebalances_total", "counter", "Times experts were moved between ranks.", "engine"),
    Metric("expert_moves_total", "counter", "Experts that were moved from one rank to another.", "engine"),
    Metric(
        "cut_grammars_total", "counter",
        "Constrained answers cut by `max_tokens` before their grammar was complete.", "engine",
    ),
    Metric("page_repairs_total", "counter", "Times the page count did not add up and was corrected.", "engine"),
    Metric(
        "engine_seconds_total", "counter", "The engine loop's time by phase; `wait`: for the device.", "engine",
        {"phase": PHASES},
    ),
    # -- the API workers ----------------------------------------------------------------------------------------
    Metric("num_live_reqs", "gauge", "Requests that have not ended.", "api"),
    Metric(
        "queued_prompt_tokens", "gauge",
        "Prompt tokens of requests without a first token, as admission estimates them.", "api",
    ),
    Metric("requests_submitted_total", "counter", "Requests sent to the engine.", "api"),
    Metric("requests_total", "counter", "Requests that have ended.", "api", {"finish_reason": ENDINGS}),
    Metric("aborted_requests_total", "counter", "Requests aborted by clients or operators.", "api"),
    Metric("refused_requests_total", "counter", "Requests refused because too much was queued (429).", "api"),
    Metric("deadline_exceeded_total", "counter", "Requests whose deadline passed (504).", "api"),
    Metric("prompt_tokens_total", "counter", "Prompt tokens.", "api"),
    Metric("generation_tokens_total", "counter", "Tokens generated.", "api"),
    Metric("cached_tokens_total", "counter", "Prompt tokens found in the prefix cache.", "api"),
    Metric("reasoning_tokens_total", "counter", "Of the generated tokens, those of reasoning sections.", "api"),
    Metric("queue_time_seconds", "histogram", "From arrival to the first step.", "api", bounds=_LONG_S),
    Metric("prefill_time_seconds", "histogram", "From the first step to the first token.", "api", bounds=_LONG_S),
    Metric("decode_time_seconds", "histogram", "From the first token to the last.", "api", bounds=_LONG_S),
    Metric("grammar_time_seconds", "histogram", "Wait for a grammar to be compiled.", "api", bounds=_LONG_S),
    Metric("time_to_first_token_seconds", "histogram", "From arrival to the first token.", "api", bounds=_LONG_S),
    Metric("inter_token_latency_seconds", "histogram", "Between two tokens.", "api", bounds=_SHORT_S),
    Metric("e2e_request_latency_seconds", "histogram", "From arrival to the end.", "api", bounds=_LONG_S),
    Metric("request_prompt_tokens", "histogram", "Tokens of a prompt.", "api", bounds=_TOKENS),
    Metric("request_generation_tokens", "histogram", "Tokens of an answer.", "api", bounds=_TOKENS),
    Metric(
        "http_requests_total", "counter", "HTTP responses, without probes.", "api",
        {"path": (), "status": (*STATUSES, OTHER)},
    ),
    Metric("background_failures_total", "counter", "Failures of background tasks, which are then restarted.", "api"),
    # -- by name of API key ---------------------------------------------------------------------------------------
    Metric("key_requests_total", "counter", "Requests sent to the engine.", "keys", {"key": ()}),
    Metric("key_prompt_tokens_total", "counter", "Prompt tokens.", "keys", {"key": ()}),
    Metric(
        "key_generation_tokens_total", "counter",
        "Tokens generated, including those for clients that disconnected.", "keys", {"key": ()},
    ),
    Metric(
        "key_refused_total", "counter",
        "Requests refused because the key's limits were exceeded (429).", "keys", {"key": ()},
    ),
)  # fmt: skip

KEY_METRICS = tuple(metric for metric in METRICS if metric.by == "keys")

MEANS = tuple(metric.name for metric in METRICS if metric.is_mean)
"""For `Boards`."""
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


class Cell:
    """One number."""

    __slots__ = ("_at", "_cells")

    def __init__(self, cells: memoryview[float], at: int) -> None:
        self._cells = cells
        self._at = at

    def add(self, amount: float = 1.0) -> None:
        self._cells[self._at] += amount

    def set(self, value: float) -> None:
        self._cells[self._at] = value


class Histogram:
    """Counts by bucket, and the sum."""

    __slots__ = ("_bounds", "_cells", "_first", "_sum")

    def __init__(self, cells: memoryview[float], first: int, bounds: tuple[float, ...]) -> None:
        self._cells = cells
        self._first = first
        self._bounds = bounds
        self._sum = first + len(bounds) + 1

    def observe(self, value: float, times: int = 1) -> None:
        self._cells[self._first + bisect_left(self._bounds, value)] += times
        self._cells[self._sum] += value * times


class Sheet:
    """The metrics that one process writes."""

    def __init__(self, path: Path | None, by: Literal["engine", "api"], paths: Iterable[str] = ()) -> None:
        """`paths`: values of the label `path`; `OTHER` is added."""
        self._paths = (*dict.fromkeys(paths), OTHER) if by == "api" else ()
        names: list[str] = []
        self._first: dict[str, int] = {}
        for metric in METRICS:
            if metric.by != by:
                continue
            for labels in metric.series(self._paths):
                key = series_key(metric.name, labels)
                self._first[key] = len(names)
                if metric.kind == "histogram":
                    names += [f"{key}\tle\t{at}" for at in range(len(metric.bounds) + 1)] + [f"{key}\tsum"]
                else:
                    names.append(key)
        self.board = Board(path, names)
        for metric in METRICS:  # counters continue from an earlier process with the same board, gauges do not
            if metric.by == by and metric.kind == "gauge":
                for labels in metric.series(self._paths):
                    self.cell(metric.name, *labels).set(0.0)

    def cell(self, name: str, *labels: str) -> Cell:
        """A counter or a gauge. Unknown names and labels are `KeyError`s."""
        return Cell(self.board.cells, self._first[series_key(name, labels)])

    def histogram(self, name: str) -> Histogram:
        return Histogram(self.board.cells, self._first[name], BY_NAME[name].bounds)


def series_key(name: str, labels: Sequence[str] = ()) -> str:
    return "\t".join((name, *labels))


@dataclass(frozen=True, slots=True, eq=False)
class _Snapshot:
    """A collector for prometheus_client: readings, all with the same label."""

    readings: Mapping[str, float]
    model: str

    def collect(self) -> Iterator[Family]:
        seen: dict[str, dict[str, None]] = {}
        for key in self.readings:
            name, *values = key.split("\t")
            if values:
                seen.setdefault(name, {})[values[0]] = None
        for metric in METRICS:
            if metric.kind == "histogram":
                yield self._histogram(metric)
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(PREFIX + metric.name, metric.about, labels=["model_name", *(metric.labels or ())])
            for labels in metric.series(tuple(seen.get(metric.name, ()))):
                value = self.readings.get(series_key(metric.name, labels))
                if value is not None and not (metric.name == "http_requests_total" and value == 0):
                    family.add_metric([self.model, *labels], value)
            yield family

    def _histogram(self, metric: Metric) -> HistogramMetricFamily:
        counts = [self.readings.get(f"{metric.name}\tle\t{at}", 0.0) for at in range(len(metric.bounds) + 1)]
        names = [*(f"{bound:g}" for bound in metric.bounds), "+Inf"]
        family = HistogramMetricFamily(PREFIX + metric.name, metric.about, labels=["model_name"])
        buckets = list(zip(names, accumulate(counts), strict=True))
        family.add_metric([self.model], buckets, self.readings.get(f"{metric.name}\tsum", 0.0))
        return family


def render(readings: Mapping[str, float], *, model: str) -> bytes:
    """All metrics in Prometheus' text format. `readings`: the result of `Boards.read` and of `worked_out`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(readings, model))
    return generate_latest(registry)


def worked_out(readings: Mapping[str, float], *, up: bool, heartbeat_age_s: float) -> dict[str, float]:
    """Returns the readings and the metrics that are computed from them."""
    prompt, cached = readings.get("prompt_tokens_total", 0.0), readings.get("cached_tokens_total", 0.0)
    used, most = readings.get("num_used_tokens", 0.0), readings.get("max_total_num_tokens", 0.0)
    return {
        **readings,
        "up": float(up),
        "heartbeat_age_seconds": heartbeat_age_s,
        "cache_hit_rate": cached / prompt if prompt else 0.0,
        "token_usage": used / most if most else 0.0,
    }
