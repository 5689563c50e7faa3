"""Python literals as JSON: read with `ast.parse`, never evaluated."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

_WORDS = {"true": True, "false": False, "null": None}


class NotLiteral(ValueError):
    """The expression is not a literal, or has no JSON form."""


def literal_to_json(text: str) -> str | None:
    """JSON of a Python literal; None if the text is not a literal."""
    try:
        return dump(value_of(parse_expression(text)))
    except NotLiteral:
        return None


def parse_expression(text: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes such as "\d" are kept as the model wrote them
        try:
            return ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise NotLiteral(str(error)) from error


def value_of(node: ast.expr) -> Any:
    """The value of a literal node."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.UnaryOp(op=ast.UAdd(), operand=ast.Constant(value=int() | float() as value)):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [value_of(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): value_of(value) for key, value in zip(keys, values, strict=True)}
        case _:
            raise NotLiteral(type(node).__name__)


def _key(node: ast.expr | None) -> str:
    if node is None:
        raise NotLiteral("dict unpacking")
    key = value_of(node)
    if isinstance(key, str):
        return key
    if key is None or isinstance(key, bool | int | float):
        return json.dumps(key)
    raise NotLiteral("dict key")


def dump(value: Any) -> str:
    """JSON text, never one that cannot be encoded as UTF-8."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
        return text
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise NotLiteral(str(error)) from error
