"""POST /v1/rerank and /v1/score."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bough.core import bounds
from bough.core.errors import InvalidRequest
from bough.engine_client import Pooler, PoolOptions
from bough.engine_client.names import random_name
from bough.engine_client.pooled_native import ranked
from bough.entrypoints.http.body import read_json
from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.openai.fields import served_name
from bough.entrypoints.http.pooling.common import options_of, side_of, usage
from bough.entrypoints.http.pooling.schema import RerankRequest, ScoreRequest
from bough.entrypoints.http.replies import client_of, json_reply
from bough.entrypoints.service import Service


def rerank(service: Service) -> Handler:
    """POST /v1/rerank: Jina's and Cohere's shape; with `?format=list` the bare list that SGLang answers with."""
    server, pooler = service.config.server, service.pooler

    async def handle(request: Request) -> Response:
        body = await read_json(request, RerankRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        name = served_name(service.served, asked.model)
        _check_documents(asked.documents, asked.top_n)
        kinds = service.served.facts.get("media") or ()
        sides = [side_of(each, f"documents[{at}]", kinds) for at, each in enumerate(asked.documents)]
        query = side_of(asked.query, "query", kinds)
        documents = [side if isinstance(side, str) else side.text for side in sides]
        pairs = [(query, side) for side in sides]
        work = pooler.relevance(
            pairs, options_of(asked, request), instruct=asked.instruct or asked.instruction or ""
        )  # fmt: skip
        found = await client_of(request).wait_for(work)
        order = ranked([row[0] for row in found.scores], documents, asked.top_n)
        if asked.return_documents is False:
            order = [{"index": each["index"], "score": each["score"]} for each in order]
        if request.query_params.get("format") == "list":
            return json_reply(order, headers=body.headers())
        return json_reply(
            {
                "id": f"rerank-{random_name()}",
                "object": "rerank",
                "model": name,
                "results": [_result(each) for each in order],
                "usage": usage(found.prompt_tokens, found.cached_tokens),
            },
            headers=body.headers(),
        )

    return handle


def score(service: Service) -> Handler:
    """POST /v1/score: label probabilities of query and items, or similarity of text_1 and text_2."""
    server, pooler = service.config.server, service.pooler

    async def handle(request: Request) -> Response:
        body = await read_json(request, ScoreRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        name = served_name(service.served, asked.model)
        options = options_of(asked, request)
        if asked.text_1 is not None or asked.text_2 is not None:
            work = _compare(asked, pooler, name, options)
        else:
            work = _labels(asked, pooler, name, options)
        return json_reply(await client_of(request).wait_for(work), headers=body.headers())

    return handle


async def _labels(asked: ScoreRequest, pooler: Pooler, name: str, options: PoolOptions) -> dict[str, Any]:
    if asked.query is None or asked.items is None:
        raise _missing("query" if asked.query is None else "items", "send query and items, or text_1 and text_2")
    items = [asked.items] if isinstance(asked.items, str) else [*asked.items]
    bounds.count("documents", items, "items")
    found = await pooler.label_scores(
        asked.query, items, label_ids=asked.label_token_ids, softmax=bool(asked.apply_softmax),
        item_first=bool(asked.item_first), delimiter=asked.multi_item_scoring_delimiter, options=options,
    )  # fmt: skip
    tokens_used = usage(found.prompt_tokens, found.cached_tokens)
    return {"object": "scoring", "model": name, "scores": found.scores, "usage": tokens_used}


async def _compare(asked: ScoreRequest, pooler: Pooler, name: str, options: PoolOptions) -> dict[str, Any]:
    if not asked.text_1 or not asked.text_2:
        raise _missing("text_2" if asked.text_1 else "text_1", "send both")
    firsts = [asked.text_1] if isinstance(asked.text_1, str) else asked.text_1
    seconds = [asked.text_2] if isinstance(asked.text_2, str) else asked.text_2
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidRequest(
            what=f"text_1 has {len(firsts)} texts, text_2 has {len(seconds)}",
            why="texts are compared one by one, or one with many",
            fix="send as many in both, or one in text_1",
            param="text_2",
        )
    bounds.count("documents", seconds, "text_2")
    found = await pooler.relevance(list(zip(firsts, seconds, strict=True)), options, instruct=asked.instruct or "")
    return {
        "id": f"score-{random_name()}",
        "object": "list",
        "created": int(time.time()),
        "model": name,
        "data": [{"index": at, "object": "score", "score": row[0]} for at, row in enumerate(found.scores)],
        "usage": usage(found.prompt_tokens, found.cached_tokens),
    }


def _check_documents(documents: Sequence[object], top_n: int | None) -> None:
    if not documents:
        raise _missing("documents", "send at least one document")
    bounds.count("documents", documents, "documents")
    if top_n is not None and top_n < 1:
        raise InvalidRequest(
            what=f"top_n is {top_n}", why="it counts results", fix="send at least 1, or leave it out", param="top_n"
        )


def _result(each: dict[str, Any]) -> dict[str, Any]:
    shown = {"index": each["index"], "relevance_score": each["score"]}
    return {**shown, "document": {"text": each["document"]}} if "document" in each else shown


def _missing(name: str, fix: str) -> InvalidRequest:
    return InvalidRequest(what=f"{name} is missing or empty", why="it is required", fix=fix, param=name)
