"""Joining by name: where branches begin, what the engine is asked, and what clients are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bough.config.default_model import default_model_path
from bough.core.errors import Conflict, InvalidRequest, NotFound
from bough.core.messages import JoinBranches, Recall, ToEngine, pack_ids
from bough.engine_client.joins import PREFIX, JoinAsk, Joins, parse_join
from bough.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(default_model_path())


class Engine:
    """Keeps prompts by name and joins them as lists."""

    def __init__(self, namespace: str = "") -> None:
        self.kept: dict[tuple[str, str], list[int]] = {}
        self.joins: list[JoinBranches] = []
        self.namespace = namespace

    def keep(self, name: str, text: str) -> list[int]:
        ids = TOKENIZER.encode(text)
        self.kept[self.namespace, name] = ids
        return ids

    async def call(self, message: Callable[[int], ToEngine], *, replica: int | None = None) -> dict[str, Any]:
        asked = message(1)
        match asked:
            case Recall():
                try:
                    return {"ids": [pack_ids(self.kept[asked.namespace, name]) for name in asked.names]}
                except KeyError:
                    raise Conflict(what="the KV can't be reached") from None
            case JoinBranches():
                self.joins.append(asked)
                first, *others = [self.kept[asked.namespace, name] for name in asked.branches]
                parts = zip(others, asked.starts[1:], strict=True)
                ids = [*first, *(token for own, start in parts for token in own[start:])]
                self.kept[asked.joined, ""] = ids
                return {"ids": pack_ids(ids), "tokens": len(ids), "computed_tokens": 0}
        raise AssertionError(f"nobody asks {asked}")


async def test_a_join_can_be_gone_on_from_through_any_process() -> None:
    engine = Engine("tenant\n")
    parent = engine.keep("p", "A story.<|im_end|>\n")
    own = [engine.keep(name, "A story.<|im_end|>\n" + text) for name, text in (("a", "One day"), ("b", "Two days"))]
    here, there = Joins(engine.call, TOKENIZER), Joins(engine.call, TOKENIZER)
    reply = await here.join(JoinAsk("p", ("a", "b")), "tenant\n")
    assert reply["success"] is True
    assert reply["computed_tokens"] == 0
    assert reply["session_id"].startswith(PREFIX)
    ids = [*own[0], *own[1][len(parent) :]]
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "A story.<|im_end|>\nOne dayTwo days"
    for joins in (here, there):
        assert (await joins.ids("tenant\n", reply["session_id"])).tolist() == ids
        with pytest.raises(NotFound):
            await joins.ids("somebody else\n", reply["session_id"])


async def test_refusals_are_answers() -> None:
    engine = Engine()
    engine.keep("p", "The sky is blu")
    engine.keep("a", "The sky is blue and wide")
    engine.keep("b", "The sea is deep")
    joins = Joins(engine.call, TOKENIZER)
    for name in ("a", "b", "unknown"):
        reply = await joins.join(JoinAsk("p", (name,)))
        assert reply["success"] is False
        assert "begin with its parent" in reply["message"] or "reached" in reply["message"]
    assert not engine.joins


async def test_line_breaks_that_are_other_tokens_before_a_word() -> None:
    """At the end of a text two line breaks are one token, before a word they are two."""
    engine = Engine()
    parent, branch = engine.keep("p", "Facts:\n\n"), engine.keep("a", "Facts:\n\nOaks grow")
    assert branch[: len(parent)] != parent
    assert (await Joins(engine.call, TOKENIZER).join(JoinAsk("p", ("a", "a"))))["success"]
    (asked,) = engine.joins
    assert [TOKENIZER.decode(branch[:start]) for start in asked.starts] == ["Facts:\n\n"] * 2
    assert (await Joins(engine.call, None).join(JoinAsk("p", ("a",))))["success"] is False


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="ab é\n.<|im_end|>世界🙂", max_size=12), st.text(alphabet="ab é\n.世界🙂", max_size=12))
def test_a_branch_begins_where_its_parent_ends(parent: str, own: str) -> None:
    joins = Joins(Engine().call, TOKENIZER)
    ids = np.array(TOKENIZER.encode(parent + own), np.int32)
    try:
        start = joins._end_of(np.array(TOKENIZER.encode(parent), np.int32), ids)
    except Conflict:
        return
    assert TOKENIZER.decode(ids[:start].tolist(), skip_special_tokens=False) == parent
    assert TOKENIZER.decode(ids[start:].tolist(), skip_special_tokens=False) == own


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"src_rids": ["a"]},
        {"dst_rid": "p"},
        {"src_rids": [], "dst_rid": "p"},
        {"src_rids": "a", "dst_rid": "p"},
        {"src_rids": ["a", 3], "dst_rid": "p"},
        {"src_rids": ["a", ""], "dst_rid": "p"},
        {"src_rids": ["a"] * 2000, "dst_rid": "p"},
        {"src_rids": ["a"], "dst_rid": "p" * 1000},
        {"src_rids": ["a"], "dst_rid": "p", "position_ids_offset": [1, 2]},
        {"src_rids": ["a"], "dst_rid": "p", "position_ids_offset": [True]},
        {"src_rids": ["a"], "dst_rid": "p", "position_ids_offset": [2**40]},
    ],
)
def test_wrong_bodies(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        parse_join(fields)


def test_right_bodies() -> None:
    assert parse_join({"src_rids": ("a", "b"), "dst_rid": "p"}) == JoinAsk("p", ("a", "b"))
    shifted = parse_join({"src_rids": ["a"], "dst_rid": "p", "position_ids_offset": [-2]})
    assert shifted == JoinAsk("p", ("a",), (-2,))
