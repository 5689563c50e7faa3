"""A Responses body as a chat request: items become messages, flat tools become nested ones."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Callable, Sequence

from bough.core import bounds
from bough.core.errors import InvalidRequest
from bough.entrypoints.http.openai.fields import bad_field, bad_role
from bough.entrypoints.http.openai.parts import content_of, is_text, media_url_part, text_part
from bough.entrypoints.http.openai.schema import ChatRequest
from bough.entrypoints.http.responses.schema import Json, ResponsesRequest
from bough.entrypoints.http.responses.tools import OfferedTools, as_arguments, tool_choice

LOGPROBS = "message.output_text.logprobs"

_SAME = (
    "stream", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "seed", "stop", "ignore_eos", "parallel_tool_calls", "chat_template_kwargs", "rid", "priority", "cache_salt",
    "extra_key", "model",
)  # fmt: skip
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def chat_request(asked: ResponsesRequest, items: Sequence[Json], offered: OfferedTools) -> ChatRequest:
    """The request in the chat route's format. `items`: the whole conversation. Raises `InvalidRequest`."""
    _refuse(asked)
    messages = messages_of(items, offered)
    if asked.instructions:
        messages.insert(0, {"role": "system", "content": asked.instructions})
    choice, allowed = tool_choice(asked.tool_choice, offered)
    tools = [tool for tool in offered.functions if allowed is None or tool.function.name in allowed]
    chat = ChatRequest(
        messages=messages,
        max_completion_tokens=asked.max_output_tokens,
        tools=tools or None,
        tool_choice=choice,
        response_format=_format(asked),
        reasoning_effort=asked.reasoning.effort if asked.reasoning is not None else None,
        **{name: getattr(asked, name) for name in _SAME},
    )
    if asked.top_logprobs or LOGPROBS in (asked.include or ()):
        chat.logprobs, chat.top_logprobs = True, asked.top_logprobs or 0
    return chat


def input_items(given: str | Sequence[Json], lookup: Callable[[str], Json | None]) -> list[Json]:
    """The new items of a request; references are replaced by what they stand for (`lookup` finds stored items)."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    bounds.count("messages", given, "input")
    items: list[Json] = []
    for at, item in enumerate(given):
        if item.get("type") == "item_reference":
            found = lookup(str(item.get("id", "")))
            if found is None:
                raise bad_field(
                    f"input[{at}] refers to an item that is not stored", "it has expired, or never was", "input"
                )
            items.append(found)
        else:
            items.append(item)
    return items


def messages_of(items: Sequence[Json], offered: OfferedTools) -> list[Json]:
    """Chat messages of a conversation's items: reasoning and calls go into the assistant's message they belong to."""
    made: list[Json] = []
    thoughts: list[str] = []

    def assistant() -> Json:
        """The assistant's message that is being put together."""
        if not made or made[-1]["role"] != "assistant" or thoughts:
            made.append({"role": "assistant", "content": None})
        if thoughts:
            made[-1]["reasoning_content"] = "\n".join(thoughts)
            thoughts.clear()
        return made[-1]

    for at, item in enumerate(items):
        where = f"input[{at}]"
        match item.get("type", "message"):
            case "message":
                _add_message(item, where, made, assistant)
            case "function_call" | "custom_tool_call":
                assistant().setdefault("tool_calls", []).append(_call(item, where, offered))
            case "function_call_output" | "custom_tool_call_output":
                made += _call_output(item, where)
            case "reasoning":
                thoughts += _thoughts(item, where)
            case "additional_tools":
                pass  # `all_tools` has them
            case other:
                raise InvalidRequest(
                    what=f"{where} is of type {str(other)[:50]!r}",
                    why="items are messages, calls of functions and custom tools, their outputs, and reasoning",
                    fix="leave it out",
                    param=f"{where}.type",
                )
    if thoughts:
        assistant()
    if not made:
        raise bad_field("input is empty", "there is nothing to answer", "input")
    return made


def _add_message(item: Json, where: str, made: list[Json], assistant: Callable[[], Json]) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise bad_role(where, role, f"roles are {', '.join(_ROLES)}")
    parts = _parts(item.get("content"), f"{where}.content")
    if role != "assistant":
        made.append({"role": role, "content": content_of(parts)})
        return
    text, message = _only_text(parts, where), assistant()
    message["content"] = text if message["content"] is None else f"{message['content']}\n\n{text}"


def _only_text(parts: Sequence[Json], where: str) -> str:
    if not all(map(is_text, parts)):
        raise bad_field(f"{where} has media", "answers of the model are text", f"{where}.content")
    return "\n".join(part["text"] for part in parts)


def _parts(content: object, where: str) -> list[Json]:
    """The content of a message as parts of the chat route."""
    if isinstance(content, str):
        return [text_part(content)]
    if not isinstance(content, list):
        raise bad_field(f"{where} is neither text nor a list of parts", "content is one of these", where)
    bounds.count("content_parts", content, where)
    made: list[Json] = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_image", "input_file", "input_audio", "video_url"):
            made.append(_media(part, f"{where}[{at}]"))
            continue
        field = _TEXTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise InvalidRequest(
                what=f"{where}[{at}] has the type {str(kind)[:50]!r}",
                why="parts are input_text, input_image, input_file and input_audio",
                fix="send one of these",
                param=f"{where}[{at}].type",
            )
        if not isinstance(part.get(field), str):
            raise bad_field(f"{where}[{at}].{field} is no text", "it must be a string", f"{where}[{at}].{field}")
        made.append(text_part(part[field]))
    return made


def _media(part: Json, where: str) -> Json:
    """Images, sounds, and files that are media or text."""
    match part["type"]:
        case "input_image" if isinstance(part.get("image_url"), str):
            return media_url_part("image", part["image_url"], f"{where}.image_url", detail=part.get("detail") or "auto")
        case "input_audio" | "video_url":
            return part
        case "input_file" if isinstance(part.get("file_data"), str) or isinstance(part.get("file_url"), str):
            return _file(part, where)
    raise InvalidRequest(
        what=f"{where} names no {part['type'].removeprefix('input_')}",
        why="uploaded files (file_id) are not kept for requests",
        fix="send its URL, or its bytes as a data: URL",
        param=where,
    )


def _file(part: Json, where: str) -> Json:
    """The part of a file, by the media type of its data: URL or its name."""
    url = str(part.get("file_data") or part.get("file_url"))
    head = url[5:100].partition(";")[0].partition(",")[0] if url.startswith("data:") else None
    kind = head or mimetypes.guess_type(str(part.get("filename") or url)[:300])[0] or ""
    family = kind.partition("/")[0]
    if family in ("image", "video", "audio"):
        if not url.startswith(("data:", "http:", "https:", "file:")):
            url = f"data:{kind};base64,{url}"
        return media_url_part(family, url, where)
    if family == "text" and part.get("file_data"):
        try:
            return text_part(base64.b64decode(url.partition(",")[2] if head else url, validate=True).decode())
        except ValueError as error:
            raise bad_field(f"{where}.file_data is no text in base64", "its type says so", where) from error
    raise InvalidRequest(
        what=f"{where} is a file of type {kind[:50]!r}",
        why="files are images, videos, sounds, and text in file_data",
        fix="send the document's text, or images of its pages",
        param=where,
    )


def _call(item: Json, where: str, offered: OfferedTools) -> Json:
    is_custom = item["type"] == "custom_tool_call"
    call, name, arguments = item.get("call_id"), offered.named(item), item.get("input" if is_custom else "arguments")
    if not isinstance(call, str) or name is None or not isinstance(arguments, str):
        what = "a call_id, a name, and input as text" if is_custom else "a call_id, a name and arguments as JSON text"
        raise bad_field(f"{where} is no call", f"a call has {what}", where)
    if is_custom:
        arguments = as_arguments(arguments)
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def _call_output(item: Json, where: str) -> list[Json]:
    """The output as text, and its media as a user message, because few templates accept media from a tool."""
    call = item.get("call_id")
    if not isinstance(call, str):
        raise bad_field(f"{where}.call_id is missing", "an output names its call", f"{where}.call_id")
    parts = _parts(item.get("output"), f"{where}.output")
    text = "\n".join(part["text"] for part in parts if is_text(part))
    made: list[Json] = [{"role": "tool", "tool_call_id": call, "content": text}]
    media = [part for part in parts if not is_text(part)]
    return [*made, {"role": "user", "content": media}] if media else made


def _thoughts(item: Json, where: str) -> list[str]:
    content = item.get("content") or []
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise bad_field(f"{where}.content is no list of parts", "reasoning consists of parts", f"{where}.content")
    return [each["text"] for each in content if isinstance(each.get("text"), str)]


# -- tools and options ----------------------------------------------------------------------------


def _refuse(asked: ResponsesRequest) -> None:
    for name, why, fix in (
        ("conversation", "this server keeps responses, no conversations", "send previous_response_id"),
        ("prompt", "this server keeps no prompts", "send instructions and input"),
    ):
        if getattr(asked, name) is not None:
            raise InvalidRequest(what=f"{name} is not supported", why=why, fix=fix, param=name)


def _format(asked: ResponsesRequest) -> Json | None:
    given = asked.text.format if asked.text is not None else None
    if given is None:
        return None
    if given.get("type") == "json_schema":
        if not isinstance(given.get("schema", given.get("schema_")), dict):
            raise InvalidRequest(
                what="text.format.schema is missing or no object",
                why="it says what the answer looks like",
                fix='send {"type": "json_schema", "name": ..., "schema": {...}}',
                param="text.format",
            )
        wrapped = {name: value for name, value in given.items() if name != "type"}
        return {"type": "json_schema", "json_schema": wrapped}
    return given
