"""Messages to a prompt, by the model's own template."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal

import jinja2
import jinja2.meta

from bough.core import bounds
from bough.core.errors import ConfigError, InvalidRequest
from bough.tokenizer.template_sandbox import TemplateEnvironment, TemplateRefused, compile_template, render_bounded

ContentFormat = Literal["string", "parts"]
Message = dict[str, Any]

_RESERVED: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "range", "raise_exception"}
    | {"strftime_now", "loop", "namespace", "dict", "lipsum", "cycler", "joiner", "true", "false", "none"}
)
"""Names that a request's `chat_template_kwargs` can't set."""
_CUT_HERE: Final = "\uf8ffcut-here\uf8ff"
_PROBE: Final = "\uf8ffprobe\uf8ff"


class ChatTemplate:
    """A model's chat template. Rendering is sandboxed and bounded; safe to use from many threads."""

    def __init__(self, sources: Mapping[str, str] | str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`sources` by name: `default`, and perhaps `tool_use`, taken when there are tools."""
        named = {"default": sources} if isinstance(sources, str) else dict(sources)
        if "default" not in named:
            named["default"] = next(iter(named.values()))
        self.source = named["default"]
        self._special_tokens = dict(special_tokens or {})
        self._environment = TemplateEnvironment()
        self._templates = {name: self._compile(name, source) for name, source in named.items()}
        self._variables = {name: self._undeclared(source) for name, source in named.items()}
        self._shows_calls = any("tool_calls" in source for source in named.values())

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        markers: Mapping[str, str] | None = None,
    ) -> str:
        """Renders the prompt. Raises `InvalidRequest` if the template rejects these messages or they exceed its limits.

        `continue_final_message` leaves the last message open, so that the model continues it. `markers`: by type, the text
        that stands for parts that are not text, if the template takes text only.
        """
        if kwargs:
            self._check_kwargs(kwargs)
        prepared = [self._prepare(message, markers or {}) for message in messages]
        if continue_final_message:
            _mark_end(prepared)
        prompt = self._render(prepared, tools, add_generation_prompt and not continue_final_message, kwargs or {})
        return _cut_at_mark(prompt) if continue_final_message else prompt

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of the special tokens that templates may name: `bos_token`, `eos_token`, ..."""
        return self._special_tokens

    @cached_property
    def accepted_kwargs(self) -> frozenset[str]:
        """Variables that the template reads and a request may set (`enable_thinking`, say)."""
        read = frozenset().union(*self._variables.values())
        return read - _RESERVED - set(self._special_tokens)

    @property
    def takes_tools(self) -> bool:
        """Whether the template shows tools to the model."""
        return "tool_use" in self._templates or "tools" in self._variables["default"]

    @cached_property
    def content_format(self) -> ContentFormat:
        """`parts` if the template takes a list of typed parts as content; `string` if it takes text only."""
        parts: list[Message] = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
        shown = self._try(parts)
        return "parts" if shown is not None and _PROBE in shown and "'type'" not in shown else "string"

    @cached_property
    def takes_system(self) -> bool:
        """Whether a system message reaches the prompt."""
        shown = self._try([{"role": "system", "content": _PROBE}, {"role": "user", "content": "x"}])
        return shown is not None and _PROBE in shown

    @cached_property
    def opens_reasoning(self) -> str:
        """The tag that the generation prompt ends with if it opens a reasoning section by itself; else empty."""
        shown = self._try([{"role": "user", "content": "x"}], add_generation_prompt=True)
        tail = (shown or "").rstrip()
        return next((tag for tag in ("<think>", "<|thinking|>", "[THINK]") if tail.endswith(tag)), "")

    def role_affixes(self) -> dict[str, list[str]]:
        """What surrounds a message of each role: `{"system": [before, after], "user": ..., "assistant": ...}`.

        Determined by rendering probes. Text before the first message (the beginning-of-sequence token) is omitted. If a
        template merges the system message into the user's, the text before it is empty and the text after it is the
        separator.
        """
        system, user, assistant, again = (_PROBE + role for role in ("s", "u", "a", "b"))
        turns = [
            {"role": "user", "content": user},
            {"role": "assistant", "content": assistant},
            {"role": "user", "content": again},
        ]
        if self.takes_system:
            turns.insert(0, {"role": "system", "content": system})
        whole = self._must(turns)
        asked = self._must(turns[:-2])
        answered = self._must(turns[:-1])
        opened = self._must(turns[:-2], add_generation_prompt=True)
        between = _between(whole, user, assistant)
        opening = opened[len(asked) :].strip() if opened.startswith(asked) else ""
        place = between.rfind(opening) if opening else -1
        after_user, before_assistant = (between[:place], between[place:]) if place >= 0 else (between, "")
        closing = answered[answered.index(assistant) + len(assistant) :] if assistant in answered else ""
        turn = _between(whole, assistant, again)
        after_assistant = _common_prefix(turn, closing)
        before_user = turn[len(after_assistant) :]
        affixes = {"user": [before_user, after_user], "assistant": [before_assistant, after_assistant]}
        if system not in whole:
            return {"system": ["", ""], **affixes}
        start, middle = whole[: whole.index(system)], _between(whole, system, user)
        start = start.removeprefix(self.bos)
        if middle.endswith(before_user):
            return {"system": [start, middle.removesuffix(before_user)], **affixes}
        return {"system": ["", middle], **affixes}

    @cached_property
    def bos(self) -> str:
        """Text of the beginning-of-sequence token if the template writes it once, at the start; else empty."""
        bos = self._special_tokens.get("bos_token", "")
        turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        shown = self._try(turn * 2) or ""
        return bos if bos and shown.startswith(bos) and shown.count(bos) == 1 else ""

    # -- inside ----------------------------------------------------------------------------------------------------

    def _compile(self, name: str, source: str) -> jinja2.Template:
        try:
            return compile_template(self._environment, source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                what=f"the chat template {name!r} can't be compiled",
                why=str(error),
                fix="give another one with --chat-template",
            ) from error

    def _undeclared(self, source: str) -> frozenset[str]:
        return frozenset(jinja2.meta.find_undeclared_variables(self._environment.parse(source)))

    def _check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        taken = sorted(name for name in kwargs if name in _RESERVED or name in self._special_tokens)
        if taken:
            raise InvalidRequest(
                what=f"chat_template_kwargs can't set {taken[0]!r}",
                why="the server sets it",
                fix=f"remove it; this template takes {', '.join(sorted(self.accepted_kwargs)) or 'no settings'}",
                param="chat_template_kwargs",
            )
        bounds.count("template_kwargs", kwargs, "chat_template_kwargs")
        bounds.at_most("template_kwargs_chars", len(json.dumps(dict(kwargs), default=str)), "chat_template_kwargs")

    def _prepare(self, message: Message, markers: Mapping[str, str]) -> Message:
        """A copy in the form that templates expect: arguments as objects, text parts joined where lists aren't taken."""
        prepared = dict(message)
        if prepared.get("tool_calls"):
            prepared["tool_calls"] = [_with_object_arguments(call) for call in prepared["tool_calls"]]
            if not self._shows_calls:
                prepared["content"] = _with_calls(prepared.get("content"), prepared["tool_calls"])
        if prepared.get("content") is None and "content" in prepared and not prepared.get("tool_calls"):
            prepared["content"] = ""
        content = prepared.get("content")
        if isinstance(content, list) and self.content_format == "string":
            prepared["content"] = "\n".join(_text_of_part(part, markers) for part in content)
        return prepared

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        variables: dict[str, Any] = {
            **kwargs,
            **self._special_tokens,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return render_bounded(self._environment, self._templates[name], variables)
        except TemplateRefused as refusal:
            raise InvalidRequest(
                what=f"the model's chat template refuses these messages: {str(refusal)[:500]}",
                why="the template asks for another form or order of messages",
                fix="change the messages, or start the server with another --chat-template",
                param="messages",
            ) from refusal
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise InvalidRequest(
                what=f"the model's chat template can't take these messages: {str(error)[:500]}",
                why=f"it failed with {type(error).__name__}",
                fix="check each message's role and content, or start the server with another --chat-template",
                param="messages",
            ) from error

    def _try(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str | None:
        try:
            return self._render(messages, None, add_generation_prompt, {})
        except InvalidRequest:
            return None

    def _must(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        shaped = copy.deepcopy(list(messages))
        if self.content_format == "parts" and self._try(shaped) is None:
            for message in shaped:
                message["content"] = [{"type": "text", "text": message["content"]}]
        return self._render(shaped, None, add_generation_prompt, {})


def _with_object_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI sends arguments as JSON text; templates print them as an object."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            parsed = arguments
        function["arguments"] = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": function}


def _with_calls(content: Any, calls: Sequence[Mapping[str, Any]]) -> str:
    """An assistant's message including its tool calls, for templates that do not support tool calls."""
    said = "\n".join(_text_of_part(part) for part in content) if isinstance(content, list) else content or ""
    functions = [call["function"] for call in calls]
    shown = [json.dumps({"name": each.get("name"), "arguments": each.get("arguments")}) for each in functions]
    return "\n".join([*([said] if said else []), *(f"<tool_call>\n{call}\n</tool_call>" for call in shown)])


def _text_of_part(part: Any, markers: Mapping[str, str] = MappingProxyType({})) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in markers:
        return markers[part["type"]]
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise InvalidRequest(
        what=f"a message has a part of type {kind!r}",
        why="the model's chat template takes text only",
        fix="send text parts",
        param="messages",
    )


def _mark_end(messages: list[Message]) -> None:
    """Puts a mark behind the last message's text."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _CUT_HERE
        return
    if isinstance(content, list) and content and isinstance(content[-1], dict) and "text" in content[-1]:
        last["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CUT_HERE}]
        return
    raise InvalidRequest(
        what="there is no final message to continue",
        why="continue_final_message needs a last message that ends in text",
        fix="add an assistant message with the beginning of the answer",
        param="continue_final_message",
    )


def _cut_at_mark(prompt: str) -> str:
    place = prompt.rfind(_CUT_HERE)
    if place < 0:
        raise InvalidRequest(
            what="the final message can't be continued",
            why="the model's chat template does not show it as it is",
            fix="send the beginning of the answer as part of the prompt of /v1/completions",
            param="continue_final_message",
        )
    return prompt[:place]


def _between(text: str, left: str, right: str) -> str:
    begin = text.find(left)
    end = text.find(right, begin + len(left))
    return text[begin + len(left) : end] if begin >= 0 and end >= 0 else ""


def _common_prefix(left: str, right: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return left[:length]
