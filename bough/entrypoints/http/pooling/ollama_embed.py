"""POST /api/embed and /api/embeddings: embeddings in Ollama's words."""

from __future__ import annotations

import time
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from bough.core.errors import InvalidRequest
from bough.engine_client import PoolOptions
from bough.engine_client.pool_texts import WHOLE
from bough.entrypoints.http.body import read_json
from bough.entrypoints.http.ollama.convert import model_name
from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.pooling.common import inputs_of
from bough.entrypoints.http.replies import caller_of, client_of, deadline_of, json_reply
from bough.entrypoints.service import Service


class OllamaEmbedRequest(Struct, kw_only=True):
    """POST /api/embed. `options` and `keep_alive` are about loading a model: it is loaded."""

    model: str
    input: str | list[str | int | list[int]] | None = None
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    keep_alive: str | int | float | None = None


def embed(service: Service) -> Handler:
    """POST /api/embed: one list of embeddings; texts are cut to what fits unless `truncate` is false."""
    return _handler(service, many=True)


def embeddings(service: Service) -> Handler:
    """POST /api/embeddings: the older form, one text and one embedding."""
    return _handler(service, many=False)


def _handler(service: Service, *, many: bool) -> Handler:
    server, pooler = service.config.server, service.pooler

    async def handle(request: Request) -> Response:
        began = time.perf_counter_ns()
        body = await read_json(request, OllamaEmbedRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        name = model_name(service.served, asked.model)
        pooler.needs("embed")
        given = asked.input if many else asked.prompt
        if given is None:
            field = "input" if many else "prompt"
            raise InvalidRequest(what=f"{field} is missing", why="it is required", fix=f"send {field}", param=field)
        options = PoolOptions(
            truncate=None if asked.truncate is False else WHOLE, cut_by='"truncate": true',
            caller=caller_of(request), deadline_s=deadline_of(request),
        )  # fmt: skip
        inputs = inputs_of(given) if given != [] else []
        work = pooler.embed(inputs, options, dimensions=asked.dimensions)
        found = await client_of(request).wait_for(work)
        vectors = [each.values.tolist() for each in found]
        if not many:
            return json_reply({"embedding": vectors[0]}, headers=body.headers())
        return json_reply(
            {
                "model": name,
                "embeddings": vectors,
                "total_duration": time.perf_counter_ns() - began,
                "load_duration": 0,
                "prompt_eval_count": sum(each.prompt_tokens for each in found),
            },
            headers=body.headers(),
        )

    return handle
