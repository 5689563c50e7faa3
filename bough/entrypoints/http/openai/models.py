"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.openai.fields import served_name
from bough.entrypoints.http.replies import json_reply
from bough.entrypoints.served_model import ServedModel
from bough.entrypoints.service import Service


def list_models(service: Service) -> Handler:
    async def handle(request: Request) -> Response:
        names = service.served.names or (service.served.name,)
        names = (*names, *service.served.adapters)
        listed = {"object": "list", "data": [card(service.served, name) for name in names]}
        return json_reply({**listed, "first_id": names[0], "last_id": names[-1], "has_more": False})

    return handle


def get_model(service: Service) -> Handler:
    listed = list_models(service)

    async def handle(request: Request) -> Response:
        if not request.path_params["model"]:
            return await listed(request)  # /v1/models/, as some clients write it
        return json_reply(card(service.served, served_name(service.served, request.path_params["model"])))

    return handle


def card(served: ServedModel, name: str) -> dict[str, Any]:
    """A model as OpenAI and Anthropic list it, with the length of its context."""
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "bough",
        "root": served.name,
        "parent": served.name if name in served.adapters else None,
        "max_model_len": served.context_length,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(served.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": served.context_length,
    }
