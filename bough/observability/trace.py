"""A request's timeline: where its time went, from the client's first byte to the last, through all processes.

The engine sends its part with the request's end (`End.spans`); the API worker adds its own. `CURRENT` holds the trace
of the HTTP request that is being handled; tasks that the handler starts inherit it.
"""

from __future__ import annotations

import re
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bough.core.errors import ConfigError
from bough.core.messages import End, TraceSpan

CURRENT: ContextVar[Trace | None] = ContextVar("bough_trace", default=None)
"""The trace of the HTTP request that this task works for, if it is traced."""

_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_MOST_PARTS = 64
"""Maximum number of answers of one HTTP request that are traced."""


@dataclass(slots=True)
class AnswerTimes:
    """The times of one answer of the request in the engine."""

    rid: str
    prompt_tokens: int
    submitted_s: float
    ended_s: float = 0.0
    end: End | None = None

    def spans(self, arrived_s: float) -> list[TraceSpan]:
        """The spans in order, without those that were not measured."""
        spans = [TraceSpan("prepare", arrived_s, self.submitted_s - arrived_s, {"prompt_tokens": self.prompt_tokens})]
        if self.end is not None:
            spans += self.end.spans
            if self.end.spans and self.ended_s:
                last = self.end.spans[-1].start_s + self.end.spans[-1].seconds
                spans.append(TraceSpan("deliver", last, max(0.0, self.ended_s - last)))
        return spans


@dataclass(slots=True)
class Trace:
    """One HTTP request."""

    name: str
    request_id: str
    parent: str = ""
    """The client's `traceparent`, if it is a valid one."""
    arrived_s: float = field(default_factory=time.monotonic)
    status: int = 0
    parts: dict[int, AnswerTimes] = field(default_factory=dict)

    def submitted(self, answer_id: int, rid: str, prompt_tokens: int) -> bool:
        """Records that an answer was sent to the engine. Returns whether its timeline is wanted."""
        if len(self.parts) >= _MOST_PARTS:
            return False
        self.parts[answer_id] = AnswerTimes(rid, prompt_tokens, time.monotonic())
        return True

    def ended(self, answer_id: int, end: End) -> None:
        part = self.parts.get(answer_id)
        if part is not None:
            part.end, part.ended_s = end, time.monotonic()

    def as_json(self) -> dict[str, Any]:
        """The timeline as clients receive it. Times are milliseconds since the request arrived."""
        return {
            "request_id": self.request_id,
            "total_ms": _ms(time.monotonic() - self.arrived_s),
            "answers": [self._answer(part) for part in self.parts.values()],
        }

    def _answer(self, part: AnswerTimes) -> dict[str, Any]:
        fields: dict[str, Any] = {"rid": part.rid, "prompt_tokens": part.prompt_tokens}
        if part.end is not None:
            fields |= {
                "finish_reason": part.end.reason,
                "completion_tokens": part.end.completion_tokens,
                "cached_tokens": part.end.cached_tokens,
                "retractions": part.end.retractions,
            }
        fields["spans"] = [
            {"name": span.name, "start_ms": _ms(span.start_s - self.arrived_s), "ms": _ms(span.seconds), **span.detail}
            for span in part.spans(self.arrived_s)
        ]
        return fields

    def server_timing(self) -> str:
        """The timeline as a Server-Timing header, summed over answers; browsers draw it."""
        total: dict[str, float] = {}
        for part in self.parts.values():
            for span in part.spans(self.arrived_s):
                total[span.name] = total.get(span.name, 0.0) + span.seconds
        return ", ".join(f"{name};dur={_ms(seconds)}" for name, seconds in total.items())


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def valid_parent(header: str) -> str:
    """The header if it is a valid `traceparent`, else an empty string."""
    found = _PARENT.fullmatch(header.strip())
    return header.strip() if found and int(found[1], 16) and int(found[2], 16) else ""


class OtlpExporter:
    """Sends finished traces to an OpenTelemetry collector, in the background."""

    def __init__(self, endpoint: str, *, service: str, version: str) -> None:
        """Raises `ConfigError` if OpenTelemetry is not installed or the endpoint is invalid."""
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(
                what=f"otlp_endpoint is {endpoint!r}",
                why="traces are sent over HTTP",
                fix="give a URL, for example --otlp-endpoint http://localhost:4318",
                param="otlp_endpoint",
            )
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                what="traces can't be exported",
                why=f"the module {error.name} is missing",
                fix="install it with `pip install 'bough[otel]'`, or leave out --otlp-endpoint",
                param="otlp_endpoint",
            ) from error
        url = endpoint if parts.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
        resource = Resource.create({"service.name": service, "service.version": version})
        self._provider: Any = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer: Any = self._provider.get_tracer("bough", version)
        self._to_epoch_s = time.time() - time.monotonic()

    def export(self, trace: Trace) -> None:
        """Queues a finished trace. Never waits."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        outer = TraceContextTextMapPropagator().extract({"traceparent": trace.parent}) if trace.parent else None
        root = self._tracer.start_span(
            trace.name,
            context=outer,
            kind=SpanKind.SERVER,
            start_time=self._ns(trace.arrived_s),
            attributes={"http.response.status_code": trace.status, "bough.request_id": trace.request_id},
        )
        if trace.status >= 500:
            root.set_status(Status(StatusCode.ERROR))
        within = set_span_in_context(root)
        for part in trace.parts.values():
            for span in part.spans(trace.arrived_s):
                attributes = {f"bough.{name}": value for name, value in span.detail.items()} | {"bough.rid": part.rid}
                inner = self._tracer.start_span(
                    span.name, context=within, start_time=self._ns(span.start_s), attributes=attributes
                )
                inner.end(end_time=self._ns(span.start_s + span.seconds))
            if part.end is not None:
                root.set_attributes(
                    {
                        "gen_ai.usage.input_tokens": part.end.prompt_tokens,
                        "gen_ai.usage.output_tokens": part.end.completion_tokens,
                        "gen_ai.response.finish_reasons": [part.end.reason],
                        "bough.cached_tokens": part.end.cached_tokens,
                    }
                )
        root.end(end_time=self._ns(time.monotonic()))

    def close(self) -> None:
        """Sends the queued traces, which may take a moment."""
        self._provider.shutdown()

    def _ns(self, monotonic_s: float) -> int:
        return int((monotonic_s + self._to_epoch_s) * 1e9)
