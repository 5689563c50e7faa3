"""Sampling parameters of programs, translated for each kind of backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from bough.lang.config import global_config
from bough.lang.errors import LangError

REGEX_INT = r"[-+]?[0-9]+"
REGEX_FLOAT = r"[-+]?[0-9]*\.?[0-9]+"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r'"[^"\\\n]*"'
DTYPE_REGEX = {"int": REGEX_INT, "float": REGEX_FLOAT, "bool": REGEX_BOOL, "str": REGEX_STR}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one generation. A run has its defaults; `gen` overrides what it names."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    dtype: str | None = None
    regex: str | None = None
    json_schema: str | None = None

    def merged(self, overrides: Mapping[str, Any]) -> SamplingParams:
        """These parameters with `overrides` (already normalised) on top."""
        return replace(self, **overrides) if overrides else self

    def with_stops(self, extra: tuple[str, ...]) -> SamplingParams:
        missing = tuple(stop for stop in extra if stop not in self.stop)
        return replace(self, stop=self.stop + missing) if missing else self

    def constraint(self) -> str | None:
        """Which of regex, json_schema and dtype restricts the output; None when free."""
        for name, value in (("regex", self.regex), ("json_schema", self.json_schema), ("dtype", self.dtype)):
            if value is not None:
                return name
        return None

    def changed(self) -> dict[str, Any]:
        """The parameters that differ from the defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def to_native(self) -> dict[str, Any]:
        """The `sampling_params` object of `POST /generate`."""
        body: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "min_new_tokens": self.min_new_tokens,
            "n": self.n,
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
            "stop_regex": list(self.stop_regex),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": global_config.skip_special_tokens_in_output,
            "spaces_between_special_tokens": global_config.spaces_between_special_tokens_in_out,
        }
        regex = DTYPE_REGEX[self.dtype] if self.dtype is not None else self.regex
        if regex is not None:
            body["regex"] = regex
        if self.json_schema is not None:
            body["json_schema"] = self.json_schema
        return body

    def logprob_fields(self) -> dict[str, Any]:
        """The request-level logprob fields of `POST /generate` that are set."""
        names = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def normalise(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what was not given (None), check the rest and bring it into the shape of `SamplingParams`."""
    given = {name: value for name, value in raw.items() if value is not None}
    for name in ("stop", "stop_regex"):
        if name in given:
            value = given[name]
            given[name] = (value,) if isinstance(value, str) else tuple(value)
    if "stop_token_ids" in given:
        given["stop_token_ids"] = tuple(int(token) for token in given["stop_token_ids"])
    if "dtype" in given:
        given["dtype"] = _dtype_name(given["dtype"])
    for name in ("max_new_tokens", "min_new_tokens", "n"):
        if name in given and (isinstance(given[name], bool) or not isinstance(given[name], int) or given[name] < 0):
            raise LangError(
                what=f"{name} is {given[name]!r}",
                why="it counts tokens or samples",
                fix=f"pass a whole number, {name}=1 or more",
            )
    constraints = [name for name in ("dtype", "regex", "json_schema") if name in given]
    if len(constraints) > 1:
        raise LangError(
            what=f"gen got {' and '.join(constraints)}",
            why="each of them alone decides which text is legal",
            fix="keep one of them",
        )
    return given


def _dtype_name(dtype: Any) -> str:
    name = dtype.__name__ if isinstance(dtype, type) else dtype
    if name not in DTYPE_REGEX:
        raise LangError(
            what=f"dtype {dtype!r} is not known",
            why="a dtype stands for a built-in pattern",
            fix=f"use one of {', '.join(DTYPE_REGEX)}, or regex= / json_schema= / schema=",
        )
    return str(name)
