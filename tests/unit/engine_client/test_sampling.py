from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from bough.core.errors import InvalidRequest
from bough.core.sampling import GrammarSpec, SamplingParams
from bough.engine_client import ANY_JSON, parse_sampling


def test_nothing_given_is_the_default() -> None:
    for given_params in (None, {}, {"temperature": None, "stop": None, "n": None, "json_schema": ""}):
        parsed = parse_sampling(given_params)
        assert parsed.params == SamplingParams()
        assert (parsed.room, parsed.bad_words, parsed.every) == ("at_most", (), None)


def test_every_native_name_reaches_its_field() -> None:
    parsed = parse_sampling(
        {
            "max_new_tokens": 7, "min_new_tokens": 2, "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
            "frequency_penalty": 1, "presence_penalty": -1, "repetition_penalty": 1.5, "sampling_seed": -5, "n": 2,
            "stop": "x", "stop_token_ids": [4, 5], "stop_regex": [r"\d+"], "ignore_eos": True,
            "skip_special_tokens": False, "spaces_between_special_tokens": False, "no_stop_trim": True,
            "logit_bias": {"3": 1.5}, "allowed_token_ids": [1, 2], "logit_processor": "p", "custom_params": {"a": 1},
            "beam_width": 2, "bad_words": ["w"], "stream_interval": 4, "regex": "a+",
        }
    )  # fmt: skip
    assert parsed.params == SamplingParams(
        max_new_tokens=7, min_new_tokens=2, temperature=0.0, top_p=0.5, top_k=3, min_p=0.1, frequency_penalty=1.0,
        presence_penalty=-1.0, repetition_penalty=1.5, seed=-5, n=2, stop=("x",), stop_token_ids=(4, 5),
        stop_regex=(r"\d+",), ignore_eos=True, skip_special_tokens=False, spaces_between_special_tokens=False,
        no_stop_trim=True, logit_bias={3: 1.5}, allowed_token_ids=(1, 2), logit_processor="p",
        custom_params={"a": 1}, beam_width=2, grammar=GrammarSpec(kind="regex", source="a+"),
    )  # fmt: skip
    assert (parsed.room, parsed.bad_words, parsed.every) == ("exact", ("w",), 4)


def test_the_models_defaults_stand_in() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 50}
    parsed = parse_sampling({"temperature": 0.1, "top_p": None}, defaults)
    assert (parsed.params.temperature, parsed.params.top_p, parsed.params.max_new_tokens) == (0.1, 0.9, 50)
    assert parsed.room == "at_most"


WRONG: list[tuple[str, Any]] = [
    ("temperature", "hot"), ("temperature", True), ("temperature", float("nan")), ("temperature", -0.1),
    ("temperature", [1]), ("max_new_tokens", 1.5), ("max_new_tokens", -1), ("max_new_tokens", "5"), ("top_p", 0),
    ("top_p", 1.1), ("top_k", -2), ("min_p", 2), ("n", 0), ("n", 65), ("n", True), ("stop", 5),
    ("stop", ["a", 5]), ("stop", ["x"] * 33), ("stop", "y" * 2000), ("stop", [str(i) + "z" * 1000 for i in range(9)]),
    ("stop_regex", "("), ("stop_regex", "a" * 300), ("stop_token_ids", ["a"]), ("stop_token_ids", {"a": 1}),
    ("logit_bias", [1]), ("logit_bias", {"x": 1}), ("logit_bias", {"1": "a"}), ("ignore_eos", 1),
    ("skip_special_tokens", "yes"), ("sampling_seed", 2**64), ("sampling_seed", "s"), ("custom_params", {"a": []}),
    ("regex", 5), ("json_schema", "{"), ("json_schema", "[1]"), ("json_schema", 5), ("choice", []), ("choice", [1]),
    ("ebnf", "x" * 100_000), ("repetition_penalty", 0), ("frequency_penalty", 3), ("stream_interval", 0),
    ("bad_words", 3), ("allowed_token_ids", "a"), ("allowed_token_ids", []),
    ("logit_bias", {str(i): 1 for i in range(2000)}), ("structural_tag", "true"), ("beam_width", 0), ("min_new_tokens", 500),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_values_name_their_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_sampling({name: value})
    assert (
        caught.value.param == name
        or str(caught.value.param).startswith(name)
        or (name == "sampling_seed" and caught.value.param == "seed")
    )
    assert len(caught.value.sentence()) < 600


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match="temprature") as caught:
        parse_sampling({"temprature": 1})
    assert "temperature" in caught.value.fix


def test_constraints_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest, match="both"):
        parse_sampling({"regex": "a", "ebnf": "b"})
    assert parse_sampling({"regex": "a", "ebnf": "", "json_schema": None}).params.grammar is not None


def test_schemas_are_canonical() -> None:
    as_text = parse_sampling({"json_schema": '{ "type" : "object",  "properties": {"b": {}, "a": {}} }'}).params.grammar
    as_object = parse_sampling({"json_schema": {"type": "object", "properties": {"b": {}, "a": {}}}}).params.grammar
    assert as_text == as_object
    assert as_text is not None
    assert list(json.loads(as_text.source)["properties"]) == ["b", "a"]
    assert parse_sampling({"json_schema": ANY_JSON}).params.grammar == GrammarSpec(kind="json", source="")
    choice = parse_sampling({"choice": ["yes", "no", "yes"]}).params.grammar
    assert choice == GrammarSpec(kind="choice", source='["yes","no"]')


LEAVES = st.none() | st.booleans() | st.floats() | st.text() | st.integers()
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=12), ANYTHING, max_size=4))
def test_anything_is_either_understood_or_refused(given_params: dict[str, Any]) -> None:
    sent = understood(given_params)
    if sent is not None:
        assert sent.n >= 1
        assert sent.max_new_tokens >= 0
        assert 0 < sent.top_p <= 1


def understood(given_params: dict[str, Any]) -> SamplingParams | None:
    """The parameters, which must arrive at the engine as they left; None: they were refused."""
    try:
        params = parse_sampling(given_params).params
    except InvalidRequest:
        return None
    arrived: SamplingParams = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert arrived == params
    return arrived


NAMES = st.sampled_from(
    ["temperature", "top_k", "stop", "logit_bias", "n", "stop_token_ids", "json_schema", "stop_regex"]
)
VALUES = (
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | st.text()
    | st.lists(st.text() | st.integers(), max_size=3)
)


@given(st.dictionaries(NAMES, VALUES))
def test_known_names_with_any_value_are_understood_or_refused(given_params: dict[str, Any]) -> None:
    sent = understood(given_params)
    if sent is None:
        return
    try:
        sent.check(100)
    except InvalidRequest:
        return
    assert all(0 <= each < 100 for each in (*sent.stop_token_ids, *(sent.logit_bias or ())))
    assert sent.temperature >= 0
