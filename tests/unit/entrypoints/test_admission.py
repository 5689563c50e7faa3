"""Bounds on waiting work: never exceeded, always given back, refused with a time to come back."""

from __future__ import annotations

import threading

import httpx
import pytest
from hypothesis import given, strategies as st
from scripted_server import endless, serving, wait_until

from bough.core.errors import Overloaded
from bough.entrypoints.admission import Admission, AdmissionHold
from bough.observability.health import Beat, State


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
    assert (gate.requests, gate.waiting_tokens, gate.refused) == (5, 1000, 0)
    with pytest.raises(Overloaded):
        gate.admit(requests=1, tokens=1)


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
    places: list[AdmissionHold] = []
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


class Machine:
    """An engine that begins `rate` requests a second and runs each for a while; its clock is the test's."""

    def __init__(self, rate: float) -> None:
        self.now = 100.0
        self.waiting = 0
        self.begun = 0
        self.longest_s = 0.0
        self._rate = rate
        self._credit = 0.0
        self._arrived: list[float] = []

    def beat(self) -> Beat:
        return Beat(1, 0.0, State.READY, 8, self.waiting, 1, self.begun)

    def take(self) -> None:
        self.waiting += 1
        self._arrived.append(self.now)

    def pass_time(self, seconds: float) -> int:
        """How many have begun meanwhile."""
        self.now += seconds
        self._credit = min(self._credit + seconds * self._rate, 10.0 + self.waiting)
        began = min(self.waiting, int(self._credit))
        self._credit -= began
        for _ in range(began):
            self.longest_s = max(self.longest_s, self.now - self._arrived.pop(0))
        self.waiting -= began
        self.begun += began
        return began


@pytest.mark.parametrize(("rate", "arrivals"), [(2.0, 20.0), (0.5, 5.0), (30.0, 100.0)])
def test_nobody_waits_longer_than_allowed(rate: float, arrivals: float) -> None:
    """Many more come than can be served, for ten minutes: those that are let in wait a minute at most."""
    engine = Machine(rate)
    gate = Admission(max_requests=10**6, max_tokens=10**9, max_wait_s=60, look=engine.beat, clock=lambda: engine.now)
    refused: list[Overloaded] = []
    places: list[AdmissionHold] = []
    for _ in range(int(600 * arrivals)):
        try:
            places.append(gate.admit(requests=1, tokens=10))
            engine.take()
        except Overloaded as error:
            refused.append(error)
        engine.pass_time(1 / arrivals)
    assert all("--max-queue-wait-s" in error.fix and 1 <= error.retry_after_s <= 60 for error in refused)
    assert engine.longest_s < 75
    assert engine.longest_s > 30, "and the queue is used"
    served = engine.begun / 600
    assert served > 0.9 * rate, "the engine has always something to do"
    assert len(refused) == pytest.approx(600 * (arrivals - rate) - 60 * rate, rel=0.2)


def test_a_server_that_keeps_up_refuses_nobody() -> None:
    engine = Machine(50.0)
    gate = Admission(max_requests=10**6, max_tokens=10**9, max_wait_s=60, look=engine.beat, clock=lambda: engine.now)
    for burst in (2000, 40, 1000, 10):
        for _ in range(burst):  # at once, and then a pause
            gate.admit(requests=1, tokens=10)
            engine.take()
        for _ in range(600):
            engine.pass_time(0.1)
    assert gate.refused == 0


def test_without_a_heartbeat_or_a_limit_nothing_is_expected() -> None:
    engine = Machine(0.001)
    for settings in ({"max_wait_s": 0.0, "look": engine.beat}, {"max_wait_s": 60.0}):
        gate = Admission(max_requests=10**6, max_tokens=10**9, clock=lambda: engine.now, **settings)  # type: ignore[arg-type]
        for _ in range(500):
            gate.admit(requests=1, tokens=1)
            engine.take()
            engine.pass_time(0.1)
        assert (gate.requests, gate.refused) == (500, 0)
