"""Admin routes: mounted only where an admin key is set, and open to nobody else."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from bough.core.errors import InvalidRequest
from bough.entrypoints.http.body import S, parse_json, read_bytes
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


class LoggingRequest(LogSwitch):
    """POST /configure_logging: what is not given stays as it is."""


def configure_logging(service: Service) -> Handler:
    """Changes what every process of the server logs; tells how it is now, and which processes have said that they do."""

    async def handle(request: Request) -> Response:
        asked = await _optional(request, LoggingRequest, service)
        processes = await service.switch_logging(asked)
        told = {"log_level": log_level(), "log_requests": service.log_requests, "processes": processes}
        return json_reply({"success": True, **told})

    return handle


def pause(service: Service) -> Handler:
    async def handle(request: Request) -> Response:
        asked = await _optional(request, PauseRequest, service)
        return json_reply({"success": True, **await service.intake.pause(asked.mode or "abort")})

    return handle


def resume(service: Service) -> Handler:
    async def handle(request: Request) -> Response:
        return json_reply({"success": True, **await service.intake.resume()})

    return handle


def start_profile(service: Service) -> Handler:
    async def handle(request: Request) -> Response:
        asked = await _optional(request, ProfileRequest, service)
        if (asked.num_steps or 0) < 0:
            raise InvalidRequest(
                what=f"num_steps is {asked.num_steps}", why="it counts steps", fix="send 0 or more", param="num_steps"
            )
        done = await service.intake.profile(
            start=True, output_dir=asked.output_dir or "", num_steps=asked.num_steps or 0
        )
        return json_reply({"success": True, **done})

    return handle


def stop_profile(service: Service) -> Handler:
    async def handle(request: Request) -> Response:
        return json_reply({"success": True, **await service.intake.profile(start=False)})

    return handle


async def _optional(request: Request, kind: type[S], service: Service) -> S:
    """The body, or its defaults where there is none."""
    server = service.config.server
    raw = await read_bytes(request, server.max_body_bytes)
    return parse_json(raw, kind, strict=server.strict_api).value if raw.strip() else kind()
