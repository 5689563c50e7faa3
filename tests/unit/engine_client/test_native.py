from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bough.core.errors import InvalidRequest
from bough.core.messages import Delta, End, LogprobSpec, TokenLogprobs, pack_ids
from bough.core.sampling import SamplingParams
from bough.engine_client import DeltaStream, NativeAnswer, Request, native_batch


def test_one_prompt() -> None:
    batch = native_batch(
        {"text": "hi", "sampling_params": {"temperature": 0}, "rid": "r", "stream": True, "input_ids": None}
    )
    assert (batch.single, batch.stream, batch.one_answer) == (True, True, True)
    (request,) = batch.requests
    assert (request.prompt, request.rid, request.stream, request.sampling.temperature) == ("hi", "r", True, 0.0)


def test_many_prompts_share_or_split_options() -> None:
    batch = native_batch(
        {
            "input_ids": [[1, 2], [3]],
            "sampling_params": [{"n": 2}, {"temperature": 0.5}],
            "rid": "base",
            "return_logprob": [True, False],
            "top_logprobs_num": 3,
            "cache_salt": "tenant",
            "priority": [1, 2],
        }
    )
    first, second = batch.requests
    assert not batch.single
    assert (first.rid, second.rid) == ("base_0", "base_1")
    assert (first.sampling.n, second.sampling.temperature) == (2, 0.5)
    assert first.logprobs == LogprobSpec(top=3)
    assert second.logprobs is None
    assert first.namespace == second.namespace != ""
    assert (first.priority, second.priority) == (1, 2)


def test_arrays_are_prompts() -> None:
    assert native_batch({"input_ids": np.arange(3)}).single
    assert len(native_batch({"input_ids": np.zeros((4, 3), np.int32)}).requests) == 4
    assert len(native_batch({"input_ids": [np.arange(3), np.arange(2)]}).requests) == 2
    assert native_batch({"input_ids": [np.array(1), np.array(2)]}).single


def test_scored_ids_may_be_one_list_or_one_each() -> None:
    shared = native_batch({"input_ids": [[1], [2]], "return_logprob": True, "token_ids_logprob": [5, 6]})
    assert [r.logprobs.token_ids for r in shared.requests if r.logprobs] == [(5, 6), (5, 6)]
    each = native_batch({"input_ids": [[1], [2]], "return_logprob": True, "token_ids_logprob": [[5], [6]]})
    assert [r.logprobs.token_ids for r in each.requests if r.logprobs] == [(5,), (6,)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "input_ids"),
        ({"text": 5}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", 5]}, "text"),
        ({"input_ids": "abc"}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"input_ids": np.array(5)}, "input_ids"),
        ({"input_ids": [np.arange(2), np.array(5)]}, "input_ids"),
        ({"input_ids": np.empty((0, 3), np.int32)}, "input_ids"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "rid": ["x"]}, "rid"),
        ({"text": "a", "stream": "yes"}, "stream"),
        ({"text": "a", "return_logprob": 1}, "return_logprob"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 10**6}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "token_ids_logprob": ["x"]}, "token_ids_logprob"),
        ({"text": "a", "return_hidden_states": "some"}, "return_hidden_states"),
        ({"text": "a", "priority": "urgent"}, "priority"),
        ({"text": "a", "cache_salt": "x" * 999}, "cache_salt"),
        ({"text": "a", "sampling_params": "x"}, "sampling_params"),
        ({"text": "a", "image_data": 5}, "image_data"),
        ({"text": "a", "stream_interval": 0}, "stream_interval"),
    ],
)
def test_wrong_requests_name_their_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        native_batch(fields)
    assert caught.value.param == param


def test_too_many_prompts() -> None:
    native_batch({"text": ["a"] * 8192}, bounded=True)
    native_batch({"text": ["a"] * 8193})
    with pytest.raises(InvalidRequest, match="text is too large: 8389632"):
        native_batch({"text": ["a"] * 8193}, bounded=True)


def answer(incremental: bool = False, **request: Any) -> NativeAnswer:
    stream = DeltaStream(1, "rid", 0, np.array([5, 6, 7], np.int32), lambda *_: None)
    asked = Request(prompt=[5, 6, 7], sampling=SamplingParams(), **request)
    return NativeAnswer(stream, asked, incremental=incremental)


END = End(reason="stop", matched="x", prompt_tokens=3, completion_tokens=2, cached_tokens=1, retractions=4)


def test_answers_grow_or_come_in_pieces() -> None:
    first, last = Delta(id=1, text="a", tokens=pack_ids([10])), Delta(id=1, text="b", tokens=pack_ids([11]), end=END)
    growing, pieces = answer(), answer(incremental=True)
    assert [growing.add(d)["text"] for d in (first, last)] == ["a", "ab"]
    shown = [pieces.add(d) for d in (first, last)]
    assert [each["text"] for each in shown] == ["a", "b"]
    assert [each["output_ids"] for each in shown] == [[10], [11]]
    assert shown[0]["meta_info"]["finish_reason"] is None
    assert shown[0]["meta_info"]["completion_tokens"] == 1
    meta = shown[1]["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": "x"}
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == ("rid", 3, 2, 1)
    assert meta["num_retractions"] == 4
    assert meta["e2e_latency"] >= 0


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (End(reason="length", completion_tokens=9), {"type": "length", "length": 9}),
        (End(reason="stop", matched=2), {"type": "stop", "matched": 2}),
        (
            End(reason="error", message="m", status=400, code="c"),
            {"type": "abort", "message": "m", "status_code": 400, "err_type": "c"},
        ),
        (End(reason="abort", message="m"), {"type": "abort", "message": "m", "status_code": None, "err_type": None}),
    ],
)
def test_finish_reasons(end: End, reason: dict[str, Any]) -> None:
    assert answer().add(Delta(id=1, end=end))["meta_info"]["finish_reason"] == reason


def test_logprobs_are_triples() -> None:
    shown = answer(logprobs=LogprobSpec(start=0, top=1, token_ids=(9,))).add(
        Delta(
            id=1,
            tokens=pack_ids([10]),
            end=END,
            logprobs=TokenLogprobs([10], [-0.5], [[(10, -0.5)]], [[(9, -3.0)]], [["ten"]], ["ten"]),
            prompt_logprobs=TokenLogprobs([5, 6], [None, -1.0], [[], [(6, -1.0)]], [[], [(9, -4.0)]]),
        )
    )["meta_info"]
    assert shown["output_token_logprobs"] == [[-0.5, 10, "ten"]]
    assert shown["output_top_logprobs"] == [[[-0.5, 10, "ten"]]]
    assert shown["output_token_ids_logprobs"] == [[[-3.0, 9, None]]]
    assert shown["input_token_logprobs"] == [[None, 5, None], [-1.0, 6, None]]
    assert shown["input_top_logprobs"] == [None, [[-1.0, 6, None]]]
    assert shown["input_token_ids_logprobs"] == [None, [[-4.0, 9, None]]]
    assert shown["output_token_logprobs_length"] == 1


def test_embeddings() -> None:
    vector = np.array([1.0, 2.0], "<f4")
    shown = answer(pool="embed").add(Delta(id=1, embedding=vector.tobytes(), end=END))
    assert shown["embedding"] == [1.0, 2.0]
    assert shown["meta_info"]["prompt_tokens"] == 3
