"""Chat messages: checked one by one, and brought into the form that templates expect."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from bough.core import bounds
from bough.core.errors import InvalidRequest
from bough.engine_client.media_fields import PARTS, WHERE, media_part
from bough.entrypoints.http.openai.fields import bad_field, bad_role
from bough.multimodal.desk import MediaInput

Json = dict[str, Any]

_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class Checked(NamedTuple):
    """Messages in the form that templates expect, and their media in order."""

    messages: list[Json]
    media: tuple[MediaInput, ...]


def check_messages(
    messages: Sequence[Json], kinds: Collection[str] = (), options: Mapping[str, Any] | None = None
) -> Checked:
    """Checks messages; raises `InvalidRequest` naming the first that is wrong. `developer` becomes `system`. `kinds`: the
    media that the model takes; `options`: settings of the processor for all of them."""
    if not messages:
        raise InvalidRequest(
            what="messages is empty",
            why="there is nothing to answer",
            fix="send at least one message",
            param="messages",
        )
    bounds.count("messages", messages, "messages")
    checker = _Checker(kinds, options or {})
    checked = [checker.message(message, f"messages[{at}]") for at, message in enumerate(messages)]
    return Checked(checked, tuple(checker.media))


def with_tools(messages: list[Json], description: str) -> list[Json]:
    """The messages with a description of the tools in their system message."""
    if messages[0]["role"] == "system" and isinstance(messages[0]["content"], str):
        merged = f"{messages[0]['content']}\n\n{description}"
        return [{**messages[0], "content": merged}, *messages[1:]]
    return [{"role": "system", "content": description}, *messages]


class _Checker:
    """Checks one request's messages; gathers its media."""

    def __init__(self, kinds: Collection[str], options: Mapping[str, Any]) -> None:
        self.media: list[MediaInput] = []
        self._kinds = kinds
        self._options = options

    def message(self, message: Json, where: str) -> Json:
        role = message.get("role")
        if role not in _ROLES:
            raise bad_role(where, role, f"roles are: {', '.join(sorted(_ROLES))}")
        shaped = dict(message)
        if role == "developer":
            shaped["role"] = "system"
        if role == "function":
            shaped["role"] = "tool"
            shaped.setdefault("tool_call_id", _call_id(message.get("name")))
        calls = message.get("tool_calls")
        older = shaped.pop("function_call", None)
        if older is not None and calls is None:
            name = older.get("name") if isinstance(older, dict) else None
            calls = [{"id": _call_id(name), "type": "function", "function": older}]
        if calls is not None:
            shaped["tool_calls"] = _tool_calls(calls, where)
        shaped["content"] = self._content(message.get("content"), where, optional=role == "assistant")
        for name in ("name", "tool_call_id", "reasoning_content", "reasoning", "refusal"):
            value = message.get(name)
            if value is not None and not isinstance(value, str):
                raise bad_field(f"{where}.{name} is no text", "it must be a string", f"{where}.{name}")
        thoughts = shaped.pop("reasoning", None)
        if thoughts is not None and shaped.get("reasoning_content") is None:
            shaped["reasoning_content"] = thoughts  # the name that templates know
        return {name: value for name, value in shaped.items() if value is not None or name == "content"}

    def _content(self, content: object, where: str, *, optional: bool) -> str | list[Json] | None:
        if isinstance(content, str):
            return content
        if content is None:
            if optional:
                return None
            raise bad_field(f"{where}.content is missing", "this role's messages need content", f"{where}.content")
        if not isinstance(content, list):
            raise bad_field(
                f"{where}.content is neither text nor a list of parts",
                "OpenAI's format knows only these",
                f"{where}.content",
            )
        bounds.count("content_parts", content, f"{where}.content")
        return [self._part(part, f"{where}.content[{at}]") for at, part in enumerate(content)]

    def _part(self, part: object, where: str) -> Json:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        if not isinstance(part, dict):
            raise bad_field(f"{where} is no content part", "parts are objects with a type", where)
        kind = part.get("type")
        field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if kind in PARTS:
            return self._media_part(part, where)
        if field is None:
            raise InvalidRequest(
                what=f"{where} has the type {str(kind)[:50]!r}",
                why="the served model takes text only",
                fix="send text parts",
                param=f"{where}.type",
            )
        text = part.get(field)
        if not isinstance(text, str):
            raise bad_field(f"{where}.{field} is no text", "it must be a string", f"{where}.{field}")
        return {"type": "text", "text": text}

    def _media_part(self, part: Json, where: str) -> Json:
        """The part as templates expect it. Records the medium."""
        kind = PARTS[part["type"]][0]
        if kind not in self._kinds:
            takes = " and ".join(["text", *sorted(self._kinds)]) if self._kinds else "text only"
            raise InvalidRequest(
                what=f"{str(part.get(WHERE, where))[:200]} is {kind} input",
                why=f"the served model takes {takes}",
                fix="send text parts, or serve a model that takes it",
                param=f"{where}.type",
            )
        found = media_part(part, where, self._options)
        self.media.append(found)
        return {"type": found.kind}


def _call_id(name: object) -> str:
    """Placeholder for the id that older calls and results lack: they name their function instead."""
    return f"call_{str(name)[:100]}"


def _tool_calls(calls: object, where: str) -> list[Json]:
    if not isinstance(calls, list):
        raise bad_field(f"{where}.tool_calls is no list", "it must be a list of calls", f"{where}.tool_calls")
    bounds.count("tools", calls, f"{where}.tool_calls")
    for at, call in enumerate(calls):
        place = f"{where}.tool_calls[{at}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_field(f"{place}.function.name is missing", "a call names its function", place)
        if not isinstance(function.get("arguments", ""), str | dict):
            raise bad_field(f"{place}.function.arguments is no text", "arguments are JSON text", place)
    return calls
