"""Joined KV through real processes: over HTTP, in an Engine, and from a program of the language."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny import make_tiny

import bough
import bough.lang as sgl
from bough.lang.config import global_config

from .conftest import Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PARENT = "Read these three notes about trees, and say what they have in common.\n\n"
NOTES = ["Oaks grow slowly.\n", "Birches grow fast, and die young.\n", "Pines keep their needles in winter.\n"]
ONLY_PREFILL = {"max_new_tokens": 0, "temperature": 0}


@sgl.function
def notes(s, question):  # type: ignore[no-untyped-def]
    s += PARENT
    branches = s.fork(len(NOTES))
    for branch, note in zip(branches, NOTES, strict=True):
        branch += note + "It is called" + sgl.gen("name", max_tokens=5, ignore_eos=True)
    branches.join("concate_and_append")
    s += "\n" + question + sgl.gen("answer", max_tokens=8, ignore_eos=True)
    s += sgl.select("choice", ["all", "none of them"])


def computed(url: str) -> int:
    state = httpx.get(f"{url}/server_info", timeout=60).json()["internal_states"][0]
    return int(state["counters"]["prompt_tokens"])


def test_over_http(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.get("/server_info").json()["kv_join"] is True
        for rid, text in [("p", PARENT), *((f"b{n}", PARENT + note) for n, note in enumerate(NOTES))]:
            body = {"text": text, "rid": rid, "sampling_params": ONLY_PREFILL}
            assert http.post("/generate", json=body).json()["meta_info"]["completion_tokens"] == 0
        before = computed(server.url)
        joined = http.post("/concate_and_append_request", json={"src_rids": ["b0", "b1", "b2"], "dst_rid": "p"}).json()
        assert joined["success"] is True, joined
        assert computed(server.url) == before
        whole = http.post("/tokenize", json={"prompt": "".join([PARENT, *NOTES])}).json()["count"]
        assert joined["tokens"] == pytest.approx(whole, abs=len(NOTES))
        session = {"id": joined["session_id"], "rid": "p"}
        body = {
            "text": "They all",
            "session_params": session,
            "sampling_params": {"max_new_tokens": 4, "temperature": 0},
        }
        answer = http.post("/generate", json=body).json()
        assert answer["meta_info"]["cached_tokens"] == joined["tokens"]
        assert answer["meta_info"]["prompt_tokens"] - joined["tokens"] == computed(server.url) - before
        again = http.post("/generate", json=body | {"text": ["They all", "They all", "None"]}).json()
        assert again[0]["output_ids"] == again[1]["output_ids"] == answer["output_ids"]
        several = {"sampling_params": {"n": 2, "max_new_tokens": 4, "temperature": 0}}
        assert [each["output_ids"] for each in http.post("/generate", json=body | several).json()] == [
            answer["output_ids"]
        ] * 2
        assert http.post("/generate", json=body | {"text": ""}).json()["meta_info"]["completion_tokens"] == 4
        check_refusals(http, body)


def check_refusals(http: httpx.Client, body: dict[str, Any]) -> None:
    unknown = http.post("/concate_and_append_request", json={"src_rids": ["b0", "b9"], "dst_rid": "p"}).json()
    assert unknown["success"] is False
    assert "b9" in unknown["message"]
    wrong = http.post("/concate_and_append_request", json={"src_rids": [], "dst_rid": "p"})
    assert wrong.status_code == 400
    gone = http.post("/generate", json=body | {"session_params": {"id": "join-0000"}})
    assert gone.status_code == 404
    assert http.post("/flush_cache?timeout=30").status_code == 200
    after = http.post("/generate", json=body).json()  # computed again, from the text
    assert after["meta_info"]["cached_tokens"] == 0
    assert after["meta_info"]["completion_tokens"] == 4


def test_a_program_joins_by_kv(tiny_engine: bough.Engine, server: Server) -> None:
    endpoint = sgl.RuntimeEndpoint(server.url)
    answers = []
    for backend in (tiny_engine, endpoint):
        state = notes.run("What is it?", backend=backend, temperature=0)
        join = state.get_meta_info("join")
        assert join["kind"] == "kv", join
        assert join["computed_tokens"] == 0
        assert state.get_meta_info("answer")["cached_tokens"] >= join["tokens"]
        assert state["choice"] in ("all", "none of them")
        answers.append(state["answer"])
    assert answers[0] == answers[1]
    endpoint.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(global_config, "enable_parallel_encoding", False)
        by_text = notes.run("What is it?", backend=tiny_engine, temperature=0)
    assert by_text.get_meta_info("join")["kind"] == "text"
    assert by_text.text().startswith(PARENT + NOTES[0])


def test_a_join_that_cannot_be_says_why(tiny_engine: bough.Engine) -> None:
    """Less than a page, and a branch whose first token begins in its parent's last one: the texts are joined."""

    @sgl.function
    def short(s, parent, parts):  # type: ignore[no-untyped-def]
        s += parent
        branches = s.fork(len(parts))
        branches += list(parts)
        branches.join("concate_and_append")
        s += sgl.gen("answer", max_tokens=2, ignore_eos=True)

    tiny = short.run("One.\n", ["Two.\n", "Three.\n"], backend=tiny_engine, temperature=0)
    assert tiny.get_meta_info("join")["kind"] == "text"
    assert "a page has 16" in tiny.get_meta_info("join")["why"]
    assert tiny.text().startswith("One.\nTwo.\nThree.\n")
    assert tiny.get_meta_info("answer")["join"] == tiny.get_meta_info("join")
    merged = short.run(PARENT + "inter", ["national", "net"], backend=tiny_engine, temperature=0)
    assert merged.get_meta_info("join")["kind"] == "text"
    assert "merges with the parent's" in merged.get_meta_info("join")["why"]
    whole = tiny_engine.generate(
        PARENT + "internationalnet", {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    )
    assert isinstance(whole, dict)
    assert merged["answer"] == whole["text"]


def test_two_ranks_join_as_one(tmp_path: Path) -> None:
    make_tiny("llama-yarn", tmp_path)
    parent, own = (
        [5, 17, 99, 3, 64, 2, 120, 33, 7, 8, 9],
        [[10, 11, 5, 77, 31], [42, 43, 44, 45, 46, 47, 48], [100, 90]],
    )

    def logprobs(ranks: int) -> list[tuple[float, int]]:
        settings = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "max_total_tokens": 2048}
        with bough.Engine(model_path=str(tmp_path), tp_size=ranks, page_size=4, **settings) as engine:
            for rid, ids in (("p", parent), *((f"b{at}", parent + each) for at, each in enumerate(own))):
                engine.generate(input_ids=ids, sampling_params=ONLY_PREFILL, rid=rid)
            joined = engine.concate_and_append(["b0", "b1", "b2"], "p")
            answer = engine.generate(
                input_ids=[61, 62, 63],
                sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
                session_params={"id": joined["session_id"]},
                return_logprob=True,
            )
        assert isinstance(answer, dict)
        assert answer["meta_info"]["cached_tokens"] == joined["tokens"] == 25
        return [(score, token) for score, token, _ in answer["meta_info"]["output_token_logprobs"]]

    one, two = logprobs(1), logprobs(2)
    assert [token for _, token in one] == [token for _, token in two]
    assert max(abs(a - b) for (a, _), (b, _) in zip(one, two, strict=True)) < 1e-4


def test_without_a_prefix_cache_texts_are_joined(tiny_settings: dict[str, Any]) -> None:
    with bough.Engine(**tiny_settings, radix_cache=False) as engine:
        assert engine.get_server_info()["kv_join"] is False
        state = notes.run("What is it?", backend=engine, temperature=0)
        assert state.get_meta_info("join")["kind"] == "text"
        assert engine.concate_and_append(["a"], "b")["success"] is False
