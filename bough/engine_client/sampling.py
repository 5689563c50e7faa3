"""Sampling parameters, as clients give them, to `SamplingParams`.

`GivenSampling` has the right types and unchecked values. The routes of OpenAI's API make it from their typed bodies;
`read_sampling` makes it from native JSON, gRPC and Python values. `settled` checks sizes and ranges, once.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Final, Literal, get_args

from msgspec import UNSET, Struct, UnsetType

from bough.config.concerns import ServerConfig
from bough.core import bounds
from bough.core.errors import ConfigError, InvalidRequest
from bough.core.sampling import NO_TOP_K, GrammarSpec, SamplingParams
from bough.engine_client.request import Room
from bough.parsers.stop_patterns import BadPattern, compile_patterns, is_plain

ANY_JSON: Final = "$$ANY$$"
"""As `json_schema`: any JSON object."""

_NO_LIMIT: Final = 2**31 - 1
"""As `max_new_tokens`, until the context's length is known."""
_LARGEST: Final = sys.float_info.max
_REAL: Final = (int, float, Real)
_INTEGRAL: Final = (int, Integral)
Constraint = Literal["json_schema", "regex", "ebnf", "structural_tag", "choice"]
"""Native parameters that constrain the answer."""
CONSTRAINTS: Final[tuple[Constraint, ...]] = get_args(Constraint)
Source = str | bool | list[str] | dict[str, Any]
"""A constraint as it was given: its text, a schema, or the choices."""


class GivenSampling(Struct, frozen=True, kw_only=True):
    """Sampling parameters by their native names, as a client gave them. None: not given."""

    max_new_tokens: int | UnsetType | None = UNSET
    """None: no limit but the context's."""
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    sampling_seed: int | None = None
    n: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    stop_regex: str | Sequence[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logit_processor: str | None = None
    custom_params: Mapping[str, bool | int | float | str] | None = None
    beam_width: int | None = None
    bad_words: str | Sequence[str] | None = None
    stream_interval: int | None = None
    constraints: Mapping[Constraint, Source] = {}
    """At most one of them may be non-empty."""


class Sampling(Struct, frozen=True, kw_only=True):
    """Checked sampling parameters and what is sent with them."""

    params: SamplingParams
    room: Room = "at_most"
    """`exact` if the client set `max_new_tokens` itself, `fill` if it set it to null."""
    bad_words: tuple[str, ...] = ()
    """As text: the engine client tokenizes them."""
    every: int | None = None
    """The client's `stream_interval`."""


def parse_sampling(given: Mapping[str, Any] | None, defaults: Mapping[str, Any] | None = None) -> Sampling:
    """Checks native sampling parameters; see `read_sampling` and `settled`. Raises `InvalidRequest`."""
    return settled(read_sampling(given), defaults)


def read_sampling(given: Mapping[str, Any] | None) -> GivenSampling:
    """Native sampling parameters by name, with their types checked. A null value counts as not given, except that
    `max_new_tokens: null` means no limit but the context's. Raises `InvalidRequest` naming the first wrong field."""
    if given is not None and not isinstance(given, Mapping):
        raise _wrong("sampling_params", given, "an object")
    fields: dict[str, Any] = {}
    constraints: dict[Constraint, Source] = {}
    for name, value in (given or {}).items():
        if value is None:
            if name == "max_new_tokens":
                fields[name] = None
        elif name in _READERS:
            field, read = _READERS[name]
            fields[field] = read(name, value)
        elif name in CONSTRAINTS:
            constraints[name] = _source(name, value)
        else:
            raise _unknown(name)
    return GivenSampling(**fields, constraints=constraints)


def settled(given: GivenSampling, defaults: Mapping[str, Any] | None = None) -> Sampling:
    """The parameters with `defaults`, native parameters by name, for what is not given; sizes and ranges checked.

    Raises `InvalidRequest` naming the first wrong field. Ids are checked against the vocabulary later.
    """
    standing_in = read_sampling(defaults) if defaults else _NOTHING_GIVEN
    fields: dict[str, Any] = {}
    for name, (field, make) in _FIELDS.items():
        value = getattr(given, name)
        if value is None:
            value = getattr(standing_in, name)
        if value is not None:
            fields[field] = value if make is None else make(name, value)
    own = given.max_new_tokens
    if own is None:
        fields["max_new_tokens"] = _NO_LIMIT
    elif own is not UNSET:
        fields["max_new_tokens"] = own
    elif isinstance(standing_in.max_new_tokens, int):
        fields["max_new_tokens"] = standing_in.max_new_tokens
    bad_words = given.bad_words if given.bad_words is not None else standing_in.bad_words
    every = given.stream_interval if given.stream_interval is not None else standing_in.stream_interval
    constraints = {**standing_in.constraints, **given.constraints}
    params = SamplingParams(**fields, grammar=_grammar(constraints) if constraints else None)
    params.check()
    return Sampling(
        params=params,
        room="fill" if own is None else "at_most" if own is UNSET else "exact",
        bad_words=() if bad_words is None else _texts("bad_words", bad_words, "bad_words", "bad_word_chars"),
        every=None if every is None else _positive("stream_interval", every),
    )


def sampling_defaults(server: ServerConfig, recommended: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults for parameters that a request does not set: the operator's, then those recommended by the model's
    authors, if these are enabled. Raises `ConfigError`."""
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


# -- types ----------------------------------------------------------------------------------------


def _integer(name: str, value: Any) -> int:
    """An integer; also accepts NumPy's types and floats with integral values."""
    if isinstance(value, bool) or not isinstance(value, _REAL) or value % 1 != 0:
        raise _wrong(name, value, "an integer")
    number = int(value) if isinstance(value, _INTEGRAL) else int(float(value))
    if not -(2**63) <= number < 2**63:
        raise _wrong(name, value, "an integer of 64 bits")
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
    return value


def _text_or_texts(name: str, value: Any) -> str | Sequence[str]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise _wrong(name, value, "a text or a list of texts")
    return value


def _ids(name: str, value: Any) -> list[int]:
    listed = [value] if isinstance(value, int) else value
    if not isinstance(listed, list | tuple | set | frozenset):
        raise _wrong(name, value, "a list of token ids")
    return [_integer(name, each) for each in listed]


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "an object of token ids and numbers")
    bounds.count("logit_bias", value, name)
    return {biased_id(name, token): _number(name, bias) for token, bias in value.items()}


def biased_id(name: str, token: Any) -> int:
    """The token id that a key of `logit_bias` is. Raises `InvalidRequest`."""
    try:
        return int(token)
    except (TypeError, ValueError):
        raise _wrong(name, token, "an object whose keys are token ids") from None


def _custom(name: str, value: Any) -> dict[str, bool | int | float | str]:
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "an object")
    for key, each in value.items():
        if not isinstance(key, str) or not isinstance(each, bool | int | float | str):
            raise _wrong(f"{name}.{key}", each, "a number, a text, true or false")
    return dict(value)


_READERS: Final[dict[str, tuple[str, Callable[[str, Any], Any]]]] = {
    "max_new_tokens": ("max_new_tokens", _integer),
    "min_new_tokens": ("min_new_tokens", _integer),
    "temperature": ("temperature", _number),
    "top_p": ("top_p", _number),
    "top_k": ("top_k", _integer),
    "min_p": ("min_p", _number),
    "frequency_penalty": ("frequency_penalty", _number),
    "presence_penalty": ("presence_penalty", _number),
    "repetition_penalty": ("repetition_penalty", _number),
    "seed": ("sampling_seed", _integer),
    "sampling_seed": ("sampling_seed", _integer),
    "n": ("n", _integer),
    "stop": ("stop", _text_or_texts),
    "stop_token_ids": ("stop_token_ids", _ids),
    "stop_regex": ("stop_regex", _text_or_texts),
    "ignore_eos": ("ignore_eos", _flag),
    "skip_special_tokens": ("skip_special_tokens", _flag),
    "spaces_between_special_tokens": ("spaces_between_special_tokens", _flag),
    "no_stop_trim": ("no_stop_trim", _flag),
    "logit_bias": ("logit_bias", _biases),
    "allowed_token_ids": ("allowed_token_ids", _ids),
    "logit_processor": ("logit_processor", _text),
    "custom_params": ("custom_params", _custom),
    "beam_width": ("beam_width", _integer),
    "bad_words": ("bad_words", _text_or_texts),
    "stream_interval": ("stream_interval", _integer),
}
"""By native name: the field of `GivenSampling`, and what checks the type."""


# -- sizes ----------------------------------------------------------------------------------------


def _top_k(_name: str, value: int) -> int:
    """0 also means the whole vocabulary, as in other servers."""
    return value or NO_TOP_K


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise _wrong(name, value, "an integer of at least 1")
    return value


def _name(name: str, value: str) -> str:
    bounds.count("name_chars", value, name)
    return value


def _texts(name: str, value: str | Sequence[str], most: str, most_chars: str) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    bounds.count(most, listed, name)
    for each in listed:
        bounds.count(most_chars, each, name)
    return tuple(dict.fromkeys(each for each in listed if each))


def _stops(name: str, value: str | Sequence[str]) -> tuple[str, ...]:
    stops = _texts(name, value, "stops", "stop_chars")
    bounds.at_most("all_stops_chars", sum(map(len, stops)), name)
    return stops


def _patterns(name: str, value: str | Sequence[str]) -> tuple[str, ...]:
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


def _some_ids(name: str, value: Sequence[int]) -> tuple[int, ...]:
    bounds.count(name, value, name)
    return tuple(dict.fromkeys(value))


def _some_biases(name: str, value: Mapping[int, float]) -> dict[int, float]:
    bounds.count("logit_bias", value, name)
    return dict(value)


def _some_custom(name: str, value: Mapping[str, bool | int | float | str]) -> dict[str, bool | int | float | str]:
    bounds.count("custom_params", value, name)
    for each in value.values():
        if isinstance(each, str):
            bounds.count("custom_param_chars", each, name)
    return dict(value)


_FIELDS: Final[dict[str, tuple[str, Callable[[str, Any], Any] | None]]] = {
    **{name: (name, None) for name in (
        "min_new_tokens", "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
        "n", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "beam_width",
    )},
    "top_k": ("top_k", _top_k),
    "sampling_seed": ("seed", None),
    "stop": ("stop", _stops),
    "stop_token_ids": ("stop_token_ids", _some_ids),
    "stop_regex": ("stop_regex", _patterns),
    "logit_bias": ("logit_bias", _some_biases),
    "allowed_token_ids": ("allowed_token_ids", _some_ids),
    "logit_processor": ("logit_processor", _name),
    "custom_params": ("custom_params", _some_custom),
}  # fmt: skip
"""By field of `GivenSampling`: the field of `SamplingParams`, and what checks the size."""
_NOTHING_GIVEN: Final = GivenSampling()


# -- constraints ----------------------------------------------------------------------------------


def _source(name: str, value: Any) -> Source:
    """A constraint of the right type."""
    match name:
        case "choice":
            if isinstance(value, str) or (
                isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
            ):
                return [value] if value and isinstance(value, str) else value if value == "" else list(value)
            raise _wrong(name, value, "a text or a list of texts")
        case "json_schema" | "structural_tag":
            if not isinstance(value, str | bool | dict):
                raise _wrong(name, value, "a JSON object")
        case _:
            if not isinstance(value, str):
                raise _wrong(name, value, "a text")
    return value  # type: ignore[no-any-return]


def _grammar(given: Mapping[Constraint, Source]) -> GrammarSpec | None:
    asked = [name for name in CONSTRAINTS if name in given and given[name] != ""]
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
    if isinstance(value, list):
        choices = _texts(name, value, "choices", "choice_chars")
        if not choices:
            raise _wrong(name, value, "a list of texts to choose from")
        source = json.dumps(choices, ensure_ascii=False, separators=(",", ":"))
    elif name == "json_schema" and value == ANY_JSON:
        return GrammarSpec(kind="json", source="")
    elif name in ("json_schema", "structural_tag"):
        source = _json_source(name, value)
    else:
        source = str(value)
    bounds.at_most("grammar_bytes", _num_bytes(name, source), name)
    return GrammarSpec(kind=name, source=source)


def _json_source(name: str, value: str | bool | dict[str, Any]) -> str:
    """The same schema always gives the same text; the order of keys has a meaning and is kept."""
    given: Any = value
    if isinstance(value, str):
        bounds.at_most("grammar_bytes", _num_bytes(name, value), name)
        try:
            given = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                what=f"{name} is not JSON", why=str(error)[:200], fix=f"send {name} as JSON", param=name
            ) from error
    if not isinstance(given, dict | bool) or (name == "structural_tag" and not isinstance(given, dict)):
        raise _wrong(name, given, "a JSON object")
    if name == "json_schema":
        bounds.depth(given, "schema_depth", name)
    return json.dumps(given, ensure_ascii=False, separators=(",", ":"))


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
    known = [*(name for name in _READERS if name != "seed"), *CONSTRAINTS]
    near = difflib.get_close_matches(str(name), known, n=1)
    return InvalidRequest(
        what=f"there is no sampling parameter {str(name)[:60]!r}",
        why=f"known are {', '.join(sorted(known))}",
        fix=f"did you mean {near[0]}?" if near else "remove it",
        param=str(name)[:60],
    )
