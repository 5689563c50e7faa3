"""Bodies of the pooling routes. Fields that are not part of the original API are extensions that all of these routes
accept."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from bough.engine_client.request import PriorityWord

Inputs = str | list[str | int | list[int]]
"""A text, token ids, or a list of either."""


class MixedInput(Struct, kw_only=True):
    """An input of a text, media, or both."""

    text: str | None = None
    image: str | dict[str, Any] | list[str | dict[str, Any]] | None = None
    """A URL, base64, or an object with a `url`; several in a list."""
    content: list[dict[str, Any]] | None = None
    """Or parts, as in a chat."""
    video: str | dict[str, Any] | list[str | dict[str, Any]] | None = None
    audio: str | dict[str, Any] | list[str | dict[str, Any]] | None = None


class PoolingBody(Struct, kw_only=True):
    """Fields of every pooling route."""

    model: str | None = None
    user: str | None = None
    rid: str | None = None
    priority: int | PriorityWord | None = None
    truncate_prompt_tokens: int | None = None
    """Truncate inputs to this many tokens; -1: to the context."""
    truncate: bool | None = None
    """Truncate inputs to the context."""


class EmbeddingsRequest(PoolingBody, kw_only=True):
    """POST /v1/embeddings."""

    input: str | list[str | int | list[int] | MixedInput] | MixedInput | None = None
    messages: list[dict[str, Any]] | None = None
    """A chat as one input, in place of `input`: texts and media in parts of messages."""
    add_generation_prompt: bool | None = None
    """Of a chat: whether the template opens an answer. By default it does."""
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    instruct: str | None = None
    """What embeddings are for, with models whose template has a place for it."""
    instruction: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    """Which of the model's own prompts goes before each text ("query", "document" ...)."""
    add_special_tokens: bool | None = None


class EncodeRequest(PoolingBody, kw_only=True):
    """POST /encode, /classify."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    image_data: Any = None
    """As in /generate: a URL, base64, or a list; of a batch, one entry for each text."""
    video_data: Any = None
    audio_data: Any = None
    mm_processor_kwargs: dict[str, Any] | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    sampling_params: dict[str, Any] | None = None
    """Accepted without effect, because nothing is sampled."""


class RerankRequest(PoolingBody, kw_only=True):
    """POST /v1/rerank."""

    query: str | MixedInput | list[dict[str, Any]]
    """A text, an object with text and media, or parts as in a chat."""
    documents: list[str | MixedInput | list[dict[str, Any]]]
    top_n: int | None = None
    return_documents: bool | None = None
    instruct: str | None = None
    """What "relevant" means, for rerankers that take an instruction."""
    instruction: str | None = None


class ScoreRequest(PoolingBody, kw_only=True):
    """POST /v1/score: query and items (with label_token_ids), or text_1 and text_2."""

    query: str | list[int] | None = None
    items: str | list[str | list[int]] | None = None
    label_token_ids: list[int] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    multi_item_scoring_delimiter: int | None = None
    """A token id between the query and each item, which are then tokenised separately."""
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    instruct: str | None = None


class ClassifyRequest(PoolingBody, kw_only=True):
    """POST /v1/classify."""

    input: Inputs


class TextPart(Struct, kw_only=True):
    """A part of an input; only texts can be judged."""

    type: str
    text: str | None = None


class ModerationRequest(PoolingBody, kw_only=True):
    """POST /v1/moderations."""

    input: str | list[str | TextPart]
