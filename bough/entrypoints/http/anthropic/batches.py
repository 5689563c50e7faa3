"""/v1/messages/batches: Anthropic's batches, processed like those of /v1/batches and kept in the same directory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from bough.core.errors import InvalidRequest
from bough.entrypoints.batches import BatchRecord, BatchStore, FileStore
from bough.entrypoints.batches.records import OPEN
from bough.entrypoints.batches.runner import MAX_LINES
from bough.entrypoints.http.batches import MESSAGES, stores_of
from bough.entrypoints.http.body import read_json
from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.openai.fields import bad_field
from bough.entrypoints.http.replies import json_reply, tenant_of
from bough.entrypoints.service import Service

Json = dict[str, Any]

_OURS: Final = "batch_"
_THEIRS: Final = "msgbatch_"
_MOST_LISTED: Final = 1000
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class MessageBatchRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/batches."""

    requests: list[Json]
    """Each has a `custom_id`, and a body of /v1/messages as `params`."""


def create(service: Service) -> Handler:
    """POST /v1/messages/batches."""
    server = service.config.server

    async def handle(request: Request) -> Response:
        files, batches = stores_of(service)
        body = await read_json(request, MessageBatchRequest, most=server.max_body_bytes, strict=server.strict_api)
        lines = _lines(body.value.requests)
        stored = await asyncio.to_thread(
            files.add, lines, filename="requests.jsonl", purpose="batch", tenant=tenant_of(request)
        )
        return json_reply(_shown(batches.create(stored, MESSAGES, {}), batches, request), headers=body.headers())

    return handle


def list_all(service: Service) -> Handler:
    """GET /v1/messages/batches, the latest first; `limit`, `after_id` and `before_id` choose a part."""

    async def handle(request: Request) -> Response:
        _, batches = stores_of(service)
        found = await asyncio.to_thread(batches.all)
        mine = [each for each in found if each.endpoint == MESSAGES and each.tenant == tenant_of(request)][::-1]
        query = request.query_params
        limit = query.get("limit", "20")
        if not limit.isdecimal() or not 1 <= int(limit) <= _MOST_LISTED:
            raise bad_field(f"limit is {limit[:20]!r}", f"it must be 1 to {_MOST_LISTED}", "limit")
        names = [_id_of(each) for each in mine]
        first, last = 0, len(mine)
        if (after := query.get("after_id")) is not None:
            first = names.index(after) + 1 if after in names else last
        if (before := query.get("before_id")) is not None:
            last = names.index(before) if before in names else first
            first = max(first, last - int(limit))
        part = mine[first:last][: int(limit)]
        more = last - first > len(part) or (before is not None and first > 0)
        shown = [_shown(each, batches, request) for each in part]
        ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
        return json_reply({"data": shown, "has_more": more, **ends})

    return handle


def retrieve(service: Service) -> Handler:
    """GET /v1/messages/batches/{id}."""

    async def handle(request: Request) -> Response:
        _, batches = stores_of(service)
        return json_reply(_shown(_batch(batches, request), batches, request))

    return handle


def cancel(service: Service) -> Handler:
    """POST /v1/messages/batches/{id}/cancel: finished requests keep their results."""

    async def handle(request: Request) -> Response:
        _, batches = stores_of(service)
        batch = _batch(batches, request)
        if batch.status in OPEN:
            batches.ask_to_cancel(batch)
        return json_reply(_shown(batch, batches, request))

    return handle


def delete(service: Service) -> Handler:
    """DELETE /v1/messages/batches/{id}: forgets an ended batch and its results."""

    async def handle(request: Request) -> Response:
        files, batches = stores_of(service)
        batch = _batch(batches, request)
        _need_end(batch)
        mine = {each.id: each for each in files.list(batch.tenant)}
        for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            if file_id in mine:
                files.delete(mine[file_id])
        batches.delete(batch)
        return json_reply({"id": _id_of(batch), "type": "message_batch_deleted"})

    return handle


def results(service: Service) -> Handler:
    """GET /v1/messages/batches/{id}/results: JSON lines, in the order they were answered."""

    async def handle(request: Request) -> Response:
        files, batches = stores_of(service)
        batch = _batch(batches, request)
        _need_end(batch)
        return StreamingResponse(_results(batch, files), media_type="application/x-jsonl")

    return handle


def _lines(requests: list[Json]) -> list[bytes]:
    """The requests as lines of a batch's file. Raises `InvalidRequest` naming the first that is wrong."""
    if not 1 <= len(requests) <= MAX_LINES:
        raise bad_field(f"there are {len(requests)} requests", f"a batch has 1 to {MAX_LINES}", "requests")
    seen: set[str] = set()
    made: list[bytes] = []
    for at, each in enumerate(requests):
        name, params = each.get("custom_id"), each.get("params")
        if not isinstance(name, str) or not 1 <= len(name) <= 64 or name in seen:
            where = f"requests[{at}].custom_id"
            raise bad_field(
                f"{where} is missing, too long or used twice", "each has its own, of 1 to 64 characters", where
            )
        if not isinstance(params, dict):
            where = f"requests[{at}].params"
            raise bad_field(f"{where} is no object", f"it is a body of {MESSAGES}", where)
        if params.get("stream"):
            where = f"requests[{at}].params.stream"
            raise bad_field(f"{where} is on", "requests of a batch can't stream", where)
        seen.add(name)
        made.append(_encode({"custom_id": name, "method": "POST", "url": MESSAGES, "body": params}) + b"\n")
    return made


def _batch(batches: BatchStore, request: Request) -> BatchRecord:
    given = request.path_params["id"]
    name = _OURS + given.removeprefix(_THEIRS) if given.startswith(_THEIRS) else given
    batch = batches.get(name, tenant_of(request))
    return batch if batch.endpoint == MESSAGES else batches.get("", tenant_of(request))


def _need_end(batch: BatchRecord) -> None:
    if batch.status in OPEN:
        raise InvalidRequest(
            what="the batch has not ended",
            why="its results are not complete",
            fix="wait until its processing_status is ended",
            param="id",
        )


def _id_of(batch: BatchRecord) -> str:
    return _THEIRS + batch.id.removeprefix(_OURS)


def _shown(batch: BatchRecord, batches: BatchStore, request: Request) -> Json:
    """Anthropic's batch object."""
    ended = batch.status not in OPEN
    stopping = not ended and batches.is_cancelling(batch)
    undone = batch.total - batch.completed - batch.failed
    expired = batch.status == "expired"
    at = max((stamp for name, stamp in batch.times.items() if not name.startswith("cancelling")), default=None)
    stopped = batch.times.get("cancelling_at")
    return {
        "id": _id_of(batch),
        "type": "message_batch",
        "processing_status": "ended" if ended else "canceling" if stopping else "in_progress",
        "request_counts": {
            "processing": 0 if ended else undone,
            "succeeded": batch.completed,
            "errored": batch.failed,
            "canceled": undone if ended and not expired else 0,
            "expired": undone if ended and expired else 0,
        },
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": _time(at) if ended and at is not None else None,
        "cancel_initiated_at": _time(stopped) if stopped is not None else None,
        "archived_at": None,
        "results_url": f"{str(request.base_url).rstrip('/')}{MESSAGES}/batches/{_id_of(batch)}/results"
        if ended
        else None,
    }


def _time(stamp: int) -> str:
    return datetime.fromtimestamp(stamp, UTC).isoformat().replace("+00:00", "Z")


def _results(batch: BatchRecord, files: FileStore) -> Iterator[bytes]:
    for file_id in (batch.output_file_id, batch.error_file_id):
        if file_id is None:
            continue
        with files.path(files.get(file_id, batch.tenant)).open("rb") as lines:
            for raw in lines:
                line = _decode(raw)
                yield _encode({"custom_id": line["custom_id"], "result": _result(line)}) + b"\n"


def _result(line: Json) -> Json:
    response = line["response"]
    if response is None:
        return {"type": "expired" if line["error"]["code"] == "batch_expired" else "canceled"}
    if response["status_code"] < 400:
        return {"type": "succeeded", "message": response["body"]}
    return {"type": "errored", "error": response["body"]}
