"""Routes that tell how the server is: probes, and facts about the model and the server."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bough.config.flags import show_value
from bough.config.server_args import flat
from bough.core.errors import BoughError
from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.replies import json_reply
from bough.entrypoints.service import Service

_SECRETS = ("api_key", "admin_api_key")


def live(service: Service) -> Handler:
    """GET /livez: the engine is running (starting and draining count)."""

    async def handle(request: Request) -> Response:
        health = service.health()
        return _verdict(health.alive, health.why)

    return handle


def ready(service: Service) -> Handler:
    """GET /readyz, /health, /health_generate: requests are taken. Reads the heartbeat; costs the engine nothing."""

    async def handle(request: Request) -> Response:
        health = service.health()
        return _verdict(health.ready, health.why)

    return handle


def server_info(service: Service) -> Handler:
    """GET /server_info: every setting, the decisions behind them, memory, and the engine's numbers."""

    async def handle(request: Request) -> Response:
        served, health = service.served, service.health()
        settings: dict[str, Any] = {
            name: value if isinstance(value, bool | int | float | str) else show_value(value)
            for name, value in flat(service.config).items()
            if name not in _SECRETS
        }
        try:
            states = [await service.intake.info()]
        except BoughError as error:
            states = [{"error": error.what}]
        return json_reply(
            {
                **settings,
                "version": import_module("bough").__version__,
                "served_model_name": served.name,
                "context_length": served.context_length,
                "num_running": health.num_running,
                "num_waiting": health.num_waiting,
                "admission": {
                    "requests": service.admission.requests,
                    "waiting_tokens": service.admission.waiting_tokens,
                    "refused": service.admission.refused,
                    "max_requests": service.admission.max_requests,
                    "max_tokens": service.admission.max_tokens,
                },
                "engine": dict(served.facts),
                "internal_states": states,
            }
        )

    return handle


def model_info(service: Service) -> Handler:
    """GET /model_info: the model as a client must know it, `role_affixes` included."""

    async def handle(request: Request) -> Response:
        served = service.served
        template = served.tokenizer.chat_template if served.tokenizer is not None else None
        affixes = None
        if template is not None:
            try:
                affixes = template.role_affixes()
            except BoughError:
                affixes = None  # a template that refuses the probes has none that could be told
        model = service.config.model
        return json_reply(
            {
                "model_path": model.model or served.name,
                "tokenizer_path": model.tokenizer or model.model or served.name,
                "served_model_name": served.name,
                "is_generation": served.facts.get("pooling") is None,
                "architectures": [served.facts["architecture"]] if "architecture" in served.facts else [],
                "max_model_len": served.context_length,
                "vocab_size": served.facts.get("vocab_size"),
                "preferred_sampling_params": dict(served.sampling_defaults),
                "weight_version": "default",
                "reasoning_parser": served.reasoning_parser,
                "tool_call_parser": served.tool_parser,
                "has_chat_template": template is not None,
                "role_affixes": affixes,
                "has_image_understanding": False,
                "has_audio_understanding": False,
            }
        )

    return handle


def _verdict(good: bool, why: str) -> Response:
    return json_reply({"status": "ok" if good else "unavailable", "why": why}, status=200 if good else 503)
