"""Request bodies of Anthropic's routes. Blocks are checked one by one in `convert`, which can name the one that is wrong."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from bough.engine_client.request import PriorityWord

Json = dict[str, Any]


class CountTokensRequest(Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: list[Json]
    model: str | None = None
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None
    output_format: Json | None = None
    # refused: what they ask for does not exist here
    mcp_servers: list[Json] | None = None
    container: str | Json | None = None
    # of no effect here
    cache_control: Json | None = None
    context_management: Json | None = None
    betas: list[str] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # extensions
    rid: str | None = None
    priority: int | PriorityWord | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    # of no effect here
    metadata: Json | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    speed: str | None = None
    diagnostics: Json | None = None
