"""Which replica gets a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from bough.config.concerns import LoadBalance
from bough.core.errors import InvalidRequest, Unavailable
from bough.core.messages import REPLICA_SHIFT, WORKER_SHIFT, Ids, home_replica, home_worker
from bough.engine_client.replicas import Replicas, home_of, merged
from bough.ipc import Endpoints


def ids(*values: int) -> Ids:
    return np.array(values, np.int32)


def text(start: int, length: int = 256) -> Ids:
    return np.arange(start, start + length, dtype=np.int32)


def with_replicas(folder: Path, count: int, method: LoadBalance, body: Callable[[Replicas], None]) -> None:
    async def main() -> None:
        endpoints = Endpoints(str(folder)).replicas(count)
        for each in endpoints:
            Path(each.directory).mkdir(exist_ok=True)
        body(Replicas.connect(endpoints, method))

    done: Awaitable[None] = main()
    asyncio.run(done)  # type: ignore[arg-type]


def test_an_id_names_worker_and_replica() -> None:
    number = (3 << WORKER_SHIFT) | (5 << REPLICA_SHIFT) | 77
    assert (home_worker(number), home_replica(number)) == (3, 5)


def test_each_in_turn(tmp_path: Path) -> None:
    def body(replicas: Replicas) -> None:
        chosen = [replicas.choose(ids(1), "") for _ in range(6)]
        assert sorted(chosen) == [0, 0, 1, 1, 2, 2]
        replicas.set_alive(1, False)
        assert {replicas.choose(ids(1), "") for _ in range(6)} == {0, 2}

    with_replicas(tmp_path, 3, "round_robin", body)


@pytest.mark.parametrize(("method", "chosen"), [("total_requests", 1), ("total_tokens", 0)])
def test_the_idlest(tmp_path: Path, method: LoadBalance, chosen: int) -> None:
    def body(replicas: Replicas) -> None:
        for _ in range(2):
            replicas.began(0, 10)
        replicas.began(1, 500)
        assert replicas.choose(ids(1), "") == chosen
        replicas.ended(1, 500)
        assert replicas.choose(ids(1), "") == 1

    with_replicas(tmp_path, 2, method, body)


def test_where_the_prefix_is_unless_it_is_busy(tmp_path: Path) -> None:
    def body(replicas: Replicas) -> None:
        first = replicas.choose(text(0), "")
        replicas.began(first, 256)
        other = replicas.choose(text(1000), "")
        assert other != first, "a new prompt goes to the idler one"
        replicas.began(other, 256)
        again = np.concatenate([text(0, 200), text(5000, 100)])
        assert replicas.choose(again, "") == first
        assert replicas.choose(text(1000), "") == other
        replicas.began(first, 100_000)
        assert replicas.choose(again, "") == other, "too busy for what is saved"
        assert replicas.choose(text(0), "another tenant") == other

    with_replicas(tmp_path, 2, "prefix", body)


def test_names_keep_requests_together(tmp_path: Path) -> None:
    def body(replicas: Replicas) -> None:
        homes = {replicas.choose(ids(n), "", sticky="session") for n in range(8)}
        assert homes == {home_of("session", 4)}
        (home,) = homes
        replicas.set_alive(home, False)
        assert replicas.choose(ids(1), "", sticky="session") == (home + 1) % 4

    with_replicas(tmp_path, 4, "round_robin", body)


def test_the_client_may_choose(tmp_path: Path) -> None:
    def body(replicas: Replicas) -> None:
        assert replicas.choose(ids(1), "", wanted=1) == 1
        with pytest.raises(InvalidRequest, match="data_parallel_rank is 2"):
            replicas.choose(ids(1), "", wanted=2)
        replicas.set_alive(1, False)
        with pytest.raises(Unavailable, match="replica 1"):
            replicas.choose(ids(1), "", wanted=1)
        replicas.set_alive(0, False)
        with pytest.raises(Unavailable, match="no replica is left"):
            replicas.choose(ids(1), "")

    with_replicas(tmp_path, 2, "prefix", body)


def test_replies_become_one() -> None:
    one = {"aborted": 2, "usage": 0.2, "paused": True, "pages": {"free": 3}, "name": "x"}
    two = {"aborted": 1, "usage": 0.4, "paused": False, "pages": {"free": 4}, "name": "x"}
    assert merged([one]) is one
    assert merged([one, two]) == {
        "aborted": 3, "usage": pytest.approx(0.3), "paused": False, "pages": {"free": 7}, "name": "x"
    }  # fmt: skip
