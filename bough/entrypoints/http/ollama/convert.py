"""Ollama's bodies as chat requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bough.core import bounds
from bough.core.errors import InvalidRequest, ModelNotFound
from bough.engine_client.media_fields import with_scheme
from bough.entrypoints.http.ollama.schema import Json, OllamaChatRequest, OllamaCommon, OllamaGenerateRequest
from bough.entrypoints.http.openai.fields import bad_field, served_name
from bough.entrypoints.http.openai.parts import content_of, media_url_part, text_part
from bough.entrypoints.http.openai.schema import ChatRequest, FunctionDefinition, Tool
from bough.entrypoints.served_model import ServedModel

_encode = msgspec.json.Encoder().encode
_TAG = ":latest"
_SAME = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")


def model_name(served: ServedModel, given: str) -> str:
    """The name to answer with. Ollama's clients add `:latest` to names without a tag."""
    try:
        served_name(served, given)
    except ModelNotFound:
        if not given.endswith(_TAG):
            raise
        served_name(served, given.removesuffix(_TAG))
    return given


def chat_of(asked: OllamaChatRequest) -> ChatRequest:
    """/api/chat as a chat request. Raises `InvalidRequest`."""
    messages = [_message(message, f"messages[{at}]") for at, message in enumerate(asked.messages or ())]
    _number_calls(messages)
    return _with_options(ChatRequest(messages=messages, tools=_tools(asked.tools or ())), asked)


def generate_of(asked: OllamaGenerateRequest) -> ChatRequest:
    """/api/generate as a chat request of one turn. Raises `InvalidRequest`."""
    for name, why in (
        ("template", "templates from requests are not run"),
        ("context", "it is kept in the prefix cache instead"),
    ):
        if getattr(asked, name):
            raise InvalidRequest(what=f"{name} is not supported", why=why, fix="leave it out", param=name)
    messages: list[Json] = [{"role": "system", "content": asked.system}] if asked.system else []
    messages.append({"role": "user", "content": _content(asked.prompt or "", asked.images, "images")})
    return _with_options(ChatRequest(messages=messages), asked)


def _content(text: str, images: object, where: str) -> str | list[Json]:
    """Images (base64, or URLs) come before the text, as Ollama has them."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise bad_field(f"{where} is no list of base64 texts", "each image is one", where)
    bounds.count("content_parts", images, where)
    parts = [media_url_part("image", with_scheme(each), f"{where}[{at}]") for at, each in enumerate(images)]
    return content_of([*parts, text_part(text)])


def _with_options(chat: ChatRequest, asked: OllamaCommon) -> ChatRequest:
    chat.model = asked.model.removesuffix(_TAG)
    chat.stream = asked.stream is not False
    chat.response_format = _format(asked.format)
    chat.logprobs, chat.top_logprobs = asked.logprobs, asked.top_logprobs if asked.logprobs else None
    if isinstance(asked.think, str):
        chat.thinking, chat.reasoning_effort = True, asked.think
    else:
        chat.thinking = asked.think
    options = asked.options
    if options is None:
        return chat
    for name in _SAME:
        setattr(chat, name, getattr(options, name))
    chat.top_k = options.top_k or None  # 0 means all, as leaving it out does
    chat.repetition_penalty = options.repeat_penalty
    if options.seed is not None and options.seed < 0:
        chat.seed = None  # -1 means: any
    if options.num_predict is not None and options.num_predict > 0:
        chat.max_completion_tokens = options.num_predict  # -1 and -2 mean: as much as there is room for
    return chat


def _format(given: str | Json | None) -> Json | None:
    if given is None or given == "":
        return None
    if given == "json":
        return {"type": "json_object"}
    if isinstance(given, dict):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given}}
    raise bad_field(f"format is {str(given)[:50]!r}", 'it must be "json" or a schema', "format")


def _message(message: Json, where: str) -> Json:
    said = _content(message.get("content") or "", message.get("images"), f"{where}.images")
    made: Json = {"role": message.get("role"), "content": said}
    if message.get("thinking"):
        made["reasoning_content"] = message["thinking"]
    if message.get("tool_calls"):
        made["tool_calls"] = _calls(message["tool_calls"], where)
    if message.get("tool_name") is not None:
        made["name"] = message["tool_name"]
    return made


def _calls(calls: object, where: str) -> list[Json]:
    if not isinstance(calls, list):
        raise bad_field(f"{where}.tool_calls is no list", "it must be a list of calls", f"{where}.tool_calls")
    made: list[Json] = []
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            place = f"{where}.tool_calls[{at}]"
            raise bad_field(f"{place}.function.name is missing", "a call names its function", place)
        given = function.get("arguments", {})
        text = given if isinstance(given, str) else _encode(given).decode()
        made.append({"type": "function", "function": {"name": function["name"], "arguments": text}})
    return made


def _number_calls(messages: Sequence[Json]) -> None:
    """Calls have no ids with Ollama: results follow in the order of the calls."""
    made = answered = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = f"call_{made}"
            made += 1
        if message["role"] == "tool":
            message["tool_call_id"] = f"call_{answered}"
            answered += 1


def _tools(tools: Sequence[Json]) -> list[Tool] | None:
    bounds.count("tools", tools, "tools")
    made: list[Tool] = []
    for at, tool in enumerate(tools):
        given: Any = tool.get("function")
        try:
            function = msgspec.convert(given, FunctionDefinition)
        except msgspec.ValidationError as error:
            raise bad_field(
                f"tools[{at}].function is wrong", str(error).replace("`", ""), f"tools[{at}].function"
            ) from error
        made.append(Tool(function=function))
    return made or None
