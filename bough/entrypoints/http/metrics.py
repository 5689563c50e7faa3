"""GET /metrics: what this API worker has counted and what the heartbeat says, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response

from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[str, float]
"""Labels as they are written (may be empty), value."""


def metrics(service: Service) -> Handler:
    async def handle(request: Request) -> Response:
        return Response(render(service), media_type=CONTENT_TYPE)

    return handle


def render(service: Service) -> str:
    """Every metric with its help and type."""
    lines: list[str] = []
    for name, kind, about, samples in _families(service):
        lines += [f"# HELP bough:{name} {about}", f"# TYPE bough:{name} {kind}"]
        lines += [
            f"bough:{name}{{{labels}}} {value:g}" if labels else f"bough:{name} {value:g}" for labels, value in samples
        ]
    return "\n".join(lines) + "\n"


def _families(service: Service) -> Iterator[tuple[str, str, str, list[Sample]]]:
    stats, health, admission = service.intake.stats, service.health(), service.admission
    yield "up", "gauge", "1 while requests are taken.", [("", float(health.ready))]
    yield "num_running_reqs", "gauge", "Requests being computed.", [("", health.num_running)]
    yield "num_queue_reqs", "gauge", "Requests waiting in the engine.", [("", health.num_waiting)]
    yield "num_live_reqs", "gauge", "Requests of this worker that have not ended.", [("", stats.live)]
    yield (
        "queued_prompt_tokens",
        "gauge",
        "Prompt tokens that wait for a first token.",
        [("", admission.waiting_tokens)],
    )
    yield "requests_submitted_total", "counter", "Requests sent to the engine.", [("", stats.submitted)]
    yield (
        "requests_refused_total",
        "counter",
        "Requests refused because too much was queued.",
        [("", admission.refused)],
    )
    ended = [(f'reason="{reason}"', float(count)) for reason, count in sorted(stats.ended.items())]
    yield "requests_ended_total", "counter", "Requests that have ended, by reason.", ended
    yield "prompt_tokens_total", "counter", "Tokens of submitted prompts.", [("", stats.prompt_tokens)]
    yield "generation_tokens_total", "counter", "Tokens generated.", [("", stats.completion_tokens)]
    yield "cached_tokens_total", "counter", "Prompt tokens found in the prefix cache.", [("", stats.cached_tokens)]
