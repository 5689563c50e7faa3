"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.openai.fields import served_name
from bough.entrypoints.http.replies import json_reply
from bough.entrypoints.service import Served, Service


def list_models(service: Service) -> Handler:
    async def handle(request: Request) -> Response:
        return json_reply({"object": "list", "data": [card(service.served, service.served.name)]})

    return handle


def get_model(service: Service) -> Handler:
    async def handle(request: Request) -> Response:
        return json_reply(card(service.served, served_name(service.served, request.path_params["model"])))

    return handle


def card(served: Served, name: str) -> dict[str, Any]:
    """A model as OpenAI lists it, with the length of its context."""
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "bough",
        "root": served.name,
        "parent": None,
        "max_model_len": served.context_length,
    }
