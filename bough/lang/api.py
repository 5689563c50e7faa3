"""The public functions of the language."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from bough.lang import ir
from bough.lang.backends.resolve import as_backend, default_backend
from bough.lang.choices import ChoicesSamplingMethod, token_length_normalized
from bough.lang.config import global_config
from bough.lang.errors import LangError
from bough.lang.program import Function
from bough.lang.sampling import normalise
from bough.lang.typed_output import schema_of


@overload
def function(func: Callable[..., Any]) -> Function: ...
@overload
def function(*, num_api_spec_tokens: int | None = None) -> Callable[[Callable[..., Any]], Function]: ...
def function(func: Callable[..., Any] | None = None, *, num_api_spec_tokens: int | None = None) -> Any:
    """Make a program of a function `def f(s, ...)` or `async def f(s, ...)`.

    `num_api_spec_tokens` turns on API speculation: one call to a remote API generates that many tokens ahead, and
    later expressions are served from them as long as the model wrote what the program says.
    """
    if func is not None:
        return Function(func, num_api_spec_tokens)
    return lambda inner: Function(inner, num_api_spec_tokens)


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesSamplingMethod | None = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, Any] | None = None,
    schema: Any = None,
) -> ir.Gen | ir.Select:
    """Generate text, into the variable `name`.

    `dtype` (int, float, bool, str), `regex` and `json_schema` restrict the text; `schema`, a pydantic model or a
    dataclass, also makes the variable an object of that type. `choices` turns the call into `select`.
    """
    if choices is not None:
        chosen_by = choices_method if choices_method is not None else token_length_normalized
        return select(name, choices, 0.0 if temperature is None else temperature, chosen_by)
    if schema is not None:
        if json_schema is not None:
            raise LangError(
                what="gen got schema and json_schema", why="schema already says what is legal", fix="keep one of them"
            )
        json_schema = schema_of(schema)
    if regex is not None:
        _check_regex(regex, "regex")
    for pattern in (stop_regex,) if isinstance(stop_regex, str) else stop_regex or ():
        _check_regex(pattern, "stop_regex")
    overrides = normalise(
        {
            "max_new_tokens": max_tokens,
            "min_new_tokens": min_tokens,
            "n": n,
            "stop": stop,
            "stop_token_ids": stop_token_ids,
            "stop_regex": stop_regex,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "frequency_penalty": frequency_penalty,
            "presence_penalty": presence_penalty,
            "ignore_eos": ignore_eos,
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num,
            "return_text_in_logprobs": return_text_in_logprobs,
            "dtype": dtype,
            "regex": regex,
            "json_schema": _schema_text(json_schema),
        }
    )
    return ir.Gen(name, overrides, schema)


def gen_int(name: str | None = None, max_tokens: int | None = None, **parameters: Any) -> ir.Gen | ir.Select:
    """`gen` of a whole number; the variable holds its digits as text."""
    return gen(name, max_tokens, dtype=int, **parameters)


def gen_string(name: str | None = None, max_tokens: int | None = None, **parameters: Any) -> ir.Gen | ir.Select:
    """`gen` of a string in double quotes."""
    return gen(name, max_tokens, dtype=str, **parameters)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod = token_length_normalized,
) -> ir.Select:
    """Let the model choose one of `choices` by likelihood."""
    if choices is None or isinstance(choices, str) or not choices:
        raise LangError(what="select got no choices", why="it picks one of them", fix='pass choices=["yes", "no"]')
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise LangError(
                what=f"{choice!r} is not a choice", why="a choice is text with at least one token", fix="pass strings"
            )
    if not isinstance(choices_method, ChoicesSamplingMethod):
        raise LangError(
            what=f"choices_method={choices_method!r} can't choose",
            why="it must be a ChoicesSamplingMethod",
            fix="use token_length_normalized, or an instance of your subclass",
        )
    return ir.Select(name, tuple(choices), temperature, choices_method)


def image(source: str | bytes) -> ir.Image:
    """An image: path, URL, data URL, or the file's bytes."""
    return ir.Image(source)


def video(source: str | bytes, num_frames: int) -> ir.Video:
    """A video, of which `num_frames` frames are used."""
    return ir.Video(source, num_frames)


def separate_reasoning(expr: ir.Expr, model_type: str) -> ir.SeparateReasoning:
    """Run `expr`; the reasoning of each text it generates is moved to `<name>_reasoning_content`."""
    return ir.SeparateReasoning(expr, model_type)


def system(expr: object = None) -> ir.Sequential:
    return _role("system", expr)


def user(expr: object = None) -> ir.Sequential:
    return _role("user", expr)


def assistant(expr: object = None) -> ir.Sequential:
    return _role("assistant", expr)


def system_begin() -> ir.RoleBegin:
    return ir.RoleBegin("system")


def system_end() -> ir.RoleEnd:
    return ir.RoleEnd("system")


def user_begin() -> ir.RoleBegin:
    return ir.RoleBegin("user")


def user_end() -> ir.RoleEnd:
    return ir.RoleEnd("user")


def assistant_begin() -> ir.RoleBegin:
    return ir.RoleBegin("assistant")


def assistant_end() -> ir.RoleEnd:
    return ir.RoleEnd("assistant")


def set_default_backend(backend: Any) -> None:
    """Set the backend of programs that are run without `backend=`."""
    as_backend(backend)
    global_config.default_backend = backend


def flush_cache(backend: Any = None) -> None:
    """Empty the prefix cache of the backend's server."""
    as_backend(backend or default_backend()).flush_cache()


def get_server_info(backend: Any = None) -> dict[str, Any]:
    """Information about the backend's server."""
    return as_backend(backend or default_backend()).get_server_info()


def _role(role: str, expr: object) -> ir.Sequential:
    middle = () if expr is None else ir.parts(ir.as_expr(expr))
    return ir.Sequential((ir.RoleBegin(role), *middle, ir.RoleEnd(role)))


def _check_regex(pattern: str, parameter: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise LangError(what=f"{parameter}={pattern!r} is not a regular expression", why=str(error)) from error


def _schema_text(schema: str | Mapping[str, Any] | None) -> str | None:
    if schema is None:
        return None
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        json.loads(text)
    except ValueError as error:
        raise LangError(
            what="json_schema is not JSON", why=str(error), fix="pass a JSON schema as a dict or as JSON text"
        ) from error
    return text
