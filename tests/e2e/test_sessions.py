"""Sessions through the whole engine: the same answers as whole prompts, and a prefix that is found in the cache."""

from __future__ import annotations

from typing import Any

import pytest

import bough
from bough.core.errors import NotFound

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

GREEDY = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}


def test_going_on_equals_sending_all(tiny_engine: bough.Engine) -> None:
    engine = tiny_engine
    session = engine.open_session()
    ids = list(range(100, 180))
    first: Any = engine.generate(input_ids=ids, sampling_params=GREEDY, session_params={"id": session})
    rid = first["meta_info"]["id"]
    second: Any = engine.generate(
        input_ids=[5, 6, 7], sampling_params=GREEDY, session_params={"id": session, "rid": rid}
    )
    whole = [*ids, *first["output_ids"], 5, 6, 7]
    assert second["meta_info"]["prompt_tokens"] == len(whole)
    assert second["meta_info"]["cached_tokens"] >= len(ids)
    alone: Any = engine.generate(input_ids=whole, sampling_params=GREEDY)
    assert alone["output_ids"] == second["output_ids"]
    branch: Any = engine.generate(
        input_ids=[9], sampling_params=GREEDY, session_params={"id": session, "rid": rid, "offset": 50}
    )
    again: Any = engine.generate(input_ids=[*ids[:50], 9], sampling_params=GREEDY)
    assert branch["output_ids"] == again["output_ids"]
    engine.close_session(session)
    with pytest.raises(NotFound):
        engine.generate(input_ids=[1], session_params={"id": session})
