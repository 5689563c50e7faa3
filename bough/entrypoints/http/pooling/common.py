"""What the pooling routes share: the pooler behind them, and how bodies become inputs and options."""

from __future__ import annotations

from typing import Any, cast

from starlette.requests import Request

from bough.core import bounds
from bough.core.errors import InvalidRequest
from bough.engine_client import PoolOptions
from bough.engine_client.pool_texts import WHOLE, Input
from bough.engine_client.request import priority_of
from bough.entrypoints.http.pooling.schema import Inputs, PoolingBody
from bough.entrypoints.http.replies import caller_of, deadline_of


def options_of(
    asked: PoolingBody, request: Request, *, prompt_name: str | None = None, add_special_tokens: bool | None = None
) -> PoolOptions:
    """What a body says about how its texts are taken."""
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


def usage(prompt_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    told: dict[str, Any] = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens, "completion_tokens": 0}
    return {**told, "prompt_tokens_details": {"cached_tokens": cached_tokens}} if cached_tokens else told
