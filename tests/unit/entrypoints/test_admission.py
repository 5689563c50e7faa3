"""Bounds on waiting work: never exceeded, always given back, refused with a time to come back."""

from __future__ import annotations

import threading

import httpx
import pytest
from hypothesis import given, strategies as st
from scripted_server import endless, serving, wait_until

from bough.core.errors import Overloaded
from bough.entrypoints.admission import Admission, Place


def test_requests_are_bounded() -> None:
    gate = Admission(max_requests=2, max_tokens=100)
    first = gate.admit(requests=1, tokens=1)
    gate.admit(requests=1, tokens=1)
    with pytest.raises(Overloaded) as caught:
        gate.admit(requests=1, tokens=1)
    assert caught.value.retry_after_s >= 1
    assert gate.refused == 1
    first.end()
    first.end()  # once is enough
    gate.admit(requests=1, tokens=1)
    assert gate.requests == 2


def test_waiting_tokens_are_bounded_until_the_first_token() -> None:
    gate = Admission(max_requests=10, max_tokens=100)
    place = gate.admit(requests=1, tokens=90)
    with pytest.raises(Overloaded, match="busy"):
        gate.admit(requests=1, tokens=20)
    place.began()
    gate.admit(requests=1, tokens=20)
    assert gate.waiting_tokens == 20


def test_a_lone_request_always_enters() -> None:
    gate = Admission(max_requests=1, max_tokens=10)
    gate.admit(requests=5, tokens=1000)


def test_retry_after_follows_the_pace() -> None:
    now = [0.0]
    gate = Admission(max_requests=1000, max_tokens=10**6, clock=lambda: now[0])
    places = [gate.admit(requests=1, tokens=1) for _ in range(200)]
    for place in places[:100]:
        now[0] += 1.0
        place.end()
    assert gate.retry_after_s() == 10  # a tenth of the 100 that are left, at one a second
    for place in places[100:]:
        place.end()
    assert gate.retry_after_s() == 1


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 50), st.sampled_from(["admit", "began", "end"])), max_size=60)
)
def test_the_account_balances(steps: list[tuple[int, int, str]]) -> None:
    gate = Admission(max_requests=10, max_tokens=120)
    places: list[Place] = []
    for requests, tokens, what in steps:
        if what == "admit":
            alone = gate.requests == 0
            try:
                places.append(gate.admit(requests=requests, tokens=tokens))
            except Overloaded:
                assert not alone
        elif places:
            getattr(places[tokens % len(places)], what)()
        assert gate.requests >= 0
        assert gate.waiting_tokens >= 0
    for place in places:
        place.end()
    assert (gate.requests, gate.waiting_tokens) == (0, 0)


def test_over_the_bound_is_429_before_anything_is_tokenised() -> None:
    with serving(endless(), max_queued_requests=1) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        threads = [
            threading.Thread(target=lambda: httpx.post(f"{running.url}/generate", json={"text": "a"}, timeout=60))
            for _ in range(5)  # four may run, one may wait
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: running.service.admission.requests == 5)
        seen = len(running.engine.seen)
        refused = client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "stream": True}
        )
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"
        assert len(running.engine.seen) == seen
        assert client.get("/health").status_code == 200
        client.post("/abort_request", json={"abort_all": True})
        for thread in threads:
            thread.join(60)
        assert running.service.admission.requests == 0
        assert running.service.admission.waiting_tokens == 0
