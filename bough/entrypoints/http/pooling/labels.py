"""POST /v1/classify and /v1/moderations."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bough.core import bounds
from bough.core.errors import InvalidRequest
from bough.engine_client.names import random_name
from bough.engine_client.pooled_native import labelled
from bough.entrypoints.http.body import read_json
from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.openai.fields import served_name
from bough.entrypoints.http.pooling.categories import Categories
from bough.entrypoints.http.pooling.common import inputs_of, options_of, usage
from bough.entrypoints.http.pooling.schema import ClassifyRequest, ModerationRequest
from bough.entrypoints.http.replies import client_of, json_reply
from bough.entrypoints.service import Service


def classify(service: Service) -> Handler:
    """POST /v1/classify."""
    server, pooler = service.config.server, service.pooler

    async def handle(request: Request) -> Response:
        body = await read_json(request, ClassifyRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        name = served_name(service.served, asked.model)
        facts = pooler.needs("classify")
        work = pooler.classify(inputs_of(asked.input), options_of(asked, request))
        found = await client_of(request).wait_for(work)
        return json_reply(
            {
                "id": f"classify-{random_name()}",
                "object": "list",
                "created": int(time.time()),
                "model": name,
                "data": [{"index": at, **labelled(each.values.tolist(), facts)} for at, each in enumerate(found)],
                "usage": usage(sum(each.prompt_tokens for each in found)),
            },
            headers=body.headers(),
        )

    return handle


def moderations(service: Service) -> Handler:
    """POST /v1/moderations: a classifier's labels as OpenAI's categories."""
    server, pooler = service.config.server, service.pooler
    labels = pooler.pooling.labels if pooler.pooling is not None else ()
    categories = Categories.of(server.moderation_categories, labels)

    async def handle(request: Request) -> Response:
        body = await read_json(request, ModerationRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        name = served_name(service.served, asked.model)
        pooler.needs("classify")
        texts = _texts(asked)
        found = await client_of(request).wait_for(pooler.classify(texts, options_of(asked, request)))
        results = [categories.judge(each.values.tolist()) for each in found]
        return json_reply(
            {"id": f"modr-{random_name()}", "model": name, "results": results}, headers=body.headers()
        )  # fmt: skip

    return handle


def _texts(asked: ModerationRequest) -> list[str]:
    """The texts to judge: one, several, or the parts of one."""
    given: Any = asked.input
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest(what="input is empty", why="there is nothing to judge", fix="send a text", param="input")
    bounds.count("embeddings", given, "input")
    if all(isinstance(each, str) for each in given):
        return list(given)
    parts = [each for each in given if not isinstance(each, str)]
    if len(parts) != len(given) or any(each.type != "text" or each.text is None for each in parts):
        raise InvalidRequest(
            what="input has parts that can't be judged",
            why="the served model reads text only",
            fix="send texts, or parts of type text",
            param="input",
        )
    return ["\n".join(each.text for each in parts)]
