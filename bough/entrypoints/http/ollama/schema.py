"""Request bodies of Ollama's routes."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

Json = dict[str, Any]
Kind = Literal["chat", "generate"]
Think = bool | Literal["low", "medium", "high", "max"]


class OllamaOptions(Struct, kw_only=True):
    """`options`. Those about loading a model have no effect: it is loaded."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


class OllamaCommon(Struct, kw_only=True):
    model: str
    stream: bool | None = None
    format: str | Json | None = None
    options: OllamaOptions | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # of no effect here
    keep_alive: float | str | None = None
    truncate: bool | None = None
    shift: bool | None = None


class OllamaChatRequest(OllamaCommon, kw_only=True):
    """POST /api/chat."""

    messages: list[Json] | None = None
    tools: list[Json] | None = None


class OllamaGenerateRequest(OllamaCommon, kw_only=True):
    """POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None
    images: list[str] | None = None
    """Base64, or URLs; the prompt is rendered by the chat template then."""
    # refused: what they ask for does not exist here
    template: str | None = None
    context: list[int] | None = None


class OllamaShowRequest(Struct, kw_only=True):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None
    """Another name of `model`."""
    verbose: bool | None = None
