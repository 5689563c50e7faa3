"""The front end alone, measured: every number is there, and streams keep a third of a bare server's rate."""

from __future__ import annotations

import pytest

from bough.bench.frontend import FLOORS, measure, verdict

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_every_number_is_there(path: str) -> None:
    # So many that a single round of each takes more CPU time than the clock's tick, if there is time for no more.
    numbers = measure(seconds=0.5, clients=48, streams=16, tokens=100, path=path)
    assert numbers["requests_per_s"] > 0
    assert numbers["streamed_tokens_per_s"] > 0
    assert 0 < numbers["share_of_echo"] < 1.5
    assert numbers["events_per_s"] > 0
    assert 0 < numbers["api_cpu_us_per_streamed_token"] < numbers["api_cpu_us_per_request"]


def test_floors_are_told() -> None:
    assert verdict(dict(FLOORS)) == []
    assert verdict({**FLOORS, "requests_per_s": 1.0}) == ["requests_per_s is 1, its floor 700"]


@pytest.mark.long
def test_a_third_of_what_a_bare_server_streams() -> None:
    best = max((measure(seconds=4) for _ in range(3)), key=lambda numbers: numbers["share_of_echoed_stream"])
    assert best["share_of_echoed_stream"] >= FLOORS["share_of_echoed_stream"], best
