"""POST /v1/responses, and the routes for existing responses."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from bough.core import bounds
from bough.core.errors import BoughError, InvalidRequest
from bough.engine_client import Request
from bough.entrypoints.http.body import read_json
from bough.entrypoints.http.errors import as_bough
from bough.entrypoints.http.openai.chat import Handler, make_form, make_request
from bough.entrypoints.http.openai.fields import served_name
from bough.entrypoints.http.paging import page
from bough.entrypoints.http.peers import PassedOn
from bough.entrypoints.http.replies import EventReply, client_of, json_reply, placed, tenant_of
from bough.entrypoints.http.responses.answer import Growing, event_bytes, new_response
from bough.entrypoints.http.responses.convert import chat_request, input_items
from bough.entrypoints.http.responses.schema import Json, ResponsesRequest
from bough.entrypoints.http.responses.shorten import num_tokens, shorten
from bough.entrypoints.http.responses.store import ResponseStore, StoredResponse
from bough.entrypoints.http.responses.tools import all_tools, offered_tools
from bough.entrypoints.service import Service
from bough.entrypoints.stream import Events

_log = logging.getLogger(__name__)

_MOST_LISTED = 100
_MOST_ASKED = 256
"""Maximum number of items that are fetched from other workers for one request."""


def store_of(service: Service) -> ResponseStore:
    """The worker's store, created on first use."""
    if service.responses is None:
        server = service.config.server
        size = -(-server.response_store_size // max(1, server.api_workers))
        service.responses = ResponseStore(size)
        service.at_close(service.responses.close)
    return service.responses


def create(service: Service) -> Handler:
    """POST /v1/responses."""
    server = service.config.server
    store = store_of(service)

    async def handle(request: HttpRequest) -> Response:
        body = await read_json(request, ResponsesRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        model = served_name(service.served, asked.model)
        _check(asked, store)
        tenant = tenant_of(request)
        past: list[Json] = []
        if asked.previous_response_id is not None:
            past = await _conversation(service, request, asked.previous_response_id)
        new = await _new_items(service, request, asked.input)
        tools = offered_tools(all_tools(asked.tools, [*past, *new]), strict=server.strict_api)
        chat = chat_request(asked, [*past, *new], tools)
        cut = await shorten(chat, service) if asked.truncation == "auto" else ()
        job, offered = make_request(chat, service)
        headers = body.headers(*tools.left_out, *cut, *offered.ignored)
        job = placed(job, request)
        form = make_form(chat, job, offered, model, served=service.served, report_cache=server.enable_cache_report)
        name = service.peers.new_name() if service.peers is not None else ""
        growing = Growing(new_response(asked, model, name), form, tools)
        kept = StoredResponse(growing.response, [*past, *new], len(new), tenant)
        if asked.background:
            job = msgspec.structs.replace(job, stream=True)  # clients that follow it later see it grow
            _in_background(service, store, job, growing, kept)
            if asked.stream:
                return EventReply(kept.follow(), headers)
            return json_reply(kept.response, headers=headers)
        keep = store if asked.store is not False else None
        if asked.stream:
            return EventReply(_events(service, job, growing, kept, keep), headers)
        await client_of(request).wait_for(_whole(service, job, growing))
        if keep is not None:
            keep.put(kept)
        return json_reply(growing.response, headers=headers)

    return handle


def input_tokens(service: Service) -> Handler:
    """POST /v1/responses/input_tokens: how many tokens a request's input has."""
    server = service.config.server

    async def handle(request: HttpRequest) -> Response:
        body = await read_json(request, ResponsesRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        served_name(service.served, asked.model)
        past: list[Json] = []
        if asked.previous_response_id is not None:
            past = await _conversation(service, request, asked.previous_response_id)
        new = await _new_items(service, request, asked.input)
        tools = offered_tools(all_tools(asked.tools, [*past, *new]), strict=server.strict_api)
        chat = chat_request(asked, [*past, *new], tools)
        counted = {"object": "response.input_tokens", "input_tokens": await num_tokens(chat, service)}
        return json_reply(counted, headers=body.headers(*tools.left_out))

    return handle


def retrieve(service: Service) -> Handler:
    """GET /v1/responses/{id}; with `stream=true` the events of a background response, from the beginning or later."""
    store = store_of(service)

    async def handle(request: HttpRequest) -> Response:
        elsewhere = _passed_on(service, request)
        if elsewhere is not None:
            return elsewhere
        kept = store.get(request.path_params["id"], tenant_of(request))
        if request.query_params.get("stream", "").lower() != "true":
            return json_reply(kept.response)
        if kept.events is None:
            raise InvalidRequest(
                what="this response can't be streamed again",
                why="only background responses remember their events",
                fix="send background: true when you create it",
                param="stream",
            )
        return EventReply(kept.follow(_after(request)))

    return handle


def delete(service: Service) -> Handler:
    """DELETE /v1/responses/{id}."""
    store = store_of(service)

    async def handle(request: HttpRequest) -> Response:
        elsewhere = _passed_on(service, request)
        if elsewhere is not None:
            return elsewhere
        kept = store.get(request.path_params["id"], tenant_of(request))
        store.delete(kept)
        return json_reply({"id": kept.id, "object": "response", "deleted": True})

    return handle


def cancel(service: Service) -> Handler:
    """POST /v1/responses/{id}/cancel: ends a background response; one that has ended stays as it is."""
    store = store_of(service)

    async def handle(request: HttpRequest) -> Response:
        elsewhere = _passed_on(service, request)
        if elsewhere is not None:
            return elsewhere
        kept = store.get(request.path_params["id"], tenant_of(request))
        if not kept.response["background"]:
            raise InvalidRequest(
                what="this response can't be cancelled",
                why="it was not made with background: true",
                fix="close its connection instead",
                param="response_id",
            )
        if kept.task is not None and kept.running:
            kept.task.cancel()
            await asyncio.gather(kept.task, return_exceptions=True)
        return json_reply(kept.response)

    return handle


def list_input(service: Service) -> Handler:
    """GET /v1/responses/{id}/input_items: what a response answers, latest first (or `order=asc`)."""
    store = store_of(service)

    async def handle(request: HttpRequest) -> Response:
        elsewhere = _passed_on(service, request)
        if elsewhere is not None:
            return elsewhere
        kept = store.get(request.path_params["id"], tenant_of(request))
        items = [{"id": f"item_{at}", **item} for at, item in enumerate(kept.items)]
        return json_reply(page(request, items[::-1], lambda item: item["id"], lambda item: item, most=_MOST_LISTED))

    return handle


# -- what other workers keep ---------------------------------------------------------------------------------------


def kept_conversation(service: Service) -> Handler:
    """GET /peer/conversations/{id}, for other workers: everything up to and with the answer of a response."""
    store = store_of(service)

    async def handle(request: HttpRequest) -> Response:
        kept = store.get(request.path_params["id"], tenant_of(request), "previous_response_id")
        return json_reply(_finished(kept).conversation())

    return handle


def kept_item(service: Service) -> Handler:
    """GET /peer/items/{id}, for other workers: one item."""
    store = store_of(service)

    async def handle(request: HttpRequest) -> Response:
        item = store.item(request.path_params["id"], tenant_of(request))
        return json_reply(item, status=200 if item is not None else 404)

    return handle


def _passed_on(service: Service, request: HttpRequest) -> Response | None:
    """The answer of the worker that keeps the response, if that is another one."""
    peers = service.peers
    worker = peers.keeper_of(request.path_params["id"]) if peers is not None else 0
    return PassedOn(peers, worker, request) if peers is not None and worker != peers.own else None


async def _conversation(service: Service, request: HttpRequest, response_id: str) -> list[Json]:
    """Everything up to and with the answer of a response, whichever worker keeps it. Raises `NotFound`, `InvalidRequest`."""
    peers, store = service.peers, store_of(service)
    if peers is not None and (worker := peers.keeper_of(response_id)) != peers.own:
        found_there = await peers.ask(worker, request, f"/peer/conversations/{response_id}")
        if found_there is not None:
            items: list[Json] = msgspec.json.decode(found_there, type=list[Json])
            return items
    return _finished(store.get(response_id, tenant_of(request), "previous_response_id")).conversation()


async def _new_items(service: Service, request: HttpRequest, given: str | list[Json]) -> list[Json]:
    """The items of an input, with those that it only refers to. Raises `InvalidRequest` for one that is not stored."""
    store, tenant = store_of(service), tenant_of(request)
    known = await _items_of_others(service, request, given)
    return input_items(given, lambda item_id: store.item(item_id, tenant) or known.get(item_id))


async def _items_of_others(service: Service, request: HttpRequest, given: str | list[Json]) -> dict[str, Json]:
    """Items that the input refers to and this worker does not keep."""
    peers, store = service.peers, store_of(service)
    if peers is None or isinstance(given, str):
        return {}
    found: dict[str, Json] = {}
    names = {str(item.get("id", "")) for item in given if item.get("type") == "item_reference"}
    for name in [each for each in names if each and store.item(each, tenant_of(request)) is None][:_MOST_ASKED]:
        for worker in peers.others:
            found_there = await peers.ask(worker, request, f"/peer/items/{name}")
            if found_there is not None:
                found[name] = msgspec.json.decode(found_there, type=Json)
                break
    return found


# -- running --------------------------------------------------------------------------------------


async def _whole(service: Service, job: Request, growing: Growing) -> None:
    growing.begin()
    for _, _, delta in await service.collect([job]):
        growing.add(delta)


async def _events(
    service: Service, job: Request, growing: Growing, kept: StoredResponse, store: ResponseStore | None
) -> Events:
    """The events of a response whose client waits. Errors before the first event are raised; later ones are sent."""
    begun = False
    try:
        async with contextlib.aclosing(service.run([job])) as news:
            async for _, _, delta in news:
                events = [] if begun else [*growing.begin(), *growing.start()]
                events += growing.add(delta)
                begun = True
                yield b"".join(map(event_bytes, events))
    except Exception as error:
        if not begun:
            raise
        if not isinstance(error, BoughError):
            _log.exception("a response failed")
        yield b"".join(map(event_bytes, growing.fail(as_bough(error))))
    if store is not None:
        store.put(kept)


def _in_background(
    service: Service, store: ResponseStore, job: Request, growing: Growing, kept: StoredResponse
) -> None:
    kept.events = []
    kept.tell([event_bytes(event) for event in growing.begin()])

    async def run() -> None:
        try:
            async with contextlib.aclosing(service.run([job])) as news:
                async for _, _, delta in news:
                    events = growing.start() if growing.response["status"] == "queued" else []
                    kept.tell([event_bytes(each) for each in [*events, *growing.add(delta)]])
        except asyncio.CancelledError:
            kept.tell([event_bytes(each) for each in growing.cancel()])
            raise
        except Exception as error:
            if not isinstance(error, BoughError):
                _log.exception("a background response failed")
            kept.tell([event_bytes(each) for each in growing.fail(as_bough(error))])
        finally:
            store.update(kept)

    kept.task = asyncio.ensure_future(run())
    kept.task.add_done_callback(lambda _: kept.wake())
    store.put(kept)


def _check(asked: ResponsesRequest, store: ResponseStore) -> None:
    if asked.previous_response_id is not None:
        store.need("previous_response_id")
    if asked.background:
        store.need("background")
        if asked.store is False:
            raise InvalidRequest(
                what="background without store",
                why="a background response is asked for later",
                fix="leave store out",
                param="store",
            )
    metadata = asked.metadata or {}
    bounds.count("metadata", metadata, "metadata")
    sizes_fit = all(
        isinstance(value, str) and len(value) <= 512 and len(name) <= 64 for name, value in metadata.items()
    )
    if not sizes_fit:
        raise InvalidRequest(
            what="metadata is too large or no text",
            why="names have at most 64 characters, texts 512",
            fix="send less",
            param="metadata",
        )


def _finished(kept: StoredResponse) -> StoredResponse:
    if kept.response["status"] in ("queued", "in_progress"):
        raise InvalidRequest(
            what="the previous response has not ended",
            why="what it says is not known yet",
            fix="wait until its status is completed",
            param="previous_response_id",
        )
    return kept


def _after(request: HttpRequest) -> int:
    given = request.query_params.get("starting_after", "-1")
    try:
        return max(-1, int(given))
    except ValueError:
        raise InvalidRequest(
            what=f"starting_after is {given[:20]!r}",
            why="it is a sequence number",
            fix="send an integer",
            param="starting_after",
        ) from None
