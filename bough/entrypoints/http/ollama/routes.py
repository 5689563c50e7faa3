"""Ollama's routes: /api/chat, /api/generate, and what its clients ask about models."""

from __future__ import annotations

import contextlib
import hashlib
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from bough.core.errors import InvalidRequest
from bough.engine_client import Request
from bough.entrypoints.fim import fill_in
from bough.entrypoints.http.body import CheckedBody, read_json
from bough.entrypoints.http.ollama.answer import OllamaAnswer, error_line, line, loaded
from bough.entrypoints.http.ollama.convert import chat_of, generate_of, model_name
from bough.entrypoints.http.ollama.schema import (
    Kind,
    OllamaChatRequest,
    OllamaCommon,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from bough.entrypoints.http.openai.chat import Handler, make_form, make_request
from bough.entrypoints.http.openai.fields import bad_field
from bough.entrypoints.http.openai.schema import ChatRequest
from bough.entrypoints.http.replies import LinesReply, client_of, json_reply, placed
from bough.entrypoints.service import Service
from bough.entrypoints.stream import Events

Json = dict[str, Any]

SPOKEN_VERSION = "0.12.6"
"""The version of Ollama whose API these routes speak; clients ask before they use what is newer."""


def chat(service: Service) -> Handler:
    """POST /api/chat."""
    server = service.config.server

    async def handle(request: HttpRequest) -> Response:
        body = await read_json(request, OllamaChatRequest, most=server.max_body_bytes, strict=server.strict_api)
        model = model_name(service.served, body.value.model)
        if not body.value.messages:
            return json_reply(loaded("chat", model, _reason(body.value)))
        return await _run(service, request, "chat", model, body, chat_of(body.value))

    return handle


def generate(service: Service) -> Handler:
    """POST /api/generate: one turn by the chat template, or (`raw`) the prompt as it is."""
    server = service.config.server

    async def handle(request: HttpRequest) -> Response:
        body = await read_json(request, OllamaGenerateRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        model = model_name(service.served, asked.model)
        if not asked.prompt:
            return json_reply(loaded("generate", model, _reason(asked)))
        prompt = None
        if asked.images:
            _check_plain(asked)
        elif asked.suffix:
            prompt = fill_in(service.served.fim, asked.prompt, asked.suffix)
        elif asked.raw or service.served.tokenizer is None or service.served.tokenizer.chat_template is None:
            prompt = asked.prompt
        return await _run(service, request, "generate", model, body, generate_of(asked), prompt=prompt)

    return handle


def _check_plain(asked: OllamaGenerateRequest) -> None:
    for name in ("suffix", "raw"):
        if getattr(asked, name):
            raise bad_field(f"{name} is sent with images", "images are placed by the chat template", name)


async def _run(
    service: Service,
    request: HttpRequest,
    kind: Kind,
    model: str,
    body: CheckedBody[Any],
    asked: ChatRequest,
    *,
    prompt: str | None = None,
) -> Response:
    """Answers; `prompt` stands in for the rendered messages."""
    if prompt is not None:
        asked.input_ids = (await service.encode([prompt], True))[0]
    job, offered = make_request(asked, service, raw=prompt is not None)
    room = "at_most" if job.room == "exact" else job.room  # num_predict may exceed the context with Ollama
    job = replace(placed(job, request), room=room)
    form = make_form(asked, job, offered, model, served=service.served, report_cache=True)
    answer = OllamaAnswer(kind, form, model)
    if asked.stream:
        return LinesReply(_lines(service, job, answer), body.headers(), failed=error_line)
    whole = await client_of(request).wait_for(_whole(service, job, answer))
    return json_reply(whole, headers=body.headers())


async def _whole(service: Service, job: Request, answer: OllamaAnswer) -> Json:
    (_, _, delta), *_ = await service.collect([job])
    return answer.whole(answer.add(delta))


async def _lines(service: Service, job: Request, answer: OllamaAnswer) -> Events:
    async with contextlib.aclosing(service.run([job])) as news:
        async for _, _, delta in news:
            objects = answer.add(delta)
            if objects:
                yield b"".join(map(line, objects))


def _reason(asked: OllamaCommon) -> str:
    return "unload" if asked.keep_alive in (0, "0", "0s") else "load"


# -- about models ---------------------------------------------------------------------------------


def tags(service: Service) -> Handler:
    """GET /api/tags."""

    async def handle(request: HttpRequest) -> Response:
        return json_reply({"models": [_card(service)]})

    return handle


def running(service: Service) -> Handler:
    """GET /api/ps: the served model is always loaded."""

    async def handle(request: HttpRequest) -> Response:
        card = _card(service)
        on_gpu = service.served.facts.get("device") == "cuda"
        return json_reply(
            {
                "models": [
                    {
                        **card,
                        "expires_at": "9999-12-31T23:59:59Z",
                        "size_vram": card["size"] if on_gpu else 0,
                        "context_length": service.served.context_length,
                    }
                ]
            }
        )

    return handle


def show(service: Service) -> Handler:
    """POST /api/show."""
    server = service.config.server

    async def handle(request: HttpRequest) -> Response:
        body = await read_json(request, OllamaShowRequest, most=server.max_body_bytes, strict=server.strict_api)
        given = body.value.model or body.value.name
        if not given:
            raise InvalidRequest(what="model is missing", why="it is required", fix="send model", param="model")
        model_name(service.served, given)
        served, card = service.served, _card(service)
        template = served.tokenizer.chat_template if served.tokenizer is not None else None
        family = card["details"]["family"]
        capabilities = ["completion"]
        if template is not None and (template.takes_tools or served.tool_parser):
            capabilities.append("tools")
        if "image" in (served.facts.get("media") or ()):
            capabilities.append("vision")
        if served.reasoning_parser:
            capabilities.append("thinking")
        if served.facts.get("pooling") is not None:
            capabilities = ["embedding"]
        return json_reply(
            {
                "modelfile": f"FROM {served.name}\n",
                "parameters": "\n".join(f"{name} {value}" for name, value in served.sampling_defaults.items()),
                "template": template.source if template is not None else "",
                "details": card["details"],
                "model_info": {
                    "general.architecture": family,
                    "general.basename": served.name,
                    "general.parameter_count": served.num_parameters or None,
                    f"{family}.context_length": served.context_length,
                    f"{family}.vocab_size": served.facts.get("vocab_size"),
                },
                "capabilities": capabilities,
                "modified_at": card["modified_at"],
            },
            headers=body.headers(),
        )

    return handle


def version(service: Service) -> Handler:
    """GET /api/version."""

    async def handle(request: HttpRequest) -> Response:
        return json_reply({"version": SPOKEN_VERSION})

    return handle


def _card(service: Service) -> Json:
    served, config = service.served, service.config
    family = str(served.facts.get("architecture", "")).removesuffix("ForCausalLM").lower() or "unknown"
    weights = next((row[1] for row in served.facts.get("memory", ()) if row[0] == "weights"), 0)
    kind = served.facts.get("dtype", config.model.dtype)
    return {
        "name": served.name,
        "model": served.name,
        "modified_at": datetime.fromtimestamp(served.created, UTC).isoformat().replace("+00:00", "Z"),
        "size": weights,
        "digest": hashlib.sha256(f"{served.name}\n{config.model.model}\n{config.model.revision}".encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": served.format,
            "family": family,
            "families": [family],
            "parameter_size": shown_size(served.num_parameters),
            "quantization_level": served.stored_as or kind,
        },
    }


def shown_size(num_parameters: int) -> str:
    """A model's size as Ollama writes it: 134.52M, 8.0B; empty where it is not known."""
    if num_parameters >= 1_000_000:
        billions = num_parameters >= 1_000_000_000
        number = num_parameters / (1e9 if billions else 1e6)
        digits = 0 if number.is_integer() else 1 if billions else 2
        return f"{number:.{digits}f}{'B' if billions else 'M'}"
    if num_parameters >= 1000:
        return f"{num_parameters / 1000:.0f}K"
    return str(num_parameters) if num_parameters else ""
