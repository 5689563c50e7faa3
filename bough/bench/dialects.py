"""How a prompt is sent, and how the events of the answer are read, in each API."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from bough.bench.prompts import BenchPrompt
from bough.core.errors import ConfigError

Json = dict[str, Any]

ALIASES = {
    "native": "native", "sglang": "native", "sglang-native": "native", "bough": "native",
    "openai": "openai", "sglang-oai": "openai", "vllm": "openai", "openai-completions": "openai",
    "openai-chat": "openai-chat", "sglang-oai-chat": "openai-chat", "vllm-chat": "openai-chat",
}  # fmt: skip
"""Names from other benchmarks, and the API of each."""


@dataclass(slots=True)
class AnswerProgress:
    """The answer so far."""

    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


class _NativeMeta(Struct):
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = 0
    finish_reason: Any = None


class _NativeEvent(Struct):
    """Only the fields that are read: text and ids so far grow with every event."""

    meta_info: _NativeMeta = msgspec.field(default_factory=_NativeMeta)
    error: Any = None


class _Details(Struct):
    cached_tokens: int | None = 0


class _Usage(Struct):
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _Said(Struct):
    content: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None


class _Choice(Struct):
    text: str | None = ""
    delta: _Said | None = None
    message: _Said | None = None

    @property
    def says_something(self) -> bool:
        said = self.delta or self.message
        return bool(self.text) or (said is not None and bool(said.content or said.reasoning_content or said.tool_calls))


class _OpenAIEvent(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_NATIVE = msgspec.json.Decoder(_NativeEvent)
_OPENAI = msgspec.json.Decoder(_OpenAIEvent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One API. `read` takes an event (or a whole answer) and returns the number of new tokens: exact if the API counts
    them, otherwise one if there is new text."""

    name: str
    model: str = ""
    stream: bool = True
    ignore_eos: bool = True
    extra: Json = field(default_factory=dict)

    @property
    def path(self) -> str:
        return {"native": "/generate", "openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}[self.name]

    def body(self, prompt: BenchPrompt) -> Json:
        if self.name == "native":
            return self._native(prompt)
        fields: Json = {"model": self.model, "temperature": 0.0, "max_tokens": prompt.output_len, "stream": self.stream}
        if self.stream:
            fields["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.name == "openai":
            if prompt.messages is not None:
                raise _wrong_backend("a dataset with messages", "openai-chat")
            fields["prompt"] = prompt.ids if prompt.ids is not None else prompt.text
            return fields | self.extra
        if prompt.ids is not None:
            raise _wrong_backend("a dataset of token ids", "native or openai")
        fields["messages"] = prompt.messages or [{"role": "user", "content": prompt.text}]
        return fields | self.extra

    def _native(self, prompt: BenchPrompt) -> Json:
        if prompt.messages is not None:
            raise _wrong_backend("a dataset with messages", "openai-chat")
        sampling: Json = {"temperature": 0.0, "max_new_tokens": prompt.output_len}
        if self.ignore_eos:
            sampling["ignore_eos"] = True
        given: Json = {"input_ids": prompt.ids} if prompt.ids is not None else {"text": prompt.text}
        extra = dict(self.extra)
        sampling |= extra.pop("sampling_params", {})
        return {**given, "sampling_params": sampling, "stream": self.stream, **extra}

    def read(self, data: bytes, so_far: AnswerProgress) -> int:
        return _read_native(data, so_far) if self.name == "native" else _read_openai(data, so_far)


def _read_native(data: bytes, so_far: AnswerProgress) -> int:
    event = _NATIVE.decode(data)
    if event.error is not None:
        so_far.error = _message(event.error)
        return 0
    meta = event.meta_info
    if isinstance(meta.finish_reason, dict) and meta.finish_reason.get("type") == "abort":
        so_far.error = str(meta.finish_reason.get("message") or "the server ended the request")
    new = meta.completion_tokens - so_far.output_tokens
    so_far.output_tokens += new
    so_far.prompt_tokens = meta.prompt_tokens
    so_far.cached_tokens = max(so_far.cached_tokens, meta.cached_tokens or 0)
    return new


def _read_openai(data: bytes, so_far: AnswerProgress) -> int:
    event = _OPENAI.decode(data)
    if event.error is not None:
        so_far.error = _message(event.error)
        return 0
    usage = event.usage
    says_something = any(choice.says_something for choice in event.choices)
    if usage is not None:
        so_far.prompt_tokens = usage.prompt_tokens or 0
        so_far.output_tokens = usage.completion_tokens or 0
        if usage.prompt_tokens_details is not None:
            so_far.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
    else:
        so_far.output_tokens += says_something
    return int(says_something)


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)


def dialect_name(backend: str) -> str:
    """The API with this name or alias. Raises `ConfigError`."""
    if backend not in ALIASES:
        raise ConfigError(
            what=f"there is no backend {backend!r}", why=f"there are: {', '.join(ALIASES)}", fix="choose one of them"
        )
    return ALIASES[backend]


def _wrong_backend(what: str, wanted: str) -> ConfigError:
    return ConfigError(what=f"{what} can't be sent to this backend", fix=f"use --backend {wanted}")
