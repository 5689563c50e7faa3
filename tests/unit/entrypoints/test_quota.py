"""Limits of keys: requests and tokens per minute, over all API workers, and what they use in the metrics."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from scripted_server import Answer, serving, wait_until

from bough.entrypoints.quota import Rates

PER_MINUTE = 60


def test_a_bucket_fills_evenly_and_is_shared(tmp_path: Path) -> None:
    now = 50.0
    one, other = (Rates(tmp_path / "rates", clock=lambda: now) for _ in range(2))
    taken = [rates.take("a", 1, PER_MINUTE) for _ in range(30) for rates in (one, other)]
    assert taken == [0.0] * 60
    assert one.take("a", 1, PER_MINUTE) == pytest.approx(1.0)
    assert other.take("b", 1, PER_MINUTE) == 0.0, "others have buckets of their own"
    now += 2.5
    assert [other.take("a", 1, PER_MINUTE) for _ in range(2)] == [0.0, 0.0]
    assert one.take("a", 1, PER_MINUTE) == pytest.approx(0.5)
    now += 1000.0
    assert one.take("a", 60, PER_MINUTE) == 0.0
    assert one.take("a", 1, PER_MINUTE) > 0, "never more than a minute's worth"


def test_what_is_overdrawn_is_waited_for() -> None:
    now = 50.0
    rates = Rates(None, clock=lambda: now)
    assert rates.take("a", 300, PER_MINUTE, overdraw=True) == 0.0
    assert rates.take("a", 1, PER_MINUTE, overdraw=True) == pytest.approx(241.0)
    rates.use("a", -240, PER_MINUTE)
    now += 1.0
    assert rates.take("a", 1000, PER_MINUTE, overdraw=True) == 0.0


def test_many_names_share_the_room() -> None:
    rates = Rates(None)
    for number in range(20_000):
        assert rates.take(f"name {number}", 1, 1) == 0.0


def keys_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    return str(path)


def test_requests_per_minute(tmp_path: Path) -> None:
    given = keys_file(tmp_path, "slow: {key: a, requests_per_minute: 3}\nfree: b\n")
    with serving(api_keys_file=given) as running, httpx.Client(base_url=running.url) as client:
        slow, free = ({"x-api-key": key} for key in "ab")
        for _ in range(5):
            assert client.get("/v1/models", headers=slow).status_code == 200, "reading is free"
        for path in ("/generate", "/tokenize", "/generate"):
            assert client.post(path, json={"text": "a"}, headers=slow).status_code == 200
        refused = client.post("/tokenize", json={"text": "a"}, headers=slow)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert client.post("/generate", json={"text": "a"}, headers=free).status_code == 200
        said = client.get("/metrics", headers=free).text
        assert 'bough:key_refused_total{key="slow",model_name="fake"} 1.0' in said


def test_tokens_per_minute(tmp_path: Path) -> None:
    """Prompts and answers count; a refused request and a wrong one don't."""
    given = keys_file(tmp_path, "small: {key: a, tokens_per_minute: 100}\n")
    with serving(Answer(pieces=["x" * 30]), api_keys_file=given) as running:
        with httpx.Client(base_url=running.url, headers={"x-api-key": "a"}) as client:
            wrong = {"text": "a" * 50, "sampling_params": {"temperature": -1}}
            assert client.post("/generate", json=wrong).status_code == 400
            assert client.post("/generate", json={"text": "a" * 5000}).status_code == 400, (
                "too long: nothing is charged"
            )
            asked = {"text": "a" * 40}
            assert client.post("/generate", json=asked).status_code == 200
            assert client.post("/generate", json=asked).status_code == 200, "70 of 100 were used"
            refused = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert 20 <= int(refused.headers["retry-after"]) <= 40, "40 tokens are missing"
            said = client.get("/metrics").text
        labels = '{key="small",model_name="fake"}'
        assert f"bough:key_requests_total{labels} 2.0" in said
        assert f"bough:key_prompt_tokens_total{labels} 80.0" in said
        assert f"bough:key_generation_tokens_total{labels} 60.0" in said


def test_clients_that_leave_pay_for_what_was_generated(tmp_path: Path) -> None:
    given = keys_file(tmp_path, "small: {key: a, tokens_per_minute: 1000}\n")
    with serving(Answer(pieces=["x"] * 100_000, delay_s=0.01), api_keys_file=given) as running:
        body, key = {"text": "a", "stream": True}, {"x-api-key": "a"}
        with httpx.stream("POST", f"{running.url}/generate", json=body, headers=key) as reply:
            next(reply.iter_lines())
        wait_until(lambda: not running.service.engine_client.num_live)
        assert not running.service.engine_client._unpaid, "its end has come, and was counted"


def test_keys_are_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = keys_file(tmp_path, "old: a\n")
    with serving(api_keys_file=given) as running, httpx.Client(base_url=running.url) as client:

        def opens(key: str) -> bool:
            return client.get("/v1/models", headers={"x-api-key": key}).status_code == 200

        assert (opens("a"), opens("b")) == (True, False)
        keys_file(tmp_path, "new: b\n")
        assert running.service.reloads.run() == ["keys"]
        assert (opens("a"), opens("b")) == (False, True)
        client.post("/generate", json={"text": "a"}, headers={"x-api-key": "b"})
        assert 'key_requests_total{key="new"' in client.get("/metrics", headers={"x-api-key": "b"}).text
        keys_file(tmp_path, "broken: [")
        assert running.service.reloads.run() == []
        assert opens("b"), "what can't be read changes nothing"
        assert "stay as they were" in caplog.text
