"""The one table of what a client may ask for at most. Every entrance checks against it, before any work is done.

Sampling parameters (ranges of numbers, how many stop strings, how large a schema) are bounded where they are read, in
`intake.sampling`, which every entrance goes through as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass

from bough.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Bound:
    most: int
    unit: str


BOUNDS: Mapping[str, Bound] = {
    "best_of": Bound(64, "candidates of one prompt"),
    "prompts": Bound(256, "prompts in one request"),
    "embeddings": Bound(2048, "inputs in one request"),
    "documents": Bound(1024, "documents or items in one request"),
    "completions": Bound(1024, "completions in one request (prompts x n)"),
    "messages": Bound(4096, "messages"),
    "content_parts": Bound(1024, "content parts in one message"),
    "top_logprobs": Bound(20, "alternatives a token"),
    "native_top_logprobs": Bound(1024, "alternatives a token"),
    "token_ids_logprob": Bound(1024, "scored token ids"),
    "tools": Bound(256, "tools"),
    "tools_bytes": Bound(1024 * 1024, "bytes of tool definitions"),
    "schema_depth": Bound(32, "levels in a schema"),
    "rid_chars": Bound(256, "characters in a request id"),
    "salt_chars": Bound(256, "characters in a cache salt"),
    "json_depth": Bound(64, "levels of nesting in a body"),
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
    raise InvalidRequest(
        what=f"{param or 'the body'} is nested too deeply",
        why=f"at most {BOUNDS[bound].most} {BOUNDS[bound].unit} are allowed",
        fix="flatten it",
        param=param,
    )


_CONTAINERS = frozenset({dict, list})
