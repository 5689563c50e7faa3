"""Admin routes: mounted only if an admin key is set, and open only to it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from bough.core.errors import Conflict, InvalidRequest
from bough.core.messages import ExpertRecord
from bough.entrypoints.http.body import S, as_kind, read_json
from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.replies import json_reply
from bough.entrypoints.service import Service
from bough.observability.log import log_level
from bough.observability.switches import LogSwitch


class PauseRequest(msgspec.Struct, kw_only=True):
    """POST /pause_generation."""

    mode: str | None = None
    """abort (default), retract or in_place."""


class ProfileRequest(msgspec.Struct, kw_only=True):
    """POST /start_profile."""

    output_dir: str | None = None
    num_steps: int | None = None


class StateRequest(msgspec.Struct, kw_only=True):
    """POST /set_internal_state."""

    server_args: dict[str, Any]


class LoggingRequest(LogSwitch):
    """POST /configure_logging: what is not given stays as it is."""


def configure_logging(service: Service) -> Handler:
    """Changes what every process of the server logs; returns the new state, and the processes that have confirmed
    it."""

    async def handle(request: Request) -> Response:
        asked = await _optional(request, LoggingRequest, service)
        processes = await service.switch_logging(asked)
        reply = {"log_level": log_level(), "log_requests": service.log_requests, "processes": processes}
        return json_reply({"success": True, **reply})

    return handle


def record_experts(action: Literal["start", "stop", "dump"], service: Service) -> Handler:
    """Counts tokens by layer and expert; `dump` returns the counts and the placement of experts. Counts of replicas are
    summed."""

    async def handle(request: Request) -> Response:
        parallel = service.config.parallel
        if not parallel.eplb and parallel.expert_distribution_recorder_mode == "none":
            raise Conflict(
                what="tokens are not counted by expert",
                why="expert_distribution_recorder_mode is none",
                fix="start the server with --expert-distribution-recorder-mode stat, or --eplb",
            )
        reply = await service.engine_client.call(lambda call: ExpertRecord(call, action))
        return json_reply({"success": True, **reply})

    return handle


def set_internal_state(service: Service) -> Handler:
    """Changes settings that can be changed while the server runs (logging). If another setting is given, nothing is
    changed and the request is refused."""
    changeable = LogSwitch.__struct_fields__

    async def handle(request: Request) -> Response:
        server = service.config.server
        asked = (await read_json(request, StateRequest, most=server.max_body_bytes, strict=server.strict_api)).value
        fixed = [name for name in asked.server_args if name not in changeable]
        if fixed:
            raise InvalidRequest(
                what=f"{fixed[0][:60]} can't be changed while the server runs",
                why=f"only these can be: {', '.join(changeable)}",
                fix="restart the server with it",
                param=f"server_args.{fixed[0][:60]}",
            )
        switch = as_kind(asked.server_args, LoggingRequest, strict=True).value
        await service.switch_logging(switch)
        reply = {"log_level": log_level(), "log_requests": service.log_requests}
        return json_reply({"updated": True, "server_args": reply})

    return handle


def pause(service: Service) -> Handler:
    async def handle(request: Request) -> Response:
        asked = await _optional(request, PauseRequest, service)
        return json_reply({"success": True, **await service.engine_client.pause(asked.mode or "abort")})

    return handle


def resume(service: Service) -> Handler:
    async def handle(request: Request) -> Response:
        return json_reply({"success": True, **await service.engine_client.resume()})

    return handle


def start_profile(service: Service) -> Handler:
    async def handle(request: Request) -> Response:
        asked = await _optional(request, ProfileRequest, service)
        if (asked.num_steps or 0) < 0:
            raise InvalidRequest(
                what=f"num_steps is {asked.num_steps}", why="it counts steps", fix="send 0 or more", param="num_steps"
            )
        done = await service.engine_client.profile(
            start=True, output_dir=asked.output_dir or "", num_steps=asked.num_steps or 0
        )
        return json_reply({"success": True, **done})

    return handle


def stop_profile(service: Service) -> Handler:
    async def handle(request: Request) -> Response:
        return json_reply({"success": True, **await service.engine_client.profile(start=False)})

    return handle


async def _optional(request: Request, kind: type[S], service: Service) -> S:
    """The body, or its defaults where there is none."""
    server = service.config.server
    body = await read_json(request, kind, most=server.max_body_bytes, strict=server.strict_api, empty=kind())
    return body.value
