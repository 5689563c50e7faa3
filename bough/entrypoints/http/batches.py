"""/v1/files and /v1/batches: offline batches under --batch-dir."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from bough.core import bounds
from bough.core.errors import BoughError, ConfigError, InvalidRequest
from bough.engine_client.caller import Caller
from bough.engine_client.names import random_name
from bough.entrypoints.batches import BatchRunner, BatchStore, FileStore
from bough.entrypoints.batches.files import MAX_FILE_BYTES
from bough.entrypoints.http.body import read_json, too_large
from bough.entrypoints.http.errors import as_bough, error_body, status_of
from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.paging import page
from bough.entrypoints.http.replies import CALLER, json_reply, tenant_of
from bough.entrypoints.service import Service
from bough.entrypoints.stream import ClientGone

_log = logging.getLogger(__name__)

Json = dict[str, Any]
T = TypeVar("T")

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/moderations")
"""Endpoints that the lines of a batch may use, if they are served."""
MESSAGES = "/v1/messages"
"""The endpoint of Anthropic's batches, which have separate routes."""

_CHUNK = 1024 * 1024
_MOST_LISTED = 10_000
_AT_ONCE = 64


class BatchRequest(msgspec.Struct, kw_only=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    # of no effect here
    output_expires_after: Json | None = None


def stores_of(service: Service) -> tuple[FileStore, BatchStore]:
    """The stores in the batch directory. Raises `InvalidRequest` where there is none."""
    directory = service.config.server.batch_dir
    if not directory:
        raise InvalidRequest(
            what="this server keeps no files",
            why="it was started without --batch-dir",
            fix="start it with --batch-dir DIRECTORY",
        )
    path = Path(directory).expanduser()
    return FileStore(path), BatchStore(path)


def start_batches(service: Service, handlers: Mapping[str, Handler]) -> None:
    """Processes batches in this process until the service closes."""
    directory = service.config.server.batch_dir
    if not directory:
        return
    try:
        files, batches = stores_of(service)
    except OSError as error:
        raise ConfigError(
            what=f"the batch directory {directory} can't be used",
            why=error.strerror or "it can't be written",
            fix="choose another --batch-dir",
            param="batch_dir",
        ) from error
    served = {path: handlers[path] for path in (*ENDPOINTS, MESSAGES) if path in handlers}

    async def call(endpoint: str, body: Json, tenant: str) -> tuple[int, str, Json]:
        caller = Caller(tenant=tenant, isolated=service.config.server.isolate_cache, whole=True)
        return await call_route(served[endpoint], endpoint, body, caller)

    most = max(1, service.admission.max_requests // 2)
    runner = BatchRunner(files, batches, call, frozenset(served), keeper=service.keeper, at_once=min(_AT_ONCE, most))
    runner.start()
    service.at_drain(runner.drain)
    service.at_close(runner.close)


async def call_route(handler: Handler, path: str, body: Json, caller: Caller) -> tuple[int, str, Json]:
    """A route's answer to a body, as if it had come over HTTP: status, request id, body.

    Raises `OSError`; any other failure of the route is a status of 500.
    """
    raw = msgspec.json.encode(body)
    request_id = random_name()
    sent = False

    async def receive() -> Json:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # the client of a batch never goes away
        sent = True
        return {"type": "http.request", "body": raw, "more_body": False}

    scope: Json = {
        "type": "http", "method": "POST", "path": path, "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "bough.request_id": request_id, CALLER: caller,
    }  # fmt: skip
    try:
        response = await handler(Request(scope, receive))
    except OSError:
        raise
    except Exception as error:
        if not isinstance(error, BoughError):
            _log.exception("a line of a batch failed", extra={"request_id": request_id})
        shown = as_bough(error)
        return status_of(shown), request_id, dict(error_body(shown, path))
    return response.status_code, request_id, msgspec.json.decode(bytes(response.body))


# -- files ----------------------------------------------------------------------------------------


def upload_file(service: Service) -> Handler:
    """POST /v1/files: multipart, with `purpose` and `file`."""

    async def handle(request: Request) -> Response:
        files, _ = stores_of(service)
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise InvalidRequest(
                what="the body is no form", why="a file comes as multipart/form-data", fix="send purpose and file"
            )
        parser = MultiPartParser(request.headers, _bounded(request), max_files=1, max_fields=8, max_part_size=4096)
        try:
            form = await parser.parse()
        except (MultiPartException, KeyError) as error:
            raise InvalidRequest(
                what="the form can't be read", why=str(error)[:200], fix="send multipart/form-data"
            ) from error
        purpose, upload = form.get("purpose"), form.get("file")
        if not isinstance(purpose, str) or upload is None or isinstance(upload, str):
            raise InvalidRequest(
                what="purpose or file is missing", why="an upload has both", fix="send both", param="file"
            )
        if purpose != "batch":
            raise InvalidRequest(
                what=f"purpose is {purpose[:40]!r}",
                why="files are for batches here",
                fix='send purpose "batch"',
                param="purpose",
            )
        source = upload.file
        name = Path(upload.filename or "upload.jsonl").name[:255]
        stored = await asyncio.to_thread(
            files.add, iter(lambda: source.read(_CHUNK), b""), filename=name, purpose=purpose, tenant=tenant_of(request)
        )
        await form.close()
        return json_reply(stored.shown())

    return handle


async def _bounded(request: Request) -> AsyncGenerator[bytes, None]:
    """The body's chunks, up to what a file may have and its form around it."""
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > MAX_FILE_BYTES + _CHUNK:
                raise too_large(MAX_FILE_BYTES, close=True)
            yield chunk
    except ClientDisconnect as error:
        raise ClientGone from error


def list_files(service: Service) -> Handler:
    """GET /v1/files."""

    async def handle(request: Request) -> Response:
        files, _ = stores_of(service)
        found = await asyncio.to_thread(files.list, tenant_of(request), request.query_params.get("purpose", ""))
        return json_reply(page(request, found, lambda each: each.id, lambda each: each.shown(), most=_MOST_LISTED))

    return handle


def get_file(service: Service) -> Handler:
    """GET /v1/files/{id}."""

    async def handle(request: Request) -> Response:
        files, _ = stores_of(service)
        return json_reply(files.get(request.path_params["id"], tenant_of(request)).shown())

    return handle


def file_content(service: Service) -> Handler:
    """GET /v1/files/{id}/content."""

    async def handle(request: Request) -> Response:
        files, _ = stores_of(service)
        stored = files.get(request.path_params["id"], tenant_of(request))
        return FileResponse(files.path(stored), media_type="application/octet-stream")

    return handle


def delete_file(service: Service) -> Handler:
    """DELETE /v1/files/{id}."""

    async def handle(request: Request) -> Response:
        files, _ = stores_of(service)
        stored = files.get(request.path_params["id"], tenant_of(request))
        files.delete(stored)
        return json_reply({"id": stored.id, "object": "file", "deleted": True})

    return handle


# -- batches --------------------------------------------------------------------------------------


def create_batch(service: Service) -> Handler:
    """POST /v1/batches."""
    server = service.config.server

    async def handle(request: Request) -> Response:
        files, batches = stores_of(service)
        body = await read_json(request, BatchRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        if asked.endpoint not in ENDPOINTS:
            raise InvalidRequest(
                what=f"endpoint is {asked.endpoint[:80]!r}",
                why=f"it must be one of {', '.join(ENDPOINTS)}",
                fix="send a valid endpoint",
                param="endpoint",
            )
        if asked.completion_window != "24h":
            raise InvalidRequest(
                what=f"completion_window is {asked.completion_window[:40]!r}",
                why="a batch has a day",
                fix='send "24h"',
                param="completion_window",
            )
        metadata = asked.metadata or {}
        bounds.count("metadata", metadata, "metadata")
        if any(len(name) > 64 or len(value) > 512 for name, value in metadata.items()):
            raise InvalidRequest(
                what="metadata is too large",
                why="names have at most 64 characters, texts 512",
                fix="send less",
                param="metadata",
            )
        source = files.get(asked.input_file_id, tenant_of(request), "input_file_id")
        batch = batches.create(source, asked.endpoint, metadata)
        return json_reply(batch.shown(cancelling=False), headers=body.headers())

    return handle


def list_batches(service: Service) -> Handler:
    """GET /v1/batches."""

    async def handle(request: Request) -> Response:
        _, batches = stores_of(service)
        found = await asyncio.to_thread(batches.all)
        mine = [each for each in found if each.tenant == tenant_of(request) and each.endpoint in ENDPOINTS]
        shown = lambda each: each.shown(cancelling=batches.is_cancelling(each))
        return json_reply(page(request, mine[::-1], lambda each: each.id, shown, most=_MOST_LISTED))

    return handle


def get_batch(service: Service) -> Handler:
    """GET /v1/batches/{id}."""

    async def handle(request: Request) -> Response:
        _, batches = stores_of(service)
        batch = batches.get(request.path_params["id"], tenant_of(request))
        return json_reply(batch.shown(cancelling=batches.is_cancelling(batch)))

    return handle


def cancel_batch(service: Service) -> Handler:
    """POST /v1/batches/{id}/cancel: finished lines keep their results; ended batches can't be cancelled."""

    async def handle(request: Request) -> Response:
        _, batches = stores_of(service)
        batch = batches.get(request.path_params["id"], tenant_of(request))
        if batch.status not in ("validating", "in_progress"):
            raise InvalidRequest(
                what=f"the batch is {batch.status}",
                why="it has ended",
                fix="there is nothing to cancel",
                param="batch_id",
            )
        batches.ask_to_cancel(batch)
        return json_reply(batch.shown(cancelling=True))

    return handle
