"""Native JSON of pooling models: inputs as `/encode`, `/classify` and `Engine.encode` take them, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from bough.config.pooling_facts import PoolingFacts
from bough.core import bounds
from bough.core.errors import InvalidRequest
from bough.engine_client.media_fields import NATIVE_MEDIA, native_media, split_by_prompt
from bough.engine_client.native import is_listed
from bough.engine_client.pool_texts import Input, MediaText
from bough.engine_client.pooling import Pooled
from bough.engine_client.scores import as_weights

Json = dict[str, Any]


FILLER: Final = "padding"
"""What SGLang's clients write where an input is an image without text."""


def native_inputs(text: Any, input_ids: Any, media: Mapping[str, Any] | None = None) -> tuple[list[Input], bool]:
    """The inputs of a native request, and whether there is just one, not in a list. `media`: its fields that name media
    (`image_data` and so on, `mm_processor_kwargs`); without a text, each of a list is an input. Raises `InvalidRequest`."""
    named = {name: value for name, value in (media or {}).items() if value is not None}
    lists = {name: named[name] for name in NATIVE_MEDIA if name in named}
    if not lists:
        return _plain_inputs(text, input_ids)
    if input_ids is not None:
        raise InvalidRequest(
            what="input_ids came with media",
            why="what stands for a medium among token ids is the server's own affair here",
            fix="send text, or the media alone",
            param="input_ids",
        )
    if text is None:
        single = not any(isinstance(value, list | tuple) for value in lists.values())
        count = max(len(value) if isinstance(value, list | tuple) else 1 for value in lists.values())
        texts = [""] * count
    else:
        plain, single = _plain_inputs(text, None)
        texts = ["" if each == FILLER else str(each) for each in plain]
    bounds.count("embeddings", texts, next(iter(lists)))
    columns = {name: split_by_prompt(name, value, len(texts), single) for name, value in lists.items()}
    shared = {"mm_processor_kwargs": named.get("mm_processor_kwargs")}
    inputs: list[Input] = []
    for at, each in enumerate(texts):
        found = native_media({**{name: column[at] for name, column in columns.items()}, **shared})
        inputs.append(MediaText(each, found) if found else each)
    return inputs, single


def _plain_inputs(text: Any, input_ids: Any) -> tuple[list[Input], bool]:
    if (text is None) == (input_ids is None):
        raise InvalidRequest(
            what="there is no input" if text is None else "text and input_ids were both given",
            why="a request has one input, or one list of them",
            fix="send text or input_ids",
            param="text",
        )
    if text is not None:
        if isinstance(text, str):
            return [text], True
        if isinstance(text, list | tuple) and text and all(isinstance(each, str) for each in text):
            return list(text), False
        raise _wrong("text", "a text or a list of texts")
    if is_listed(input_ids) and len(input_ids):
        if is_listed(input_ids[0]):
            if all(map(is_listed, input_ids)):
                return [list(each) for each in input_ids], False
        elif all(isinstance(each, int | np.integer) for each in input_ids):
            return [list(input_ids)], True
    raise _wrong("input_ids", "a list of token ids or a list of such lists")


def native_pooled(pooled: Pooled, facts: PoolingFacts) -> Json:
    """One result: numbers, or for sparse models weights by token id."""
    return {
        "embedding": as_weights(pooled.values) if facts.task == "sparse" else pooled.values.tolist(),
        "meta_info": {
            "id": pooled.rid,
            "finish_reason": {"type": "stop", "matched": None},
            "prompt_tokens": pooled.prompt_tokens,
            "cached_tokens": 0,
            "e2e_latency": pooled.seconds,
            **{f"{kind}_tokens": count for kind, count in pooled.media_tokens.items()},
        },
    }


def labelled(values: Sequence[float], facts: PoolingFacts) -> Json:
    """Scores of labels with the likeliest one's name."""
    best = int(np.argmax(values))
    return {"label": facts.labels[best], "probs": list(values), "num_classes": len(values)}


def ranked(scores: Sequence[float], documents: Sequence[str], top_n: int | None) -> list[Json]:
    """Documents by falling score; ties keep their order."""
    order = sorted(range(len(scores)), key=lambda at: -scores[at])
    return [{"index": at, "score": scores[at], "document": documents[at]} for at in order[:top_n]]


def pairs_of(given: Any) -> list[tuple[str, str]]:
    """Pairs of texts, as lists of two. Raises `InvalidRequest`."""
    if (
        isinstance(given, list | tuple)
        and given
        and all(isinstance(each, list | tuple) and len(each) == 2 for each in given)
        and all(isinstance(text, str) for each in given for text in each)
    ):
        return [(each[0], each[1]) for each in given]
    raise _wrong("prompt", "a list of [query, document] pairs of texts")


def _wrong(name: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(
        what=f"{name} is empty or of the wrong type", why=f"it must be {wanted}", fix=f"send a valid {name}", param=name
    )
