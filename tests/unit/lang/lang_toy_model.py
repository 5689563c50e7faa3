"""A toy language model: greedy longest-match tokens, pseudo-random but fixed next-token probabilities.

It is small enough to compute any likelihood by brute force, and its vocabulary merges across word borders, so that
the tokens of `prompt + choice` are not always the tokens of `prompt` followed by those of `choice`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re._constants as sre
import re._parser as sre_parse
from functools import cache
from typing import Any

EOS = "<eos>"
_CHARS = [chr(c) for c in (9, 10, *range(32, 127))] + list("é◁▷")
_MERGES = [": ", ":\n", " the", "the", "yes", "no", "ing", " Paris", " P", "Berlin", " is", "is", "Answer", " A", "er",
           "on", "in", "an", ".\n", " yes", "es\n", "s\n", "ton", "London"]  # fmt: skip
VOCAB = [EOS, *_CHARS, *_MERGES]
ID_OF = {piece: i for i, piece in enumerate(VOCAB)}
_LONGEST = max(map(len, VOCAB[1:]))


def tokenize(text: str) -> list[int]:
    ids, at = [], 0
    while at < len(text):
        for length in range(min(_LONGEST, len(text) - at), 0, -1):
            piece = text[at : at + length]
            if piece in ID_OF and piece != EOS:
                ids.append(ID_OF[piece])
                at += length
                break
        else:
            raise ValueError(f"no token for {text[at]!r}")
    return ids


def detokenize(ids: list[int]) -> str:
    return "".join(VOCAB[i] for i in ids if i != 0)


@cache
def _distribution(context: tuple[int, ...]) -> tuple[float, ...]:
    digest = hashlib.shake_128(repr(context).encode()).digest(2 * len(VOCAB))
    logits = [(digest[2 * i] * 256 + digest[2 * i + 1]) / 6000 for i in range(len(VOCAB))]
    total = math.log(sum(map(math.exp, logits)))
    return tuple(logit - total for logit in logits)


def logprobs_after(ids: list[int]) -> tuple[float, ...]:
    """Log probabilities of the next token; only the last five tokens matter."""
    return _distribution(tuple(ids[-5:]))


def input_logprobs(ids: list[int]) -> list[float | None]:
    """Of each token given those before it; the first has none."""
    return [None] + [logprobs_after(ids[:i])[ids[i]] for i in range(1, len(ids))]


def generate(ids: list[int], max_new_tokens: int) -> list[int]:
    """Greedy, up to the end token, which is not returned."""
    out: list[int] = []
    while len(out) < max_new_tokens:
        row = logprobs_after(ids + out)
        token = max(range(len(row)), key=row.__getitem__)
        if token == 0:
            break
        out.append(token)
    return out


def smallest_match(pattern: str) -> str:
    """One short string that a regular expression accepts."""
    return _smallest(sre_parse.parse(pattern))


def _smallest(tree: Any) -> str:
    out = ""
    for op, arg in tree:
        if op is sre.LITERAL:
            out += chr(arg)
        elif op is sre.NOT_LITERAL:
            out += "a" if arg != ord("a") else "b"
        elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            out += _smallest(arg[2]) * max(arg[0], 0)
        elif op is sre.SUBPATTERN:
            out += _smallest(arg[3])
        elif op is sre.BRANCH:
            out += _smallest(arg[1][0])
        elif op is sre.IN:
            out += _one_of(arg)
        elif op is sre.ANY:
            out += "a"
        elif op is not sre.AT:
            raise ValueError(f"no sample for {op}")
    return out


def _one_of(items: Any) -> str:
    negated = items[0][0] is sre.NEGATE
    if negated:
        banned = {chr(arg) for op, arg in items[1:] if op is sre.LITERAL}
        return next(c for c in "ab\"'xyz" if c not in banned)
    op, arg = items[0]
    if op is sre.LITERAL:
        return chr(arg)
    if op is sre.RANGE:
        return chr(arg[0])
    return {sre.CATEGORY_DIGIT: "0", sre.CATEGORY_WORD: "a", sre.CATEGORY_SPACE: " "}[arg]


def smallest_instance(schema: dict[str, Any]) -> str:
    """One JSON text that a schema accepts."""
    return json.dumps(_instance(schema, schema.get("$defs", {})))


def _instance(schema: dict[str, Any], defs: dict[str, Any]) -> Any:
    if "$ref" in schema:
        return _instance(defs[schema["$ref"].rsplit("/", 1)[1]], defs)
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return _instance(schema["anyOf"][0], defs)
    kind = schema.get("type", "object")
    if kind == "object":
        return {name: _instance(inner, defs) for name, inner in schema.get("properties", {}).items()}
    if kind == "array":
        return [_instance(schema["items"], defs)] * schema.get("minItems", 1)
    low = schema.get("minimum", 3)
    return {"integer": low, "number": low + 0.5, "boolean": True, "string": "word", "null": None}[kind]
