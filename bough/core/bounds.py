"""The one table of what a client may ask for at most. Every entrance checks against it, before any work is done.

Bodies are bounded by `--max-body-bytes`, prompts by the context; everything else that a client can make large is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass

from bough.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Bound:
    most: int
    unit: str


MOST_REPLICAS = 256
"""Maximum number of engines behind one server: request ids have bits for this many."""

LEAST_BATCH_TOKENS = 1024
"""What a completion counts for in a batch, however short its prompt is: it costs its request, its stream and its slot."""

BOUNDS: Mapping[str, Bound] = {
    "n": Bound(64, "answers to one prompt"),
    "best_of": Bound(64, "candidates of one prompt"),
    "beam_width": Bound(64, "beams of one prompt"),
    "batch_tokens": Bound(
        8 * 1024 * 1024, f"prompt tokens in one request ({LEAST_BATCH_TOKENS} or more for each of its completions)"
    ),
    "embeddings": Bound(2048, "inputs in one request"),
    "documents": Bound(1024, "documents or items in one request"),
    "messages": Bound(4096, "messages"),
    "content_parts": Bound(1024, "content parts in one message"),
    "top_logprobs": Bound(20, "alternatives a token"),
    "native_top_logprobs": Bound(1024, "alternatives a token"),
    "token_ids_logprob": Bound(1024, "scored token ids"),
    "label_token_ids": Bound(1024, "labels"),
    "stops": Bound(32, "stop strings or patterns"),
    "stop_chars": Bound(1024, "characters in a stop string"),
    "all_stops_chars": Bound(8192, "characters in all stop strings"),
    "stop_regex_chars": Bound(256, "characters in a stop pattern"),
    "stop_token_ids": Bound(256, "token ids that stop"),
    "logit_bias": Bound(1024, "biased token ids"),
    "allowed_token_ids": Bound(65_536, "allowed token ids"),
    "bad_words": Bound(256, "bad words"),
    "bad_word_chars": Bound(256, "characters in a bad word"),
    "grammar_bytes": Bound(64 * 1024, "bytes of a schema, an expression or a grammar"),
    "choices": Bound(1024, "choices"),
    "choice_chars": Bound(4096, "characters in a choice"),
    "custom_params": Bound(64, "custom parameters"),
    "custom_param_chars": Bound(4096, "characters in a custom parameter"),
    "tools": Bound(256, "tools"),
    "tools_bytes": Bound(1024 * 1024, "bytes of tool definitions"),
    "schema_depth": Bound(32, "levels in a schema"),
    "rid_chars": Bound(256, "characters in a request id"),
    "salt_chars": Bound(256, "characters in a cache salt"),
    "name_chars": Bound(256, "characters in the name of a logit processor"),
    "template_kwargs": Bound(32, "settings for the chat template"),
    "template_kwargs_chars": Bound(16_384, "characters in the chat template's settings"),
    "metadata": Bound(16, "entries of metadata"),
    "join_branches": Bound(1024, "branches to join"),
    "grpc_requests": Bound(1024, "requests under way over one gRPC stream"),
    "json_depth": Bound(64, "levels of nesting in a body"),
    "json_numbers": Bound(2 * 1024 * 1024, "numbers in a body"),
    "json_parts": Bound(256 * 1024, "texts, lists and objects in a body"),
    "header_bytes": Bound(64 * 1024, "bytes of headers"),
    "tokenize_chars": Bound(16 * 1024 * 1024, "characters to tokenise"),
}


def at_most(bound: str, value: int, param: str) -> None:
    """Raises `InvalidRequest` if `value` exceeds the named bound."""
    limit = BOUNDS[bound]
    if value > limit.most:
        raise InvalidRequest(
            what=f"{param} is too large: {value}",
            why=f"at most {limit.most} {limit.unit} are allowed",
            fix=f"send a smaller {param}, or several requests",
            param=param,
        )


def count(bound: str, items: Sized | None, param: str) -> None:
    """Raises `InvalidRequest` if there are more items than the named bound allows."""
    if items is not None:
        at_most(bound, len(items), param)


def batch(tokens: Iterable[int], param: str) -> None:
    """Raises `InvalidRequest` if completions with prompts of that many tokens are too much for one request."""
    at_most("batch_tokens", sum(max(each, LEAST_BATCH_TOKENS) for each in tokens), param)


def depth(value: object, bound: str, param: str | None) -> None:
    """Raises `InvalidRequest` if JSON is nested deeper than the named bound. Works level by level, never recursively."""
    level = [value]
    for _ in range(BOUNDS[bound].most):
        inner: list[object] = []
        for each in level:
            if type(each) is dict:
                inner.extend(item for item in each.values() if type(item) in _CONTAINERS)
            elif type(each) is list:
                inner.extend(item for item in each if type(item) in _CONTAINERS)
        if not inner:
            return
        level = inner
    raise too_deep(bound, param)


def too_deep(bound: str, param: str | None) -> InvalidRequest:
    """The error for JSON that is nested deeper than the named bound."""
    return InvalidRequest(
        what=f"{param or 'the body'} is nested too deeply",
        why=f"at most {BOUNDS[bound].most} {BOUNDS[bound].unit} are allowed",
        fix="flatten it",
        param=param,
    )


_CONTAINERS = frozenset({dict, list})
