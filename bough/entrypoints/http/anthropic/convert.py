"""Translates Anthropic's body to a chat request: content blocks become messages, tools and tool choices are renamed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from bough.core import bounds
from bough.core.errors import InvalidRequest
from bough.entrypoints.http.anthropic.schema import CountTokensRequest, Json, MessagesRequest
from bough.entrypoints.http.openai.fields import bad_field, bad_role
from bough.entrypoints.http.openai.parts import content_of, is_text, joined, media_url_part, text_part
from bough.entrypoints.http.openai.schema import ChatRequest, FunctionDefinition, NamedFunction, NamedTool, Tool

_encode = msgspec.json.Encoder().encode
_TEXTLESS = {"image": "images", "document": "documents", "container_upload": "uploads"}
_IMAGES_WHERE = "only a user's turn and results of tools have images"

_CUSTOM = (None, "custom")
_DATED = re.compile(r"[a-z_]+_20\d{6}")
"""Types of the tools that Anthropic's service runs, or that its models know without a schema: they end with a date."""

Choice = Literal["none", "auto", "required"] | NamedTool


def chat_request(asked: CountTokensRequest) -> ChatRequest:
    """The same request in OpenAI's format. Raises `InvalidRequest` naming the first invalid block, tool or option."""
    for name, why in (("mcp_servers", "this server calls no tools"), ("container", "this server runs no code")):
        if getattr(asked, name) is not None:
            raise InvalidRequest(what=f"{name} is not supported", why=why, fix="leave it out", param=name)
    messages = _messages(asked)
    choice, parallel = _tool_choice(asked.tool_choice)
    thinking, budget = _thinking(asked.thinking)
    form, effort = _output(asked)
    chat = ChatRequest(
        messages=messages,
        tools=_tools(asked.tools) or None if asked.tools else None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        thinking=thinking,
        thinking_budget=budget,
        response_format=form,
        reasoning_effort=effort,
        continue_final_message=_is_prefill(messages[-1]) or None,
    )
    if isinstance(asked, MessagesRequest):
        chat.model = asked.model
        chat.max_completion_tokens = asked.max_tokens
        chat.stream = asked.stream
        chat.stop = asked.stop_sequences
        chat.temperature = asked.temperature
        chat.top_p = asked.top_p
        chat.top_k = asked.top_k or None
        chat.rid, chat.priority = asked.rid, asked.priority
        chat.cache_salt, chat.extra_key = asked.cache_salt, asked.extra_key
    return chat


def _is_prefill(last: Json) -> bool:
    """Whether the last message is the given beginning of the answer (a prefill), which the model continues."""
    return last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last


# -- messages -------------------------------------------------------------------------------------


def _messages(asked: CountTokensRequest) -> list[Json]:
    if not asked.messages:
        raise bad_field("messages is empty", "there is nothing to answer", "messages")
    bounds.count("messages", asked.messages, "messages")
    made: list[Json] = []
    if asked.system:
        made.append({"role": "system", "content": _text_of(asked.system, "system")})
    for at, message in enumerate(asked.messages):
        where = f"messages[{at}]"
        match message.get("role"):
            case "user":
                made += _user(message.get("content"), where)
            case "assistant":
                made.append(_assistant(message.get("content"), where))
            case "system":
                made.append({"role": "system", "content": _text_of(message.get("content"), f"{where}.content")})
            case other:
                raise bad_role(where, other, "roles are user and assistant")
    return _joined(made)


def _joined(messages: Sequence[Json]) -> list[Json]:
    """Merges consecutive messages of one role: Anthropic allows them, chat templates often do not."""
    made: list[Json] = []
    for message in messages:
        plain = set(message) == {"role", "content"} and message["role"] in ("user", "assistant", "system")
        if plain and made and set(made[-1]) == {"role", "content"} and made[-1]["role"] == message["role"]:
            made[-1] = {**made[-1], "content": joined(made[-1]["content"], message["content"])}
        else:
            made.append(message)
    return made


def _blocks(content: object, where: str) -> list[Json]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise bad_field(f"{where} is neither text nor a list of blocks", "content is one of these", where)
    bounds.count("content_parts", content, where)
    return content


def _text_of(content: object, where: str) -> str:
    return "\n".join(_text(block, f"{where}[{at}]") for at, block in enumerate(_blocks(content, where)))


def _text(block: Json, where: str) -> str:
    kind = block.get("type")
    if kind == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    if kind == "document":
        source = block.get("source")
        if isinstance(source, dict) and source.get("type") == "text" and isinstance(source.get("data"), str):
            return str(source["data"])
    if kind in _TEXTLESS:
        raise InvalidRequest(
            what=f"{where} is of type {kind}",
            why=_IMAGES_WHERE if kind == "image" else f"this server reads text only, no {_TEXTLESS[kind]}",
            fix="send text blocks",
            param=where,
        )
    if kind == "text":
        raise bad_field(f"{where}.text is no text", "it must be a string", f"{where}.text")
    raise bad_field(f"{where}.type is {str(kind)[:50]!r}", "this kind of block has no place here", f"{where}.type")


def _user(content: object, where: str) -> list[Json]:
    """A user message: tool results first, as Anthropic requires, then the user's content."""
    made: list[Json] = []
    parts: list[Json] = []
    for at, block in enumerate(_blocks(content, f"{where}.content")):
        place = f"{where}.content[{at}]"
        if block.get("type") == "tool_result":
            result, images = _tool_result(block, place)
            made.append(result)
            parts += images
        else:
            parts.append(_part(block, place))
    if parts or not made:
        made.append({"role": "user", "content": content_of(parts)})
    return made


def _part(block: Json, where: str) -> Json:
    return _image(block, where) if block.get("type") == "image" else text_part(_text(block, where))


def _image(block: Json, where: str) -> Json:
    """An image by its URL, or by its bytes in base64."""
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    match source.get("type"):
        case "base64" if isinstance(source.get("data"), str) and isinstance(source.get("media_type"), str):
            url = f"data:{source['media_type'][:100]};base64,{source['data']}"
        case "url" if isinstance(source.get("url"), str):
            url = source["url"]
        case _:
            raise bad_field(
                f"{where}.source names no image",
                "it must be of type base64 (media_type, data) or url (url); uploaded files are not kept",
                f"{where}.source",
            )
    return media_url_part("image", url, f"{where}.source")


def _tool_result(block: Json, where: str) -> tuple[Json, list[Json]]:
    """The tool result as text, and its images, which are moved to the user message, because few templates accept images
    from a tool."""
    call = block.get("tool_use_id")
    if not isinstance(call, str):
        raise bad_field(f"{where}.tool_use_id is missing", "a result names its call", f"{where}.tool_use_id")
    given = block.get("content")
    blocks = [] if given is None else _blocks(given, f"{where}.content")
    parts = [_part(each, f"{where}.content[{at}]") for at, each in enumerate(blocks)]
    text = "\n".join(part["text"] for part in parts if is_text(part))
    made = {"role": "tool", "tool_call_id": call, "content": f"Error: {text}" if block.get("is_error") else text}
    return made, [part for part in parts if not is_text(part)]


def _assistant(content: object, where: str) -> Json:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for at, block in enumerate(_blocks(content, f"{where}.content")):
        place = f"{where}.content[{at}]"
        match block.get("type"):
            case "tool_use":
                calls.append(_tool_use(block, place))
            case "thinking":
                if not isinstance(block.get("thinking"), str):
                    raise bad_field(f"{place}.thinking is no text", "it must be a string", f"{place}.thinking")
                thoughts.append(block["thinking"])
            case "redacted_thinking":
                pass  # only its producer can read it
            case _:
                texts.append(_text(block, place))
    made: Json = {"role": "assistant", "content": "".join(texts) or None}
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    elif made["content"] is None:
        made["content"] = ""
    return made


def _tool_use(block: Json, where: str) -> Json:
    name, call, given = block.get("name"), block.get("id"), block.get("input", {})
    if not isinstance(name, str) or not isinstance(call, str) or not isinstance(given, dict):
        raise bad_field(f"{where} is no call", "a call has an id, a name and an input object", where)
    return {"id": call, "type": "function", "function": {"name": name, "arguments": _encode(given).decode()}}


# -- tools and options ----------------------------------------------------------------------------


def hosted_tools(asked: CountTokensRequest, *, strict: bool) -> tuple[str, ...]:
    """The tools that Anthropic's service runs itself (`web_search_20250305`, ...), as the header names them: they don't
    exist here and are left out. `strict`: they are refused. Raises `InvalidRequest`."""
    left_out: list[str] = []
    for at, tool in enumerate(asked.tools or ()):
        kind = tool.get("type")
        if kind in _CUSTOM:
            continue
        if strict or not isinstance(kind, str) or not _DATED.fullmatch(kind):
            raise InvalidRequest(
                what=f"tools[{at}].type is {str(kind)[:50]!r}",
                why="this server has no tools of its own",
                fix="send tools with a name and an input_schema",
                param=f"tools[{at}].type",
            )
        left_out.append(f"tools[{at}]:{kind}")
    return tuple(left_out)


def _tools(tools: Sequence[Json]) -> list[Tool]:
    bounds.count("tools", tools, "tools")
    made: list[Tool] = []
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        if tool.get("type") not in _CUSTOM:
            continue
        name, about, schema = tool.get("name"), tool.get("description"), tool.get("input_schema")
        if not isinstance(name, str):
            raise bad_field(f"{where}.name is missing", "a tool has a name", f"{where}.name")
        if not isinstance(schema, dict) or not isinstance(about, str | None):
            raise bad_field(f"{where}.input_schema is missing", "a tool says what it takes", f"{where}.input_schema")
        strict = tool.get("strict") is True
        made.append(Tool(function=FunctionDefinition(name=name, description=about, parameters=schema, strict=strict)))
    return made


def _tool_choice(choice: Json | None) -> tuple[Choice | None, bool | None]:
    """`tool_choice` and `parallel_tool_calls` in OpenAI's format."""
    if choice is None:
        return None, None
    parallel = False if choice.get("disable_parallel_tool_use") is True else None
    match choice.get("type"):
        case "auto":
            return "auto", parallel
        case "any":
            return "required", parallel
        case "none":
            return "none", None
        case "tool" if isinstance(choice.get("name"), str):
            return NamedTool(function=NamedFunction(name=choice["name"])), parallel
        case other:
            raise bad_field(
                f"tool_choice.type is {str(other)[:50]!r}",
                "it must be auto, any, none, or tool with a name",
                "tool_choice",
            )


def _thinking(thinking: Json | None) -> tuple[bool, int | None]:
    """Whether reasoning is enabled, and its token budget. Without the field it is disabled, as with Anthropic."""
    if thinking is None:
        return False, None
    match thinking.get("type"):
        case "disabled":
            return False, None
        case "adaptive":
            return True, None
        case "enabled":
            budget = thinking.get("budget_tokens")
            if budget is None:
                return True, None
            if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
                return True, budget
            raise bad_field(
                "thinking.budget_tokens is not a number of tokens", "it must be positive", "thinking.budget_tokens"
            )
        case other:
            raise bad_field(
                f"thinking.type is {str(other)[:50]!r}", "it must be enabled, adaptive or disabled", "thinking.type"
            )


def _output(asked: CountTokensRequest) -> tuple[Json | None, Any]:
    """The answer's format and the effort, from `output_config` (or `output_format`, its older name)."""
    config = asked.output_config or {}
    form = config.get("format") or asked.output_format
    effort = config.get("effort")
    if effort not in (None, "low", "medium", "high", "xhigh", "max"):
        raise bad_field(
            f"output_config.effort is {str(effort)[:50]!r}", "it must be low to max", "output_config.effort"
        )
    if form is None:
        return None, effort
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise bad_field(
            "output_config.format is not known", "it must be of type json_schema with a schema", "output_config.format"
        )
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}, effort
