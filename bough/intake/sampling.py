"""Native sampling parameters, as clients write them, to `SamplingParams`. One table for HTTP, gRPC and Python."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, Final

from msgspec import Struct

from bough.config.concerns import ServerConfig
from bough.core import bounds
from bough.core.errors import ConfigError, InvalidRequest
from bough.core.sampling import NO_TOP_K, GrammarKind, GrammarSpec, SamplingParams
from bough.intake.request import Room
from bough.parsers.stop_patterns import BadPattern, compile_patterns, is_plain

ANY_JSON: Final = "$$ANY$$"
"""As `json_schema`: any JSON object."""

_NO_LIMIT: Final = 2**31 - 1
"""As `max_new_tokens`, until the context's length is known."""
_LARGEST: Final = sys.float_info.max
_REAL: Final = (int, float, Real)
_INTEGRAL: Final = (int, Integral)
_GRAMMARS: Final[dict[str, GrammarKind]] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "structural_tag": "structural_tag",
    "choice": "choice",
}


class Sampling(Struct, frozen=True, kw_only=True):
    """Sampling parameters and what travels with them."""

    params: SamplingParams
    room: Room = "at_most"
    """`exact` if the client set `max_new_tokens` itself, `fill` if it set it to null."""
    bad_words: tuple[str, ...] = ()
    """Still as text: the intake tokenises them."""
    every: int | None = None
    """The client's own `stream_interval`."""


def parse_sampling(given: Mapping[str, Any] | None, defaults: Mapping[str, Any] | None = None) -> Sampling:
    """Checks native sampling parameters. Null means the default, except that `max_new_tokens: null` means no limit but the
    context's; `defaults` stand in for what is not given.

    Raises `InvalidRequest` naming the first wrong field. Ids are checked against the vocabulary later.
    """
    if given is not None and not isinstance(given, Mapping):
        raise _wrong("sampling_params", given, "an object")
    own = {name: value for name, value in (given or {}).items() if value is not None}
    fills = given is not None and "max_new_tokens" in given and given["max_new_tokens"] is None
    merged = {**{name: value for name, value in defaults.items() if value is not None}, **own} if defaults else own
    if "seed" in merged:
        merged.setdefault("sampling_seed", merged.pop("seed"))
    fields: dict[str, Any] = {}
    for name, value in merged.items():
        if name in _READERS:
            field, read = _READERS[name]
            fields[field] = read(name, value)
        elif name not in _ELSEWHERE:
            raise _unknown(name)
    if fills:
        fields["max_new_tokens"] = _NO_LIMIT
    fields["grammar"] = _grammar(merged)
    params = SamplingParams(**fields)
    params.check()
    every = merged.get("stream_interval")
    return Sampling(
        params=params,
        room="fill" if fills else "exact" if "max_new_tokens" in own else "at_most",
        bad_words=_texts("bad_words", merged["bad_words"], "bad_words", "bad_word_chars")
        if "bad_words" in merged
        else (),
        every=None if every is None else _positive("stream_interval", every),
    )


def sampling_defaults(server: ServerConfig, recommended: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in for parameters that a request does not set: the operator's, then what the model's authors recommend,
    if they are to be heeded. Raises `ConfigError`."""
    preferred: dict[str, Any] = json.loads(server.preferred_sampling_params or "{}")
    try:
        parse_sampling(preferred)
    except InvalidRequest as error:
        raise ConfigError(
            what=f"preferred_sampling_params can't be used: {error.what}",
            why=error.why,
            fix=error.fix,
            param="preferred_sampling_params",
        ) from error
    return {**(recommended if server.sampling_defaults == "model" else {}), **preferred}


# -- one value ------------------------------------------------------------------------------------


def _integer(name: str, value: Any) -> int:
    """Also of NumPy's kinds, and of whole numbers with a point."""
    if isinstance(value, bool) or not isinstance(value, _REAL) or value % 1 != 0:
        raise _wrong(name, value, "an integer")
    number = int(value) if isinstance(value, _INTEGRAL) else int(float(value))
    if not -(2**63) <= number < 2**63:
        raise _wrong(name, value, "an integer of 64 bits")
    return number


def _top_k(name: str, value: Any) -> int:
    """0 is how others say "the whole vocabulary"."""
    return _integer(name, value) or NO_TOP_K


def _positive(name: str, value: Any) -> int:
    number = _integer(name, value)
    if number < 1:
        raise _wrong(name, value, "an integer of at least 1")
    return number


def _number(name: str, value: Any) -> float:
    plain = value if isinstance(value, int | float) or not isinstance(value, Real) else float(value)
    if isinstance(plain, bool) or not isinstance(plain, int | float) or not abs(plain) <= _LARGEST:
        raise _wrong(name, value, "a number")
    return float(plain)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "a text")
    bounds.count("name_chars", value, name)
    return value


def _texts(name: str, value: Any, most: str, most_chars: str) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(each, str) for each in listed):
        raise _wrong(name, value, "a text or a list of texts")
    bounds.count(most, listed, name)
    for each in listed:
        bounds.count(most_chars, each, name)
    return tuple(dict.fromkeys(each for each in listed if each))


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = _texts(name, value, "stops", "stop_chars")
    bounds.at_most("all_stops_chars", sum(map(len, stops)), name)
    return stops


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    patterns = _texts(name, value, "stops", "stop_regex_chars")
    try:
        compile_patterns(tuple(pattern for pattern in patterns if not is_plain(pattern)))
    except BadPattern as error:
        raise InvalidRequest(
            what=f"{name} has a pattern that can't be used",
            why=str(error),
            fix="send regular expressions in Python's syntax, without look-around and back references",
            param=name,
        ) from error
    return patterns


def _ids(most: str) -> Callable[[str, Any], tuple[int, ...]]:
    def read(name: str, value: Any) -> tuple[int, ...]:
        listed = [value] if isinstance(value, int) else value
        if not isinstance(listed, list | tuple | set | frozenset):
            raise _wrong(name, value, "a list of token ids")
        bounds.count(most, listed, name)
        return tuple(dict.fromkeys(_integer(name, each) for each in listed))

    return read


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "an object of token ids and numbers")
    bounds.count("logit_bias", value, name)
    biases: dict[int, float] = {}
    for token, bias in value.items():
        try:
            token_id = int(token)
        except (TypeError, ValueError):
            raise _wrong(name, token, "an object whose keys are token ids") from None
        biases[token_id] = _number(name, bias)
    return biases


def _custom(name: str, value: Any) -> dict[str, bool | int | float | str]:
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "an object")
    bounds.count("custom_params", value, name)
    for key, each in value.items():
        if not isinstance(key, str) or not isinstance(each, bool | int | float | str):
            raise _wrong(f"{name}.{key}", each, "a number, a text, true or false")
        if isinstance(each, str):
            bounds.count("custom_param_chars", each, name)
    return dict(value)


_READERS: Final[dict[str, tuple[str, Callable[[str, Any], Any]]]] = {
    "max_new_tokens": ("max_new_tokens", _integer),
    "min_new_tokens": ("min_new_tokens", _integer),
    "temperature": ("temperature", _number),
    "top_p": ("top_p", _number),
    "top_k": ("top_k", _top_k),
    "min_p": ("min_p", _number),
    "frequency_penalty": ("frequency_penalty", _number),
    "presence_penalty": ("presence_penalty", _number),
    "repetition_penalty": ("repetition_penalty", _number),
    "sampling_seed": ("seed", _integer),
    "n": ("n", _integer),
    "stop": ("stop", _stops),
    "stop_token_ids": ("stop_token_ids", _ids("stop_token_ids")),
    "stop_regex": ("stop_regex", _patterns),
    "ignore_eos": ("ignore_eos", _flag),
    "skip_special_tokens": ("skip_special_tokens", _flag),
    "spaces_between_special_tokens": ("spaces_between_special_tokens", _flag),
    "no_stop_trim": ("no_stop_trim", _flag),
    "logit_bias": ("logit_bias", _biases),
    "allowed_token_ids": ("allowed_token_ids", _ids("allowed_token_ids")),
    "logit_processor": ("logit_processor", _text),
    "custom_params": ("custom_params", _custom),
    "beam_width": ("beam_width", _integer),
}
_ELSEWHERE: Final = frozenset({*_GRAMMARS, "bad_words", "stream_interval"})


# -- constraints ----------------------------------------------------------------------------------


def _grammar(given: Mapping[str, Any]) -> GrammarSpec | None:
    if given.keys().isdisjoint(_GRAMMARS):
        return None
    asked = [name for name in _GRAMMARS if name in given and given[name] not in (None, "")]
    if not asked:
        return None
    if len(asked) > 1:
        raise InvalidRequest(
            what=f"{asked[0]} and {asked[1]} were both given",
            why="an answer follows one constraint at a time",
            fix="send one of json_schema, regex, ebnf, structural_tag and choice",
            param=asked[1],
        )
    name = asked[0]
    value = given[name]
    if name == "choice":
        choices = _texts(name, value, "choices", "choice_chars")
        if not choices:
            raise _wrong(name, value, "a list of texts to choose from")
        source = json.dumps(choices, ensure_ascii=False, separators=(",", ":"))
    elif name == "json_schema" and value == ANY_JSON:
        return GrammarSpec(kind="json", source="")
    elif name in ("json_schema", "structural_tag"):
        source = _json_source(name, value)
    elif isinstance(value, str):
        source = value
    else:
        raise _wrong(name, value, "a text")
    bounds.at_most("grammar_bytes", _num_bytes(name, source), name)
    return GrammarSpec(kind=_GRAMMARS[name], source=source)


def _json_source(name: str, value: Any) -> str:
    """The same schema always gives the same text; the order of keys means something and is kept."""
    if isinstance(value, str):
        bounds.at_most("grammar_bytes", _num_bytes(name, value), name)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                what=f"{name} is not JSON", why=str(error)[:200], fix=f"send {name} as JSON", param=name
            ) from error
    if not isinstance(value, dict | bool) or (name == "structural_tag" and not isinstance(value, dict)):
        raise _wrong(name, value, "a JSON object")
    if name == "json_schema":
        bounds.depth(value, "schema_depth", name)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _num_bytes(name: str, source: str) -> int:
    try:
        return len(source.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            what=f"{name} has half a surrogate pair",
            why="it stands for no character",
            fix="write the character",
            param=name,
        ) from error


# -- errors ---------------------------------------------------------------------------------------


def _wrong(name: str, value: Any, wanted: str) -> InvalidRequest:
    shown = repr(value)
    return InvalidRequest(
        what=f"{name} is {shown[:60]}{'...' if len(shown) > 60 else ''}",
        why=f"it must be {wanted}",
        fix=f"send a valid {name}",
        param=name,
    )


def _unknown(name: Any) -> InvalidRequest:
    known = [*_READERS, *_ELSEWHERE]
    near = difflib.get_close_matches(str(name), known, n=1)
    return InvalidRequest(
        what=f"there is no sampling parameter {str(name)[:60]!r}",
        why=f"known are {', '.join(sorted(known))}",
        fix=f"did you mean {near[0]}?" if near else "remove it",
        param=str(name)[:60],
    )
