"""/generate and its neighbours, spoken by a plain HTTP client."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted_server import CONTEXT, EOS, Answer, FakeServer, endless, serving

from bough.engine_client.unserved import UNSERVED
from bough.observability.health import Beat, State


@pytest.fixture(scope="module")
def http(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_generate(http: httpx.Client) -> None:
    answer = http.post("/generate", json={"text": "Hi", "sampling_params": {"max_new_tokens": 5}}).json()
    assert answer["text"] == "Hello there."
    assert answer["output_ids"] == list(b"Hello there.")
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": EOS}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 12, 2)


def test_generate_streams_all_so_far(http: httpx.Client) -> None:
    told = events(http.post("/generate", json={"text": "Hi", "stream": True}))
    assert told[-1]["text"] == "Hello there."
    for before, after in itertools.pairwise(told):
        assert after["text"].startswith(before["text"])
    assert told[-1]["meta_info"]["finish_reason"]["type"] == "stop"
    assert "index" not in told[0]


def test_generate_streams_news_only_where_configured() -> None:
    with serving(incremental_streaming_output=True) as running:
        told = events(httpx.post(f"{running.url}/generate", json={"text": "Hi", "stream": True}))
    assert "".join(each["text"] for each in told) == "Hello there."


def test_generate_batches(http: httpx.Client) -> None:
    body = {"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 1}]}
    answers = http.post("/generate", json=body).json()
    assert [answer["text"] for answer in answers] == ["Hello there."] * 3
    told = events(http.post("/generate", json={**body, "stream": True}))
    assert {each["index"] for each in told} == {0, 1, 2}
    assert http.post("/generate", json={"text": ["a"]}).json()[0]["text"] == "Hello there."


def test_generate_logprobs(http: httpx.Client) -> None:
    body = {"input_ids": [72, 105], "return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 0}
    meta = http.post("/generate", json=body).json()["meta_info"]
    assert meta["output_token_logprobs"][0][:2] == [-0.5, 72]
    assert meta["input_token_logprobs"][0] == [None, 72, None]
    assert meta["output_top_logprobs"][0] == [[-0.5, 72, None]]
    assert meta["output_token_logprobs_length"] == len(meta["output_token_logprobs"]) == 12


def test_the_first_scored_prompt_token_is_null_wherever_it_stands(http: httpx.Client) -> None:
    body = {"input_ids": [72, 105, 33], "return_logprob": True, "top_logprobs_num": 1, "token_ids_logprob": [7]}
    for start in (0, 1, 2):
        meta = http.post("/generate", json={**body, "logprob_start_len": start}).json()["meta_info"]
        assert meta["input_token_logprobs"][0] == [None, body["input_ids"][start], None]
        assert [entry[0] is None for entry in meta["input_token_logprobs"]] == [True] + [False] * (2 - start)
        assert meta["input_top_logprobs"][0] is meta["input_token_ids_logprobs"][0] is None


def test_no_new_tokens_leave_the_scores_of_the_one_that_would_follow(http: httpx.Client) -> None:
    body = {"text": "Hi", "return_logprob": True, "token_ids_logprob": [7], "sampling_params": {"max_new_tokens": 0}}
    answer = http.post("/generate", json=body).json()
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"], meta["completion_tokens"]) == ("", [], 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert (meta["output_token_logprobs"], meta["output_token_logprobs_length"]) == ([[-0.5, 72, None]], 1)
    assert [entry[1] for entry in meta["output_token_ids_logprobs"][0]] == [7]


def test_null_for_the_most_new_tokens_fills_the_context(server: FakeServer, http: httpx.Client) -> None:
    for params, expected in (({}, 128), ({"max_new_tokens": None}, CONTEXT - 2), ({"max_new_tokens": 7}, 7)):
        assert http.post("/generate", json={"text": "Hi", "sampling_params": params}).status_code == 200
        assert server.engine.seen[-1].sampling.max_new_tokens == expected
    least = {"max_new_tokens": None, "min_new_tokens": 1000}
    assert http.post("/generate", json={"text": "Hi", "sampling_params": least}).status_code == 200


def test_stop_ids_that_no_token_has_are_left_out(server: FakeServer, http: httpx.Client) -> None:
    params = {"stop_token_ids": [65, 100_000, -1, 2**40]}
    assert http.post("/generate", json={"text": "Hi", "sampling_params": params}).status_code == 200
    assert server.engine.seen[-1].sampling.stop_token_ids == (65,)
    chat = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "stop_token_ids": [66, 100_000]}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    assert server.engine.seen[-1].sampling.stop_token_ids == (66,)


@pytest.mark.parametrize("off", [[None], [None, None], [], None])
def test_a_field_without_a_value_for_any_prompt_asks_for_nothing(http: httpx.Client, off: object) -> None:
    prompts = ["a"] * (len(off) or 1) if isinstance(off, list) else "a"
    response = http.post("/generate", json={"text": prompts, "lora_path": off, "image_data": off})
    assert response.status_code == 200
    assert "x-bough-ignored-fields" not in response.headers
    assert http.post("/generate", json={"text": ["a", "b"], "lora_path": [None, "mine"]}).status_code == 400


@pytest.mark.parametrize(("word", "number"), [("high", 10), ("medium", 0), ("low", -10), (3, 3)])
def test_priorities_may_be_words(server: FakeServer, http: httpx.Client, word: object, number: int) -> None:
    chat = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "priority": word}
    for path, body in (
        ("/generate", {"text": "Hi", "priority": word}),
        ("/generate", {"text": ["Hi"], "priority": [word]}),
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
        ("/v1/completions", {"prompt": "Hi", "priority": word}),
        ("/v1/responses", {"input": "Hi", "priority": word}),
    ):
        response = http.post(path, json=body)
        assert response.status_code == 200, response.text
        assert server.engine.seen[-1].priority == number
    assert http.post("/generate", json={"text": "Hi", "priority": "urgent"}).status_code == 400


def test_generate_put_works_too(http: httpx.Client) -> None:
    assert http.put("/generate", json={"text": "Hi"}).status_code == 200


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"text": "a", "input_ids": [1]},
        {"text": 5},
        {"text": ["a"] * 8193},
        {"text": ""},
        {"input_ids": [300]},
        {"input_ids": [-1]},
        {"input_ids": [[1], 2]},
        {"text": "a", "sampling_params": 5},
        {"text": "a", "sampling_params": {"temperature": -1}},
        {"text": "a", "sampling_params": {"max_new_tokens": -5}},
        {"text": "a", "sampling_params": {"temprature": 1}},
        {"text": "a", "sampling_params": {"n": 1000}},
        {"text": "a" * 5000},
        {"text": "a", "stream": "yes"},
        {"text": "a", "custom_logit_processor": "x"},
        {"text": ["a"] * 256, "sampling_params": {"n": 33}},
    ],
)
def test_generate_refuses(http: httpx.Client, bad: dict[str, object]) -> None:
    response = http.post("/generate", json=bad)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"].split("; ")) >= 2


def test_unknown_fields_warn(http: httpx.Client) -> None:
    response = http.post("/generate", json={"text": "a", "bogus": 1})
    assert response.status_code == 200
    assert response.headers["x-bough-ignored-fields"] == "bogus"


def test_tokenize_and_back(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "Hé", "return_token_strs": True}).json()
    assert answer["tokens"] == list("Hé".encode())
    assert answer["count"] == 3
    assert answer["max_model_len"] == 4096
    assert answer["token_strs"][0] == "H"
    assert http.post("/v1/detokenize", json={"tokens": answer["tokens"]}).json()["text"] == "Hé"
    many = http.post("/v1/tokenize", json={"prompt": ["a", "bc"]}).json()
    assert many["tokens"] == [[97], [98, 99]]
    assert http.post("/detokenize", json={"tokens": many["tokens"]}).json()["text"] == ["a", "bc"]


def test_tools_that_are_not_to_be_called_are_not_tokenized(http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    plain, offered, none = (
        http.post("/v1/tokenize", json={**asked, **more}).json()["tokens"]
        for more in ({}, {"tools": [tool]}, {"tools": [tool], "tool_choice": "none"})
    )
    assert len(offered) > len(plain)
    assert none == plain


def test_server_info_has_what_was_decided() -> None:
    with serving(facts={"page_size": 16, "dtype": "bfloat16", "device": "cpu"}) as running:
        told = httpx.get(f"{running.url}/server_info").json()
    assert (told["page_size"], told["dtype"], told["device"], told["max_running_requests"]) == (
        16,
        "bfloat16",
        "cpu",
        4,
    )


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompts_ids_where_they_are_asked_for(http: httpx.Client, stream: bool) -> None:
    asked = {"text": ["Hé", "a"], "sampling_params": {"max_new_tokens": 3}, "stream": stream}
    reply = http.post("/generate", json={**asked, "return_prompt_token_ids": True})
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    told = [json.loads(line) for line in lines] if stream else reply.json()
    ended = [each for each in told if each["meta_info"]["finish_reason"] is not None]
    found = {each.get("index", at): each["prompt_token_ids"] for at, each in enumerate(ended)}
    assert found == {0: [72, 195, 169], 1: [97]}
    assert "prompt_token_ids" not in http.post("/generate", json={**asked, "stream": False}).text


def test_no_items_have_no_scores(http: httpx.Client) -> None:
    told = http.post("/v1/score", json={"query": "a", "items": [], "label_token_ids": [1]})
    assert (told.status_code, told.json()["scores"]) == (200, [])
    refused = http.post("/v1/score", json={"query": "a", "label_token_ids": [1]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "items")


def test_tokenize_messages_is_what_chat_computes(http: httpx.Client, server: FakeServer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    ids = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    http.post("/v1/chat/completions", json={"messages": messages})
    from bough.core.messages import unpack_ids

    assert unpack_ids(server.engine.seen[-1].prompt).tolist() == ids


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [999]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [[1], 2]}),
    ],
)
def test_tokenize_refuses(http: httpx.Client, path: str, body: dict[str, object]) -> None:
    assert http.post(path, json=body).status_code == 400


def test_models(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert listed["data"][0]["id"] == "fake"
    assert listed["data"][0]["max_model_len"] == 4096
    assert http.get("/v1/models/fake").json()["id"] == "fake"
    assert http.get("/v1/models/org/fake").json()["id"] == "org/fake"
    missing = http.get("/v1/models/nope")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_model_info(http: httpx.Client) -> None:
    for path in ("/model_info", "/get_model_info"):
        told = http.get(path).json()
        assert told["served_model_name"] == "fake"
        assert told["role_affixes"]["user"] == ["<|im_start|>user\n", "<|im_end|>\n"]
        assert told["is_generation"] is True
        assert told["architectures"] == ["FakeForCausalLM"]


def test_loads(server: FakeServer) -> None:
    told = httpx.get(f"{server.url}/v1/loads").json()
    load = told["loads"][0]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_waiting_tokens"]) == (2, 2, 30)
    assert (load["num_used_tokens"], load["max_total_num_tokens"]) == (50 * 16, 100 * 16)
    assert told["aggregate"]["total_reqs"] == 4
    assert load["queues"]["queued"] == 2
    core = httpx.get(f"{server.url}/v1/loads?include=core").json()["loads"][0]
    assert not {"memory", "queues"} & set(core)
    text = httpx.get(f"{server.url}/v1/loads?format=prometheus").text
    assert 'bough:load_num_running_reqs{dp_rank="0"} 2\n' in text
    assert httpx.get(f"{server.url}/v1/loads?include=weather").status_code == 400
    assert httpx.get(f"{server.url}/v1/loads?dp_rank=0").json()["loads"][0]["dp_rank"] == 0
    for rank in ("3", "-1", "x", ""):
        refused = httpx.get(f"{server.url}/v1/loads?dp_rank={rank}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dp_rank")
    assert httpx.get(f"{server.url}/v1/loads?format=xml").status_code == 400


def test_server_info_tells_everything_but_keys() -> None:
    with serving(api_key="s3cret", admin_api_key="s4cret") as running:
        told = httpx.get(f"{running.url}/server_info", headers={"authorization": "Bearer s3cret"})
    assert told.status_code == 200
    assert "s3cret" not in told.text
    assert "s4cret" not in told.text
    body = told.json()
    assert body["port"] == 30000
    assert body["num_running"] == 1
    assert body["internal_states"][0]["fake"]
    assert body["admission"]["max_requests"] == 4096 + 4


def test_flush_cache(http: httpx.Client, server: FakeServer) -> None:
    assert http.post("/flush_cache").json()["success"] is True
    server.engine.flush_error = "2 requests are running"
    try:
        busy = http.get("/flush_cache")
    finally:
        server.engine.flush_error = ""
    assert busy.status_code == 409
    assert "2 requests are running" in busy.json()["error"]["message"]


def test_abort_by_exact_id() -> None:
    with serving(endless()) as running, httpx.Client(base_url=running.url) as client:
        body = {"text": "a", "rid": "job-7", "stream": True}
        with client.stream("POST", "/generate", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            assert client.post("/abort_request", json={"rid": "job"}).json()["aborted"] == 0
            assert client.post("/abort_request", json={"rid": "job-7"}).json()["aborted"] == 1
            last = [line for line in lines if line.startswith("data: {")][-1]
        assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"
        assert client.post("/abort_request", json={}).status_code == 400
        assert client.post("/abort_request", json={"abort_all": True}).json()["success"] is True


@pytest.mark.parametrize(
    ("beat", "live", "ready"),
    [
        (Beat(1, 0.1, State.READY, 0, 0, 0), 200, 200),
        (Beat(0, float("inf"), State.STARTING, 0, 0, 0), 200, 503),
        (Beat(1, 301.0, State.READY, 1, 0, 0), 503, 503),
        (Beat(1, 0.1, State.DRAINING, 1, 0, 0), 200, 503),
        (Beat(1, 0.1, State.ENDED, 0, 0, 0), 503, 503),
        (Beat(1, 0.1, State.PAUSED, 0, 0, 0), 200, 200),
        (Beat(1, 0.1, State.READY, 0, 0, 2**22 - 2), 503, 503),  # a pid that does not exist
    ],
)
def test_health_is_the_heartbeat(http: httpx.Client, server: FakeServer, beat: Beat, live: int, ready: int) -> None:
    before = server.pulse.beat
    server.pulse.beat = beat
    num_seen = len(server.engine.seen)
    try:
        assert http.get("/livez").status_code == live
        for path in ("/readyz", "/health", "/health_generate"):
            assert http.get(path).status_code == ready
    finally:
        server.pulse.beat = before
    assert len(server.engine.seen) == num_seen  # no probe becomes a request


def test_root_and_docs(http: httpx.Client) -> None:
    assert http.get("/").json()["name"] == "bough"
    assert http.head("/").status_code == 200
    document = http.get("/openapi.json").json()
    assert "/v1/chat/completions" in document["paths"]
    assert "/pause_generation" not in document["paths"]
    assert http.get("/docs", follow_redirects=True).status_code == 200


def test_without_a_tokenizer_ids_go_in_and_out() -> None:
    with (
        serving(Answer(pieces=["", ""]), skip_tokenizer_init=True) as running,
        httpx.Client(base_url=running.url) as client,
    ):
        answer = client.post("/generate", json={"input_ids": [1, 2, 3]})
        assert answer.status_code == 200
        assert "text" not in answer.json()
        assert answer.json()["output_ids"] == [1, 1]
        for path, body in (
            ("/generate", {"text": "a"}),
            ("/tokenize", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/completions", {"prompt": [1], "echo": True}),
        ):
            refused = client.post(path, json=body)
            assert refused.status_code == 400
            assert "skip-tokenizer-init" in refused.json()["error"]["message"]


def test_a_model_without_a_template_says_so() -> None:
    with serving(template=None) as running:
        refused = httpx.post(
            f"{running.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]}
        )
    assert refused.status_code == 400
    assert "/v1/completions" in refused.json()["error"]["message"]


def test_metrics_count() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    with serving() as running, httpx.Client(base_url=running.url) as client:
        client.post("/generate", json={"text": "Hi"})
        told = client.get("/metrics")
        families = {family.name: family for family in text_string_to_metric_families(told.text)}
    assert families["bough:prompt_tokens"].samples[0].value == 2
    assert families["bough:generation_tokens"].samples[0].value == 12
    ended = {sample.labels["finish_reason"]: sample.value for sample in families["bough:requests"].samples}
    assert ended == {"stop": 1, "length": 0, "abort": 0, "error": 0, "given_up": 0}
    assert families["bough:num_queue_reqs"].samples[0].value == 2
    with serving(metrics=False) as running:
        assert httpx.get(f"{running.url}/metrics").status_code == 404


def test_requests_are_logged_without_their_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "bough.entrypoints.service")
    with serving(log_requests=True) as running:
        httpx.post(f"{running.url}/generate", json={"text": "private words", "sampling_params": {"temperature": 0.5}})
    records = [record for record in caplog.records if record.message == "request"]
    assert len(records) == 1
    assert records[0].prompt_tokens == len("private words")
    assert records[0].temperature == 0.5
    assert "private" not in str(vars(records[0]))


def test_level_0_logs_no_parameters(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "bough.entrypoints.service")
    with serving(log_requests=True, log_requests_level=0) as running:
        httpx.post(f"{running.url}/generate", json={"text": "private words", "sampling_params": {"temperature": 0.5}})
    (record,) = [record for record in caplog.records if record.message == "request"]
    assert record.prompt_tokens == len("private words")
    assert not hasattr(record, "temperature")


def test_weights_have_the_operators_version(http: httpx.Client) -> None:
    assert http.post("/generate", json={"text": "Hi"}).json()["meta_info"]["weight_version"] == "default"
    with serving(weight_version="step-7") as running, httpx.Client(base_url=running.url) as client:
        assert client.post("/generate", json={"text": "Hi"}).json()["meta_info"]["weight_version"] == "step-7"
        assert client.get("/model_info").json()["weight_version"] == "step-7"


def test_what_is_too_long_is_cut_where_the_operator_allows_it(http: httpx.Client) -> None:
    long = {"text": "a" * 5000, "sampling_params": {"max_new_tokens": 50}}
    assert http.post("/generate", json=long).status_code == 400
    with serving(allow_auto_truncate=True) as running, httpx.Client(base_url=running.url) as client:
        for body, kept, room in (
            (long, CONTEXT - 1, 1),
            ({"input_ids": [65] * 5000}, CONTEXT - 1, 1),
            ({"text": "a" * 1_000_000}, CONTEXT - 1, 1),
            ({"text": "a" * 4000, "sampling_params": {"max_new_tokens": 500}}, 4000, CONTEXT - 4000),
            ({"text": "a" * 40, "sampling_params": {"max_new_tokens": 500}}, 40, 500),
        ):
            answer = client.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["meta_info"]["prompt_tokens"] == kept
            assert running.engine.seen[-1].sampling.max_new_tokens == room
        chat = {"model": "fake", "messages": [{"role": "user", "content": "a" * 9000}], "max_tokens": 5}
        assert client.post("/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens"] == CONTEXT - 1


def test_parsers_for_texts_of_clients(server: FakeServer) -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    body = {"text": f"Let me see. {call}", "tools": tools, "tool_call_parser": "hermes"}
    found = httpx.post(f"{server.url}/parse_function_call", json=body).json()
    assert found["normal_text"].strip() == "Let me see."
    assert [(each["tool_index"], each["name"]) for each in found["calls"]] == [(0, "get_weather")]
    assert json.loads(found["calls"][0]["parameters"]) == {"city": "Oslo"}
    text = {"text": "<think>A city.</think>Oslo", "reasoning_parser": "qwen3"}
    assert httpx.post(f"{server.url}/separate_reasoning", json=text).json() == {
        "reasoning_text": "A city.",
        "text": "Oslo",
    }
    for path, wrong in (
        ("/parse_function_call", {**body, "tool_call_parser": "nonsense"}),
        ("/parse_function_call", {"text": "a", "tools": tools}),
        ("/separate_reasoning", {"text": "a", "reasoning_parser": "nonsense"}),
        ("/separate_reasoning", {"text": "a"}),
    ):
        answer = httpx.post(server.url + path, json=wrong)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("field", sorted(UNSERVED))
def test_what_nothing_here_does_is_refused_not_ignored(server: FakeServer, field: str) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/generate", {"text": "Hi"}),
        ("/v1/completions", {"prompt": "a"}),
    ):
        if field == "session_params" and path == "/generate":
            continue
        if field == "mm_processor_kwargs" and path != "/v1/completions":
            continue  # requests without media may have it
        on = httpx.post(server.url + path, json={**body, field: {"a": 1}})
        assert (on.status_code, on.json()["error"]["param"]) == (400, field)
        off = httpx.post(server.url + path, json={**body, field: None})
        assert off.status_code == 200


def test_what_no_route_knows_is_named_in_a_header(server: FakeServer) -> None:
    answer = httpx.post(f"{server.url}/generate", json={"text": "Hi", "colour": "red", "log_metrics": True})
    assert answer.status_code == 200
    assert set(answer.headers["x-bough-ignored-fields"].split(",")) == {"colour", "log_metrics"}


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"guided_json": {"type": "object"}}, "json_schema", '{"type":"object"}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"guided_choice": ["a", "b"]}, "choice", '["a","b"]'),
        ({"structured_outputs": {"json": {"type": "object"}}}, "json_schema", '{"type":"object"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a","b"]'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"'),
        ({"structured_outputs": {"json_object": True}}, "json", ""),
    ],
)
def test_constraints_in_the_words_of_vllm(server: FakeServer, fields: dict[str, Any], kind: str, source: str) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi", **fields})
    assert answer.status_code == 200, answer.text
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.source) == (kind, source)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a+", "guided_regex": "b+"}, "guided_regex"),
        ({"guided_json": {"type": "object"}, "structured_outputs": {"json": {"type": "array"}}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "array"}, "json_object": True}}, "structured_outputs"),
        ({"guided_json": {"type": "array"}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_choice": ["a"], "structured_outputs": {"choice": ["b"]}}, "structured_outputs"),
    ],
)
def test_constraints_that_contradict_each_other_are_refused(
    server: FakeServer, fields: dict[str, Any], param: str
) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "different constraints of one kind" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "a+", "guided_regex": "a+", "structured_outputs": {"regex": "a+"}},
        {"regex": "", "guided_regex": "a+"},
        {"regex": "a+", "guided_regex": ""},
        {"regex": "a+", "response_format": {"type": "text"}},
    ],
)
def test_constraints_that_say_the_same_are_one(server: FakeServer, fields: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi", **fields})
    assert answer.status_code == 200, answer.text
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.source) == ("regex", "a+")


def test_flushing_waits_as_long_as_it_is_told(server: FakeServer) -> None:
    server.engine.flush_error = "requests are running"
    timer = threading.Timer(0.3, lambda: setattr(server.engine, "flush_error", ""))
    try:
        assert httpx.post(f"{server.url}/flush_cache").status_code == 409
        assert httpx.post(f"{server.url}/flush_cache?timeout=0.1").status_code == 409
        timer.start()
        assert httpx.post(f"{server.url}/flush_cache?timeout=60").json()["success"] is True
        for wrong in ("x", "-1", "nan", "1e9"):
            assert httpx.post(f"{server.url}/flush_cache?timeout={wrong}").status_code == 400
    finally:
        server.engine.flush_error = ""


@pytest.mark.parametrize("ids", [[True], [5, False], [[7, True]], [1.5], [7, "a"], [None]], ids=str)
def test_what_are_no_token_ids(server: FakeServer, ids: list[object]) -> None:
    answer = httpx.post(f"{server.url}/generate", json={"input_ids": ids})
    assert (answer.status_code, answer.json()["error"]["param"].partition("[")[0]) == (400, "input_ids")
    assert httpx.post(f"{server.url}/generate", json={"input_ids": [1, 0, 1]}).status_code == 200


def test_top_k_of_0_is_the_whole_vocabulary(server: FakeServer) -> None:
    httpx.post(f"{server.url}/generate", json={"text": "Hi", "sampling_params": {"top_k": 0}})
    assert server.engine.seen[-1].sampling.top_k == -1


def test_processed_logprobs_are_asked_for(server: FakeServer) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
    for path, body in (
        ("/generate", {"text": "Hi", "return_logprob": True}),
        ("/v1/completions", {"prompt": "Hi", "logprobs": 1}),
        ("/v1/chat/completions", chat),
    ):
        for asked in (None, False, True):
            assert httpx.post(server.url + path, json={**body, "processed_logprobs": asked}).status_code == 200
            spec = server.engine.seen[-1].logprobs
            assert spec is not None
            assert spec.processed == bool(asked)


def test_vertex(server: FakeServer) -> None:
    asked = {"instances": [{"text": "a"}, {"text": "b"}], "parameters": {"sampling_params": {"max_new_tokens": 30}}}
    told = httpx.post(f"{server.url}/vertex_generate", json=asked).json()
    assert [each["text"] for each in told["predictions"]] == ["Hello there."] * 2
    one = httpx.post(f"{server.url}/vertex_generate", json={"instances": [{"input_ids": [1, 2]}]}).json()
    assert [each["meta_info"]["prompt_tokens"] for each in one["predictions"]] == [2]
    for wrong in ([], [{}], [{"text": "a"}, {"input_ids": [1]}], [{"text": "a", "image": "x"}]):
        refused = httpx.post(f"{server.url}/vertex_generate", json={"instances": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "instances")


def test_load_as_older_clients_read_it(server: FakeServer) -> None:
    (load,) = httpx.get(f"{server.url}/get_load").json()
    assert (load["dp_rank"], load["num_reqs"], load["num_waiting_reqs"]) == (0, 4, 2)
    assert load["num_tokens"] == load["num_used_tokens"] + 30


def test_tokenizer_info(server: FakeServer) -> None:
    told = httpx.get(f"{server.url}/tokenizer_info").json()
    assert (told["eos_token"], told["eos_token_id"], told["vocab_size"]) == ("<|im_end|>", EOS, 258)
    assert "im_start" in told["chat_template"]
    with serving(skip_tokenizer_init=True) as running:
        assert httpx.get(f"{running.url}/tokenizer_info").status_code == 400
