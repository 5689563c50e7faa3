"""Traffic of all kinds leaves nothing behind. `make soak` runs it for ten minutes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bough.bench.soak import Series, at_rest, served, soak, verdict

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.long
def test_a_short_soak() -> None:
    with served("", ["--device", "cpu", "--no-custom-kernels", "--cpu-threads", "1"]) as (url, process):
        seen = asyncio.run(soak(url, process, seconds=5, clients=8, least=40))
    assert seen["requests"] >= 40
    assert set(seen["statuses"]) <= {"200", "400", "left"}, seen["statuses"]
    assert seen["pages"]["held"] == 0
    assert seen["pages"]["repairs"] == 0
    assert set(seen["processes"]) == {"api", "engine", "detokenizer"}


def test_pages_are_looked_at_when_those_who_left_are_gone() -> None:
    class Client:
        held = [3, 0]

        async def call(self, *_: str) -> Any:
            return {"internal_states": [{"pages": {"held": self.held.pop(0)}}]}

    assert asyncio.run(at_rest(Client())) == {"held": 0}  # type: ignore[arg-type]


@pytest.mark.long
def test_memory_is_flat() -> None:
    """With the custom kernels: without, a thousand requests in this time are too few for a slope, for temporary tensors
    come and go by tens of MiB."""
    with served("", ["--device", "cpu", "--cpu-threads", "1"]) as (url, process):
        seen = asyncio.run(soak(url, process, seconds=180, clients=16))
    assert seen["requests"] > 5000
    assert verdict(seen, clients=16) == []


def test_a_leak_is_seen() -> None:
    leaking = Series(requests=list(range(0, 1000, 10)), bytes=[10**8 + 3000 * at for at in range(0, 1000, 10)])
    assert leaking.slope() == pytest.approx(3000)
    settling = Series(requests=list(range(100)), bytes=[10**7 * min(at, 20) for at in range(100)])
    assert settling.slope() == pytest.approx(0, abs=1)
    healthy = {"bytes_per_request": 12.0, "files": [40, 44], "threads": [9, 9]}
    whole = {"total": 10, "free": 4, "cached": 6, "held": 0, "repairs": 0}
    good = {"statuses": {"200": 5, "left": 1}, "pages": whole, "processes": {"api": healthy}}
    assert verdict(good, clients=4) == []
    bad = {
        "statuses": {"200": 5, "500": 2, "broken: ConnectionResetError": 1},
        "pages": {**whole, "held": 1},
        "processes": {"api": {"bytes_per_request": 3000.0, "files": [40, 400], "threads": [9, 90]}},
    }
    assert len(verdict(bad, clients=4)) == 6
