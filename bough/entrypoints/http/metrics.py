"""GET /metrics: the whole server's numbers, whichever API worker is asked."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.service import Service
from bough.observability.metrics import CONTENT_TYPE, render


def metrics(service: Service) -> Handler:
    """Prometheus' text format. Reads shared memory; asks nobody and works while the engine is stuck."""

    async def handle(request: Request) -> Response:
        readings = service.telemetry.readings(service.beat(), up=service.health().ready)
        return Response(render(readings, model=service.served.name), media_type=CONTENT_TYPE)

    return handle
