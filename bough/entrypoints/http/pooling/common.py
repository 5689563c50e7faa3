"""Shared code of the pooling routes: the pooler, and conversion of bodies to inputs and options."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from msgspec.structs import replace
from starlette.requests import Request

from bough.config.pooling_facts import PoolingFacts
from bough.core import bounds
from bough.core.errors import InvalidRequest
from bough.engine_client import PoolOptions
from bough.engine_client.media_fields import native_media, processor_options
from bough.engine_client.pool_texts import WHOLE, Input, MediaText, Side
from bough.engine_client.request import priority_of
from bough.entrypoints.http.openai.messages import check_messages
from bough.entrypoints.http.pooling.schema import EmbeddingsRequest, Inputs, MixedInput, PoolingBody
from bough.entrypoints.http.replies import caller_of, deadline_of
from bough.entrypoints.served_model import ServedModel


def options_of(
    asked: PoolingBody, request: Request, *, prompt_name: str | None = None, add_special_tokens: bool | None = None
) -> PoolOptions:
    """The input options of a body."""
    if asked.rid is not None:
        bounds.at_most("rid_chars", len(asked.rid), "rid")
    truncate = asked.truncate_prompt_tokens
    if truncate is None and asked.truncate:
        truncate = WHOLE
    return PoolOptions(
        truncate=truncate,
        cut_by='"truncate_prompt_tokens": -1',
        add_special_tokens=add_special_tokens is not False,
        prompt_name=prompt_name,
        rid=asked.rid or "",
        priority=priority_of(asked.priority),
        caller=caller_of(request),
        deadline_s=deadline_of(request),
    )


def inputs_of(given: Inputs, param: str = "input") -> list[Input]:
    """The forms of an input as a list of texts or of token ids. Raises `InvalidRequest`."""
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))  # of a million ids in a few milliseconds
    if kinds == {int}:
        return [cast(list[int], given)]
    bounds.count("embeddings", given, param)
    if kinds == {str}:
        return [each for each in given if isinstance(each, str)]
    lists = [each for each in given if isinstance(each, list)]
    if kinds == {list} and all(lists):
        return [*lists]
    raise InvalidRequest(
        what=f"{param} is empty or mixes texts, token ids and lists",
        why="its elements must be of one kind",
        fix="send a text, a list of texts, a list of token ids, or a list of those",
        param=param,
    )


def mixed_inputs(asked: EmbeddingsRequest, served: ServedModel, pooling: PoolingFacts) -> list[Input]:
    """All forms that /v1/embeddings takes. Raises `InvalidRequest`."""
    if (asked.input is None) == (asked.messages is None):
        raise InvalidRequest(
            what="input is missing" if asked.input is None else "input and messages were both given",
            why="a request has one of them",
            fix="send input, or messages",
            param="input",
        )
    options = processor_options(asked.mm_processor_kwargs)
    if asked.messages is not None:
        return [_chat(asked, asked.messages, served, pooling, options)]
    given = [asked.input] if isinstance(asked.input, MixedInput) else asked.input
    assert given is not None, "one of them is there"
    if isinstance(given, str) or not any(isinstance(each, MixedInput) for each in given):
        return inputs_of(cast(Inputs, given))
    bounds.count("embeddings", given, "input")
    return [_mixed(each, f"input[{at}]", pooling.media, options) for at, each in enumerate(given)]


def side_of(given: str | MixedInput | list[dict[str, Any]], where: str, kinds: Collection[str]) -> Side:
    """A query or a document. `kinds`: the media that the model takes. Raises `InvalidRequest`."""
    if isinstance(given, str):
        return given
    return _mixed_input(MixedInput(content=given) if isinstance(given, list) else given, where, kinds, {})


def _chat(
    asked: EmbeddingsRequest,
    given: Sequence[dict[str, Any]],
    served: ServedModel,
    pooling: PoolingFacts,
    options: Mapping[str, Any],
) -> Input:
    """Messages as one input: rendered by the model's chat template or, without one, their texts joined by line
    breaks."""
    messages, media = check_messages(given, pooling.media, options)
    template = None if served.tokenizer is None or pooling.apart else served.tokenizer.chat_template
    if template is None:
        text = "\n".join(texts_of(messages))
        return MediaText(text, media) if media else text
    text = template.render(
        messages,
        tools=None,
        add_generation_prompt=asked.add_generation_prompt is not False and not asked.continue_final_message,
        continue_final_message=bool(asked.continue_final_message),
        kwargs={**served.template_defaults, **(asked.chat_template_kwargs or {})},
        markers=served.markers,
    )
    return MediaText(text, media, is_prompt=True)


def _mixed(
    given: str | int | list[int] | MixedInput, where: str, kinds: Collection[str], options: Mapping[str, Any]
) -> Input:
    if isinstance(given, str):
        return given
    if not isinstance(given, MixedInput):
        raise InvalidRequest(
            what=f"{where} is token ids among other inputs",
            why="texts and objects go together, token ids don't",
            fix="send texts, or a request for the token ids alone",
            param=where,
        )
    return _mixed_input(given, where, kinds, options)


def _mixed_input(given: MixedInput, where: str, kinds: Collection[str], options: Mapping[str, Any]) -> Side:
    if given.content is not None:
        messages, parts = check_messages([{"role": "user", "content": given.content}], kinds, options)
        text = "\n".join(texts_of(messages))
        return MediaText(text, parts) if parts else text
    fields = {"image_data": given.image, "video_data": given.video, "audio_data": given.audio}
    media = native_media({**fields, "mm_processor_kwargs": options})
    if media:
        return MediaText(given.text or "", tuple(replace(each, param=f"{where}.{each.kind}") for each in media))
    if given.text is None:
        raise InvalidRequest(
            what=f"{where} is empty", why="it must have a text or media", fix="send text or image", param=where
        )
    return given.text


def texts_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts of checked messages, in order."""
    found = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        found += [part["text"] for part in parts if part["type"] == "text"]
    return found


def usage(prompt_tokens: int, cached_tokens: int = 0, media_tokens: Mapping[str, int] | None = None) -> dict[str, Any]:
    counts: dict[str, Any] = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens, "completion_tokens": 0}
    details = {"cached_tokens": cached_tokens} if cached_tokens else {}
    details |= {f"{kind}_tokens": count for kind, count in (media_tokens or {}).items()}
    return {**counts, "prompt_tokens_details": details} if details else counts
