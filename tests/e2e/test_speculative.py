"""Speculative decoding on a real server: the same answers in fewer steps, the switch, corpora, and what is reported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.browser import Playground, browser, needs_browser
from tests.e2e.conftest import Server
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TEXT = "The quick brown fox jumps over the lazy dog while seven small birds watch from the old oak tree by the river. "
PROMPT = f"{TEXT}{TEXT}{TEXT}The quick brown"
GREEDY = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    settings = {
        "device": "cpu",
        "context_length": 1024,
        "speculative_algorithm": "NGRAM",
        "speculative_adaptive": False,
        "speculative_ngram_capacity": 0,
    }
    server = Server(settings, "--admin-api-key", "s4cret")
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer s4cret"}, timeout=120) as client:
        yield client
    server.end()


def ask(http: httpx.Client, prompt: str, **more: Any) -> dict[str, Any]:
    answer: dict[str, Any] = http.post("/generate", json={"text": prompt, "sampling_params": GREEDY, **more}).json()
    return answer


def test_answers_are_the_same_in_fewer_steps(http: httpx.Client) -> None:
    plain, drafted = ask(http, PROMPT, speculate=False), ask(http, PROMPT)
    assert drafted["output_ids"] == plain["output_ids"]
    off, on = plain["meta_info"], drafted["meta_info"]
    assert (off["spec_verify_ct"], off["spec_accept_length"], off["spec_draft_token_num"]) == (47, 1.0, 0)
    assert on["spec_verify_ct"] < 36
    assert on["spec_accept_length"] == 47 / on["spec_verify_ct"]
    assert on["spec_accept_token_num"] == 47 - on["spec_verify_ct"]
    right = on["spec_accept_histogram"]
    assert (sum(right), sum(n * steps for n, steps in enumerate(right))) == (
        on["spec_verify_ct"],
        on["spec_accept_token_num"],
    )
    assert off["spec_accept_histogram"] == [47]
    assert on["spec_accept_rate"] == on["spec_accept_token_num"] / on["spec_draft_token_num"]


def test_openai_clients_may_switch_it_off(http: httpx.Client) -> None:
    texts = []
    for speculate in (True, False):
        body = {"model": "", "prompt": PROMPT, "temperature": 0, "max_tokens": 24, "return_meta_info": True}
        choice = http.post("/v1/completions", json=body | {"speculate": speculate}).json()["choices"][0]
        texts.append(choice["text"])
        assert (choice["meta_info"]["spec_draft_token_num"] > 0) == speculate
    assert texts[0] == texts[1]


def test_seeded_answers_are_the_same(http: httpx.Client) -> None:
    params = {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 40, "sampling_seed": 7, "ignore_eos": True}
    told = [
        http.post("/generate", json={"text": PROMPT, "sampling_params": params, "speculate": each}).json()
        for each in (True, False)
    ]
    assert told[0]["output_ids"] == told[1]["output_ids"]


def test_a_corpus_is_drafted_from(http: httpx.Client) -> None:
    prompt = "A short list of the days of the week, in order:"
    plain = ask(http, prompt)
    added = http.post("/add_external_corpus", json={"corpus_id": "days", "documents": [prompt + plain["text"]]}).json()
    assert added["success"]
    assert http.get("/list_external_corpora").json()["corpus_token_counts"] == {"days": added["loaded_token_count"]}
    drafted = ask(http, prompt)
    assert drafted["output_ids"] == plain["output_ids"]
    assert drafted["meta_info"]["spec_verify_ct"] < plain["meta_info"]["spec_verify_ct"]
    again = http.post("/add_external_corpus", json={"corpus_id": "days", "token_chunks": [[1, 2, 3]]})
    assert again.status_code == 409
    assert http.post("/remove_external_corpus", json={"corpus_id": "days"}).json()["success"]
    assert http.post("/remove_external_corpus", json={"corpus_id": "days"}).status_code == 409


@pytest.mark.parametrize(
    "body",
    [
        {"corpus_id": "a"},
        {"corpus_id": "", "documents": ["x"]},
        {"corpus_id": "a", "documents": ["x"], "token_chunks": [[1]]},
        {"corpus_id": "a", "documents": [""]},
        {"corpus_id": "a", "token_chunks": [[99_999_999]]},
        {"corpus_id": "a", "file_path": "/no/such/file"},
    ],
)
def test_a_bad_corpus_is_refused(http: httpx.Client, body: dict[str, Any]) -> None:
    answer = http.post("/add_external_corpus", json=body)
    assert answer.status_code == 400, answer.text
    assert http.get("/list_external_corpora").json()["corpus_token_counts"] == {}


def test_numbers_are_reported(http: httpx.Client) -> None:
    ask(http, PROMPT)
    load = http.get("/v1/loads", params={"include": "core"}).json()["loads"][0]["speculative"]
    assert load["accepted_tokens"] == sum(load["accepted_by_position"]) > 0
    assert load["accepted_by_position"] == sorted(load["accepted_by_position"], reverse=True)

    def count(name: str, label: str = "") -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"bough:{name}{{") and label in line)

    assert until(lambda: count("spec_accepted_tokens_total") == load["accepted_tokens"])
    assert count("spec_accepted_by_position_total", 'position="1"') == load["accepted_by_position"][0]


@needs_browser
@pytest.mark.long
def test_the_playground_shows_tokens_per_step(http: httpx.Client, tmp_path: Path) -> None:
    with browser(tmp_path) as driver:
        page = Playground(driver, str(http.base_url).rstrip("/")).ready()
        page.sampling(temperature=0, max_tokens=24)
        page.ask(f"Repeat this word by word: {TEXT}")
        assert until(page.idle)
        assert re.search(r"tok/s · \d\.\d\d tokens per step · 24 tokens", page.stats()), page.stats()
        assert page.complaints() == []
