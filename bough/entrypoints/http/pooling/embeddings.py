"""POST /v1/embeddings, and the native /encode and /classify."""

from __future__ import annotations

import base64
from collections import Counter
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bough.core import bounds
from bough.core.errors import InvalidRequest
from bough.engine_client.media_fields import NATIVE_MEDIA
from bough.engine_client.pooled_native import native_inputs, native_pooled
from bough.engine_client.scores import Floats, as_weights
from bough.entrypoints.http.body import read_json
from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.openai.fields import served_name
from bough.entrypoints.http.pooling.common import mixed_inputs, options_of, usage
from bough.entrypoints.http.pooling.schema import EmbeddingsRequest, EncodeRequest
from bough.entrypoints.http.replies import client_of, json_reply
from bough.entrypoints.service import Service


def embeddings(service: Service) -> Handler:
    """POST /v1/embeddings."""
    server, pooler = service.config.server, service.pooler

    async def handle(request: Request) -> Response:
        body = await read_json(request, EmbeddingsRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        name = served_name(service.served, asked.model)
        facts = pooler.needs("embed", "sparse")
        packed = asked.encoding_format == "base64"
        if packed and facts.task == "sparse":
            raise InvalidRequest(
                what="sparse embeddings have no base64 form",
                why="they are weights by token id",
                fix='send "encoding_format": "float"',
                param="encoding_format",
            )
        options = replace(
            options_of(asked, request, prompt_name=asked.prompt_name, add_special_tokens=asked.add_special_tokens),
            instruct=asked.instruct or asked.instruction or "",
        )
        work = pooler.embed(mixed_inputs(asked, service.served, facts), options, dimensions=asked.dimensions)
        found = await client_of(request).wait_for(work)
        data = [
            {
                "object": "embedding",
                "index": at,
                "embedding": as_weights(each.values) if facts.task == "sparse" else encoded(each.values, packed),
            }
            for at, each in enumerate(found)
        ]
        media: Counter[str] = Counter()
        for each in found:
            media.update(each.media_tokens)
        used = usage(sum(each.prompt_tokens for each in found), media_tokens=media)
        return json_reply({"object": "list", "data": data, "model": name, "usage": used}, headers=body.headers())

    return handle


def encoded(values: Floats, packed: bool) -> str | list[float]:
    """An embedding as numbers, or as base64 of little-endian float32."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode() if packed else values.tolist()


def encode(service: Service) -> Handler:
    """POST /encode: whatever the model pools."""
    return _native(service, "embed", "sparse", "classify")


def classify(service: Service) -> Handler:
    """POST /classify: logits of labels, or a reward."""
    return _native(service, "classify")


def _native(service: Service, *tasks: Any) -> Handler:
    server, pooler = service.config.server, service.pooler

    async def handle(request: Request) -> Response:
        body = await read_json(request, EncodeRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        facts = pooler.needs(*tasks)
        media = {name: getattr(asked, name) for name in (*NATIVE_MEDIA, "mm_processor_kwargs")}
        inputs, single = native_inputs(asked.text, asked.input_ids, media)
        bounds.count("embeddings", inputs, "text")
        options = options_of(asked, request, prompt_name=asked.prompt_name)
        if asked.dimensions is not None:
            work = pooler.embed(inputs, options, dimensions=asked.dimensions)
        else:
            work = pooler.pool(inputs, options)
        answers = [native_pooled(each, facts) for each in await client_of(request).wait_for(work)]
        return json_reply(answers[0] if single else answers, headers=body.headers())

    return handle
