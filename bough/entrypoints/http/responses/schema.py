"""Request body of /v1/responses. Items are checked one by one in `convert`, which can name the one that is wrong."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from bough.engine_client.request import PriorityWord

Json = dict[str, Any]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningOptions(Struct, kw_only=True):
    effort: Effort | None = None
    summary: str | None = None
    """Of no effect: reasoning is shown as it is."""
    generate_summary: str | None = None


class TextOptions(Struct, kw_only=True):
    format: Json | None = None
    verbosity: str | None = None
    """Of no effect."""


class ResponsesRequest(Struct, kw_only=True):
    """POST /v1/responses."""

    input: str | list[Json]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Json | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # extensions
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: Json | None = None
    rid: str | None = None
    priority: int | PriorityWord | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    # refused: what they ask for does not exist here
    conversation: str | Json | None = None
    prompt: Json | None = None
    # of no effect here
    max_tool_calls: int | None = None
    moderation: Json | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Json | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    stream_options: Json | None = None
    user: str | None = None
