"""Large JSON is taken apart and put together again: nothing else comes out than a parser makes of the whole."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from bough.core.errors import InvalidRequest
from bough.entrypoints.http import large_json
from bough.entrypoints.http.large_json import graft, parse_large, survey

T = TypeVar("T")

TEXTS = st.text(alphabet=st.sampled_from('ab"\\\n/é漢🎉\u0001 {[,]}'), max_size=40)
NUMBERS = st.lists(st.sampled_from([0, 7, 333, 131_071, 131_072, 10**9, -5]), max_size=30)
VALUES = st.recursive(
    TEXTS | NUMBERS | st.sampled_from([1, 2.5, True, None]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("klm"), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("_LONG_TEXT", 5), ("_LONG_LIST", 4), ("_PIECE", 24), ("_PLAIN_PIECE", 3)):
        monkeypatch.setattr(large_json, name, size)


def run(work: Generator[None, None, T]) -> T:
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: T = done.value
            return result


def read(raw: bytes) -> Any:
    left, cut = run(parse_large(raw))
    return graft(msgspec.json.decode(left), cut)


def depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


@given(st.dictionaries(st.sampled_from("abc"), VALUES), st.booleans(), st.sampled_from([None, 1]), st.integers(1, 40))
@settings(max_examples=60)
def test_whole_again(value: dict[str, Any], escaped: bool, indent: int | None, block: int) -> None:
    raw = json.dumps(value, ensure_ascii=escaped, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "_BLOCK", block)
        found = run(survey(raw))
        try:
            assert read(raw) == value
        except InvalidRequest as refused:
            if "than integers" not in str(refused):  # which no long list may have
                raise
    assert found.depth == depth(value)
    assert found.strings == strings(value)


def strings(value: Any) -> int:
    """Keys included."""
    if isinstance(value, dict):
        return len(value) + sum(map(strings, value.values()))
    return sum(map(strings, value)) if isinstance(value, list) else int(isinstance(value, str))


@given(
    st.dictionaries(st.sampled_from("ab"), VALUES, min_size=1),
    st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(b'"\\{}[],:1a \x01\xff')), min_size=1, max_size=3),
    st.integers(1, 40),
)
@settings(max_examples=60)
def test_broken_texts_stay_broken(value: dict[str, Any], changes: list[tuple[int, int]], block: int) -> None:
    raw = bytearray(json.dumps(value).encode())
    for place, byte in changes:
        raw[place % len(raw)] = byte
    try:
        wanted: Any = msgspec.json.decode(bytes(raw))
    except (msgspec.DecodeError, UnicodeDecodeError):
        wanted = InvalidRequest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "_BLOCK", block)
        found, said = InvalidRequest, ""
        try:
            found = read(bytes(raw))
        except (InvalidRequest, msgspec.DecodeError, UnicodeDecodeError) as error:
            said = str(error)
    if "name is too long" not in said and "than integers" not in said:  # which only a large text may not have
        assert found == wanted, said


class Nested(msgspec.Struct):
    text: str = ""
    ids: list[int | list[int]] = []


class Kind(msgspec.Struct, frozen=True):
    one: Nested
    some: list[Nested]
    named: dict[str, Any]


def test_structs_get_their_parts_back() -> None:
    long, ids = "x" * 50, list(range(50))
    whole = {
        "one": {"text": long, "ids": [ids, [1]]},
        "some": [{"text": "", "ids": ids}],
        "named": {"a": [long, {"b": ids}], "c": long},
    }
    left, cut = run(parse_large(json.dumps(whole).encode()))
    assert len(left) < 600
    made = graft(msgspec.json.decode(left, type=Kind), cut)
    assert msgspec.to_builtins(made) == whole


def test_numbers_are_shared_and_whole_ones_may_have_a_point() -> None:
    raw = json.dumps({"a": [70_000] * 30, "b": [float(number) for number in range(30)]}).encode()
    found = read(raw)
    assert all(each is found["a"][0] for each in found["a"])
    assert found["b"] == list(range(30))
    assert set(map(type, found["b"])) == {int}
    for wrong in ("1.5", "true", "null"):
        with pytest.raises(InvalidRequest, match="integers"):
            read(json.dumps({"a": [1] * 30}).replace("1]", f"{wrong}]").encode())


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b'{"a":' + b"[" * 65 + b"]" * 65 + b"}", "nested too deeply"),
        (b'{"a":[' + b"{}," * 300_000 + b"1]}", "too many texts, lists and objects"),
        (b'{"a":[' + b'"b",' * 300_000 + b"1]}", "too many texts, lists and objects"),
        (b'{"a":[' + b"1," * 2_200_000 + b"1]}", "too many numbers"),
        (b'{"' + b"a" * 1000 + b'":1}', "name is too long"),
    ],
)
def test_what_is_too_much_is_refused_before_it_is_built(raw: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read(raw)


def test_marks_of_others_mean_nothing() -> None:
    """What stands where something was cut out can't be sent: another process has other marks."""
    for text in ("bough-", "bough-0-0", "bough-" + "0" * 32 + "-0"):
        value = {"a": text, "b": [-(2**60)], "c": "x" * 50}
        assert read(json.dumps(value).encode()) == value
