"""The application: one table of routes, from which it is mounted and its OpenAPI document is made."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bough.core.errors import BoughError
from bough.entrypoints.http import admin, batches, corpora, info, metrics, native, parsing, sessions
from bough.entrypoints.http.anthropic import batches as message_batches, routes as anthropic
from bough.entrypoints.http.anthropic.batches import MessageBatchRequest
from bough.entrypoints.http.anthropic.schema import CountTokensRequest, MessagesRequest
from bough.entrypoints.http.body import IGNORED_HEADER, Bodies
from bough.entrypoints.http.direct import Direct
from bough.entrypoints.http.dump import Dump, DumpFiles
from bough.entrypoints.http.errors import on_error
from bough.entrypoints.http.ollama import routes as ollama
from bough.entrypoints.http.ollama.schema import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
from bough.entrypoints.http.openai import audio, chat, completions, models
from bough.entrypoints.http.openai.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from bough.entrypoints.http.peers import PeerDoor
from bough.entrypoints.http.pooling.routes import ROUTES as POOLING_ROUTES
from bough.entrypoints.http.prefix import RootPath
from bough.entrypoints.http.replies import json_reply
from bough.entrypoints.http.responses import routes as responses
from bough.entrypoints.http.responses.schema import ResponsesRequest
from bough.entrypoints.http.security import OPEN_PATHS, App, HttpGuard, is_page
from bough.entrypoints.http.tracing import Tracing
from bough.entrypoints.http.ui import routes as ui
from bough.entrypoints.http.ui.landing import Landing
from bough.entrypoints.service import Service
from bough.entrypoints.stream import ClientGone

Make = Callable[[Service], chat.Handler]

VERSION: str = import_module("bough").__version__

_ERRORS: tuple[type[Exception], ...] = (Exception, BoughError, HTTPException, ClientGone)
"""Exceptions that `on_error` turns into a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSpec:
    """One route. `paths[0]` is its name, the others are aliases for clients that use them."""

    paths: tuple[str, ...]
    methods: tuple[str, ...]
    make: Make
    about: str
    body: type[msgspec.Struct] | None = None
    admin: bool = False
    get_changes: bool = False
    """A GET of it changes state: refused for browsers, because any web page can make them send one."""
    metrics: bool = False
    ui: bool = False


def _banner(service: Service) -> chat.Handler:
    async def handle(request: Request) -> Response:
        return json_reply({"name": "bough", "version": VERSION, "model": service.served.name, "docs": "/docs"})

    return handle


ROUTES: tuple[RouteSpec, ...] = (
    RouteSpec(
        paths=("/v1/chat/completions", "/invocations"), methods=("POST",), make=chat.chat_completions, body=ChatRequest,
        about="Answer a conversation.",
    ),
    RouteSpec(
        paths=("/v1/completions",), methods=("POST",), make=completions.completions, body=CompletionRequest,
        about="Continue a text.",
    ),
    RouteSpec(
        paths=("/v1/audio/transcriptions",), methods=("POST",), make=partial(audio.speech_to_text, "transcribe"),
        about="The text of a sound (multipart form).",
    ),
    RouteSpec(
        paths=("/v1/audio/translations",), methods=("POST",), make=partial(audio.speech_to_text, "translate"),
        about="The text of a sound, in English (multipart form).",
    ),
    RouteSpec(paths=("/v1/models",), methods=("GET",), make=models.list_models, about="List the served models."),
    RouteSpec(paths=("/v1/models/{model:path}",), methods=("GET",), make=models.get_model, about="One model."),
    RouteSpec(
        paths=("/generate",), methods=("POST", "PUT"), make=native.generate, body=native.GenerateRequest,
        about="Continue texts or token ids, in SGLang's JSON.",
    ),
    RouteSpec(
        paths=("/vertex_generate",), methods=("POST",), make=native.vertex_generate, body=native.VertexRequest,
        about="Continue texts or token ids, in the words of Vertex AI.",
    ),
    RouteSpec(
        paths=("/v1/responses",), methods=("POST",), make=responses.create, body=ResponsesRequest,
        about="Answer a conversation, in the words of OpenAI's Responses API.",
    ),
    RouteSpec(
        paths=("/v1/responses/input_tokens",), methods=("POST",), make=responses.input_tokens, body=ResponsesRequest,
        about="How many tokens the input of a response has.",
    ),
    RouteSpec(paths=("/v1/responses/{id}",), methods=("GET",), make=responses.retrieve, about="A stored response."),
    RouteSpec(paths=("/v1/responses/{id}",), methods=("DELETE",), make=responses.delete, about="Forget a response."),
    RouteSpec(
        paths=("/v1/responses/{id}/cancel",), methods=("POST",), make=responses.cancel, about="End a background response."
    ),
    RouteSpec(
        paths=("/v1/responses/{id}/input_items",), methods=("GET",), make=responses.list_input,
        about="What a response answers.",
    ),
    RouteSpec(paths=("/v1/files",), methods=("POST",), make=batches.upload_file, about="Upload a file for a batch."),
    RouteSpec(paths=("/v1/files",), methods=("GET",), make=batches.list_files, about="List the files."),
    RouteSpec(paths=("/v1/files/{id}",), methods=("GET",), make=batches.get_file, about="One file."),
    RouteSpec(paths=("/v1/files/{id}",), methods=("DELETE",), make=batches.delete_file, about="Delete a file."),
    RouteSpec(paths=("/v1/files/{id}/content",), methods=("GET",), make=batches.file_content, about="What a file holds."),
    RouteSpec(
        paths=("/v1/batches",), methods=("POST",), make=batches.create_batch, body=batches.BatchRequest,
        about="Answer a file of requests.",
    ),
    RouteSpec(paths=("/v1/batches",), methods=("GET",), make=batches.list_batches, about="List the batches."),
    RouteSpec(paths=("/v1/batches/{id}",), methods=("GET",), make=batches.get_batch, about="How far a batch has come."),
    RouteSpec(paths=("/v1/batches/{id}/cancel",), methods=("POST",), make=batches.cancel_batch, about="End a batch."),
    RouteSpec(
        paths=("/v1/messages",), methods=("POST",), make=anthropic.messages, body=MessagesRequest,
        about="Answer a conversation, in Anthropic's words.",
    ),
    RouteSpec(
        paths=("/v1/messages/count_tokens",), methods=("POST",), make=anthropic.count_tokens, body=CountTokensRequest,
        about="How many tokens a conversation has.",
    ),
    RouteSpec(
        paths=("/v1/messages/batches",), methods=("POST",), make=message_batches.create, body=MessageBatchRequest,
        about="Answer many conversations, in Anthropic's words.",
    ),
    RouteSpec(
        paths=("/v1/messages/batches",), methods=("GET",), make=message_batches.list_all, about="List Anthropic's batches."
    ),
    RouteSpec(
        paths=("/v1/messages/batches/{id}",), methods=("GET",), make=message_batches.retrieve,
        about="How far such a batch has come.",
    ),
    RouteSpec(
        paths=("/v1/messages/batches/{id}",), methods=("DELETE",), make=message_batches.delete,
        about="Forget such a batch.",
    ),
    RouteSpec(
        paths=("/v1/messages/batches/{id}/cancel",), methods=("POST",), make=message_batches.cancel,
        about="End such a batch.",
    ),
    RouteSpec(
        paths=("/v1/messages/batches/{id}/results",), methods=("GET",), make=message_batches.results,
        about="The answers of such a batch.",
    ),
    RouteSpec(
        paths=("/api/chat",), methods=("POST",), make=ollama.chat, body=OllamaChatRequest,
        about="Answer a conversation, in Ollama's words.",
    ),
    RouteSpec(
        paths=("/api/generate",), methods=("POST",), make=ollama.generate, body=OllamaGenerateRequest,
        about="Answer a prompt, in Ollama's words.",
    ),
    RouteSpec(
        paths=("/api/show",), methods=("POST",), make=ollama.show, body=OllamaShowRequest,
        about="The model, in Ollama's words.",
    ),
    RouteSpec(paths=("/api/tags",), methods=("GET",), make=ollama.tags, about="The models, in Ollama's words."),
    RouteSpec(paths=("/api/ps",), methods=("GET",), make=ollama.running, about="The loaded models, in Ollama's words."),
    RouteSpec(
        paths=("/api/version",), methods=("GET",), make=ollama.version, about="The version of Ollama's API spoken here."
    ),
    RouteSpec(
        paths=("/tokenize", "/v1/tokenize"), methods=("POST",), make=native.tokenize, body=TokenizeRequest,
        about="Token ids of a text or a conversation.",
    ),
    RouteSpec(
        paths=("/detokenize", "/v1/detokenize"), methods=("POST",), make=native.detokenize, body=DetokenizeRequest,
        about="The text of token ids.",
    ),
    RouteSpec(
        paths=("/parse_function_call",), methods=("POST",), make=parsing.parse_function_call, body=parsing.ParseCallRequest,
        about="The calls in a text.",
    ),
    RouteSpec(
        paths=("/separate_reasoning",), methods=("POST",), make=parsing.separate_reasoning,
        body=parsing.SeparateReasoningRequest, about="A text as its reasoning and its answer.",
    ),
    RouteSpec(
        paths=("/abort_request",), methods=("POST",), make=native.abort_request, body=native.AbortRequest,
        about="End a request by its id.",
    ),
    RouteSpec(
        paths=("/open_session",), methods=("POST",), make=sessions.open_session, body=sessions.OpenSessionRequest,
        about="Open a session, whose requests go on from one another.",
    ),
    RouteSpec(
        paths=("/close_session",), methods=("POST",), make=sessions.close_session, body=sessions.CloseSessionRequest,
        about="Close a session.",
    ),
    RouteSpec(
        paths=("/concate_and_append_request",), methods=("POST",), make=native.concate_and_append, body=native.JoinRequest,
        about="Line up the KV of branches as one context.",
    ),
    RouteSpec(
        paths=("/flush_cache",), methods=("GET", "POST"), make=native.flush_cache, get_changes=True,
        about="Empty the prefix cache.",
    ),
    RouteSpec(
        paths=("/server_info", "/get_server_info"), methods=("GET",), make=info.server_info,
        about="Settings, decisions, memory and the engine's numbers.",
    ),
    RouteSpec(
        paths=("/model_info", "/get_model_info"), methods=("GET",), make=info.model_info,
        about="The model: names, limits, parsers, marks around messages.",
    ),
    RouteSpec(paths=("/v1/loads",), methods=("GET",), make=info.loads, about="How busy the engine is."),
    RouteSpec(paths=("/get_load",), methods=("GET",), make=info.get_load, about="How busy the engine is, as a list."),
    RouteSpec(
        paths=("/tokenizer_info",), methods=("GET",), make=info.tokenizer_info,
        about="The tokenizer: its special tokens and its chat template.",
    ),
    RouteSpec(paths=("/livez",), methods=("GET",), make=info.live, about="200 while the engine lives."),
    RouteSpec(
        paths=("/readyz", "/health", "/health_generate", "/ready", "/ping"), methods=("GET",), make=info.ready,
        about="200 while requests are taken.",
    ),
    RouteSpec(paths=("/metrics",), methods=("GET",), make=metrics.metrics, about="Numbers for Prometheus.", metrics=True),
    *(RouteSpec(**each._asdict()) for each in POOLING_ROUTES),
    RouteSpec(paths=("/",), methods=("GET", "HEAD"), make=_banner, about="Name and version."),
    RouteSpec(
        paths=(ui.STATE_PATH,), methods=("GET",), make=ui.state, ui=True, about="The tree and the batch, in numbers."
    ),
    RouteSpec(
        paths=("/ui", "/ui/", "/ui/{file:path}"), methods=("GET", "HEAD"), make=ui.page, ui=True, about="The playground."
    ),
    RouteSpec(paths=("/docs",), methods=("GET", "HEAD"), make=ui.reference, ui=True, about="The routes, for people."),
    RouteSpec(
        paths=("/pause_generation",), methods=("POST",), make=admin.pause, body=admin.PauseRequest, admin=True,
        about="Stop computing until /continue_generation.",
    ),
    RouteSpec(
        paths=("/continue_generation",), methods=("POST",), make=admin.resume, admin=True, about="Go on after a pause."
    ),
    RouteSpec(
        paths=("/configure_logging",), methods=("POST",), make=admin.configure_logging, body=admin.LoggingRequest,
        admin=True, about="Change what is logged.",
    ),
    RouteSpec(
        paths=("/set_internal_state",), methods=("POST", "PUT"), make=admin.set_internal_state, body=admin.StateRequest,
        admin=True, about="Change a setting while the server runs.",
    ),
    RouteSpec(
        paths=("/start_profile",), methods=("POST",), make=admin.start_profile, body=admin.ProfileRequest, admin=True,
        about="Record the engine's steps with the torch profiler.",
    ),
    RouteSpec(
        paths=("/add_external_corpus",), methods=("POST",), make=corpora.add_corpus, body=corpora.AddCorpusRequest,
        admin=True, about="Add texts that n-gram drafts are looked up in.",
    ),
    RouteSpec(
        paths=("/remove_external_corpus",), methods=("POST",), make=corpora.remove_corpus,
        body=corpora.RemoveCorpusRequest, admin=True, about="Remove such texts.",
    ),
    RouteSpec(
        paths=("/list_external_corpora",), methods=("GET",), make=corpora.list_corpora, admin=True,
        about="Such texts, and how many tokens they have.",
    ),
    RouteSpec(
        paths=("/start_expert_distribution_record",), methods=("GET", "POST"), make=partial(admin.record_experts, "start"),
        admin=True, about="Begin to count tokens by expert.",
    ),
    RouteSpec(
        paths=("/stop_expert_distribution_record",), methods=("GET", "POST"), make=partial(admin.record_experts, "stop"),
        admin=True, about="End the count.",
    ),
    RouteSpec(
        paths=("/dump_expert_distribution_record",), methods=("GET", "POST"), make=partial(admin.record_experts, "dump"),
        admin=True, about="Tokens by layer and expert, as --init-expert-location takes them.",
    ),
    RouteSpec(
        paths=("/stop_profile",), methods=("POST",), make=admin.stop_profile, admin=True, about="End the recording."
    ),
)  # fmt: skip


def mounted(service: Service) -> list[RouteSpec]:
    """The routes of this server: no admin routes without an admin key, no /metrics under --no-metrics, no /ui under
    --no-ui."""
    config = service.config
    return [
        spec
        for spec in ROUTES
        if (not spec.admin or config.server.admin_api_key or config.server.admin_with_api_key)
        and (not spec.metrics or config.log.metrics)
        and (not spec.ui or config.server.ui)
    ]


def known_paths() -> list[str]:
    """Paths that are counted one by one; those with parameters are not."""
    return [path for spec in ROUTES for path in spec.paths if "{" not in path and path not in OPEN_PATHS]


def handlers(service: Service) -> dict[str, chat.Handler]:
    """The handlers of POST routes by path, for callers without HTTP."""
    return {path: spec.make(service) for spec in mounted(service) if "POST" in spec.methods for path in spec.paths}


def make_app(service: Service) -> App:
    """The ASGI application, keys and limits included. From now on requests are counted."""
    service.start_counting()
    specs = mounted(service)
    routes: list[Route] = []
    direct: dict[tuple[str, str], chat.Handler] = {}
    for spec in specs:
        handler = spec.make(service)
        direct.update({(method, path): handler for path in spec.paths for method in spec.methods if "{" not in path})
        routes += [Route(path, handler, methods=list(spec.methods)) for path in spec.paths]
    # Made for the first client that asks for it: it takes as long as everything else here.
    document = functools.cache(functools.partial(openapi, specs, service.config.server.root_path))

    async def describe(_: Request) -> Response:
        return json_reply(document())

    routes.append(Route("/openapi.json", describe))
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(_ERRORS, on_error))
    origins = service.config.server.cors_origins
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", IGNORED_HEADER],
        )  # fmt: skip
    admin_paths = frozenset(path for spec in ROUTES if spec.admin for path in spec.paths)
    inner: App = Tracing(app if origins else Direct(app, direct), service.telemetry.exporter)
    if service.config.log.dump_dir:
        log = service.config.log
        files = DumpFiles(Path(log.dump_dir).expanduser(), "api", media=log.dump_media)
        inner = Dump(inner, files)
        service.at_close(lambda: asyncio.to_thread(files.close))
    server = service.config.server
    bodies = Bodies(max(server.max_body_bytes, server.max_body_bytes_in_flight))
    guarded = HttpGuard(
        inner, server, service.keyring, bodies, admin_paths, service.telemetry.responded,
        changing_gets=frozenset(path for spec in ROUTES if spec.get_changes for path in spec.paths),
    )  # fmt: skip
    outer: App = Landing(guarded) if server.ui else guarded
    prefix = server.root_path.rstrip("/")
    return RootPath(outer, prefix) if prefix else outer


def make_peer_app(service: Service) -> App:
    """The ASGI application for the other API workers: routes to which they forward requests, and routes for their own
    queries."""
    passed_on = [
        Route(path, spec.make(service), methods=list(spec.methods))
        for spec in mounted(service)
        for path in spec.paths
        if path in ("/generate", "/open_session", "/close_session") or path.startswith("/v1/responses/")
    ]
    asked_for = [
        Route("/peer/conversations/{id}", responses.kept_conversation(service)),
        Route("/peer/items/{id}", responses.kept_item(service)),
    ]
    app = Starlette(routes=[*passed_on, *asked_for], exception_handlers=dict.fromkeys(_ERRORS, on_error))
    return PeerDoor(app)


def openapi(specs: list[RouteSpec], root_path: str = "") -> dict[str, Any]:
    """The OpenAPI document of the routes, which a proxy serves under `root_path`."""
    bodies = [spec.body for spec in specs if spec.body is not None]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    by_body = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, Any] = {}
    for spec in specs:
        for path in spec.paths:
            operations: dict[str, Any] = {}
            for method in spec.methods:
                operations[method.lower()] = _operation(spec, path, by_body)
            paths.setdefault(path.replace(":path}", "}"), {}).update(operations)
    return {
        "openapi": "3.1.0",
        "info": {"title": "bough", "version": VERSION},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(spec: RouteSpec, path: str, by_body: Mapping[type[msgspec.Struct], Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": spec.about,
        "responses": {"200": {"description": "OK"}, "4XX": {"description": "an error: {error: {message, type, ...}}"}},
    }
    if spec.paths[0] not in OPEN_PATHS and not is_page(spec.paths[0]):
        operation["security"] = [{"key": []}]
    if spec.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": by_body[spec.body]}},
        }
    names = re.findall(r"{(\w+)", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation
