"""Probes, and information about the model and the server."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from bough.core.errors import Forbidden, InvalidRequest
from bough.core.messages import Look
from bough.entrypoints import about
from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.replies import caller_of, json_reply
from bough.entrypoints.service import Service

_SECTIONS = frozenset({"all", "core", "memory", "queues", "requests"})
_MOST_ROWS = 256


def live(service: Service) -> Handler:
    """GET /livez: the engine is running (starting and draining count)."""

    async def handle(request: Request) -> Response:
        health = service.health()
        return _verdict(health.alive, health.why)

    return handle


def ready(service: Service) -> Handler:
    """GET /readyz, /health, /health_generate: requests are taken. Reads the heartbeat; costs the engine nothing.

    `degraded` names background tasks that have failed and are tried again, and processes that are late: requests are taken
    all the same.
    """

    async def handle(request: Request) -> Response:
        health = service.health()
        return _verdict(health.ready, health.why, {**health.late, **service.keeper.troubles()})

    return handle


def server_info(service: Service) -> Handler:
    """GET /server_info: every setting, the decisions behind them, memory, and the engine's numbers."""

    async def handle(request: Request) -> Response:
        return json_reply(await about.server_info(service))

    return handle


def model_info(service: Service) -> Handler:
    """GET /model_info: facts about the model for clients, including `role_affixes`."""

    async def handle(request: Request) -> Response:
        return json_reply(about.model_info(service))

    return handle


def loads(service: Service) -> Handler:
    """GET /v1/loads: how busy the engine is. `include` chooses sections (`requests` is not among `all`), `dp_rank` a
    replica, and `format=prometheus` another form."""

    async def handle(request: Request) -> Response:
        wanted = set(filter(None, request.query_params.get("include", "all").split(",")))
        unknown = wanted - _SECTIONS
        form = request.query_params.get("format", "json")
        if unknown or form not in ("json", "prometheus"):
            raise InvalidRequest(
                what=f"include has {sorted(unknown)[0][:40]!r}" if unknown else f"format is {form[:40]!r}",
                why=f"sections are {', '.join(sorted(_SECTIONS))}; formats are json and prometheus",
                fix="send a valid one",
                param="include" if unknown else "format",
            )
        body = await about.loads(service)
        rank = request.query_params.get("dp_rank")
        _check_rank(rank, [load["dp_rank"] for load in body["loads"]])
        if rank is not None:
            body["loads"] = [load for load in body["loads"] if str(load["dp_rank"]) == rank]
        for load in body["loads"]:
            for section in ("memory", "queues"):
                if not wanted & {section, "all"}:
                    del load[section]
        if "requests" in wanted:
            body["requests"] = await _requests(service, request)
        if form == "json":
            return json_reply(body)
        lines = [
            f'bough:load_{name}{{dp_rank="{load["dp_rank"]}"}} {float(value):g}'
            for load in body["loads"]
            for name, value in load.items()
            if isinstance(value, int | float) and name != "dp_rank"
        ]
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4; charset=utf-8")

    return handle


def get_load(service: Service) -> Handler:
    """GET /get_load: the same as a list, with the field names that older SGLang clients expect."""

    async def handle(request: Request) -> Response:
        body = await about.loads(service)
        return json_reply(
            [
                {
                    **load,
                    "num_reqs": load["num_total_reqs"],
                    "num_tokens": load["num_used_tokens"] + load["num_waiting_tokens"],
                }
                for load in body["loads"]
            ]
        )

    return handle


def tokenizer_info(service: Service) -> Handler:
    """GET /tokenizer_info: what a client needs to build prompts itself."""

    async def handle(request: Request) -> Response:
        return json_reply(about.tokenizer_info(service))

    return handle


def _check_rank(wanted: str | None, ranks: list[int]) -> None:
    """Raises `InvalidRequest` if there is no such replica."""
    if wanted is not None and wanted not in map(str, ranks):
        raise InvalidRequest(
            what=f"dp_rank is {wanted[:40]!r}",
            why=f"the ranks of this server are: {', '.join(map(str, ranks))}",
            fix="send one of them, or leave it out",
            param="dp_rank",
        )


async def _requests(service: Service, request: Request) -> object:
    """The requests in the engine. Only for clients that may abort them, because it lists their ids."""
    if not caller_of(request).admin:
        raise Forbidden(
            what="the list of requests needs the admin key",
            why="it names other people's requests",
            fix="leave it out of include",
        )
    seen = await service.engine_client.call(lambda call: Look(call, max_spans=0, max_rows=_MOST_ROWS))
    return seen["rows"]


def _verdict(good: bool, why: str, degraded: Mapping[str, str] | None = None) -> Response:
    body: dict[str, object] = {"status": "ok" if good else "unavailable", "why": why}
    if degraded:
        body["degraded"] = degraded
    return json_reply(body, status=200 if good else 503)
