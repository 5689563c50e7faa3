"""Machines that join, differ, fall silent, fail and end: what each side hears."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from bough.core.errors import BoughError, ConfigError
from bough.ipc import group
from bough.ipc.group import GroupEnded, JoinFacts, Leader, Member
from bough.ipc.link import Listener, NotTrusted
from bough.ipc.store import StaleRank, Store, StoreServer
from tests.waiting import until

SECRET = "a long secret"
FACTS = JoinFacts(version="1", settings="s", weights="w", name="a")


class Pair:
    def __init__(self) -> None:
        listener = Listener("127.0.0.1:0", SECRET)
        self.address = listener.address
        self.server = StoreServer([listener], generation=7)
        self.leader = Leader(self.server, FACTS, 2, timeout_s=20)

    def join(self, **changes: Any) -> Member:
        return Member(self.address, SECRET, replace(FACTS, name="b", **changes), 1, timeout_s=5)

    def leader_hears(self) -> BoughError | None:
        error: BoughError | None = until(self.leader.look, 10)
        return error


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(group, "BEAT_S", 0.05)
    monkeypatch.setattr(group, "LOST_S", 0.6)
    made = Pair()
    yield made
    made.server.close()


def test_machines_that_agree_go_on_until_the_first_ends(pair: Pair) -> None:
    member = pair.join()
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        assert pair.leader.look() is None
        assert member.look() is None
        time.sleep(0.02)
    assert member.ready is None
    pair.leader.opened({"model": "tiny"})
    assert until(lambda: member.ready == {"model": "tiny"}, 5)
    pair.leader.close()
    assert until(lambda: isinstance(member.look(), GroupEnded), 5)
    member.close()


@pytest.mark.parametrize("what", ["version", "settings", "weights"])
def test_machines_that_differ_are_named(pair: Pair, what: str) -> None:
    member = pair.join(**{what: "other"})
    error = pair.leader_hears()
    assert isinstance(error, ConfigError)
    assert "machine 1 has" in error.what
    pair.leader.fail(error)
    assert until(lambda: "machine 0: machine 1 has" in str(member.look()), 5)
    member.close()


def test_a_failure_is_told_to_the_other_side(pair: Pair) -> None:
    member = pair.join()
    assert pair.leader.look() is None
    member.fail(BoughError(what="rank 1 was killed"))
    assert "machine 1: rank 1 was killed" in str(pair.leader_hears())
    member.close()


def test_silence_is_noticed_on_both_sides(pair: Pair) -> None:
    member = pair.join()
    assert pair.leader.look() is None
    member._leaving.set()
    began = time.monotonic()
    assert "machine 1 was not heard of" in str(pair.leader_hears())
    assert time.monotonic() - began < 3
    other = Pair()
    gone = other.join()
    other.server.close()
    assert until(lambda: "machine 0 can't be reached" in str(gone.look()), 5)


def test_a_machine_that_never_joins_is_named(pair: Pair) -> None:
    pair.leader._timeout_s = 0.1
    error = pair.leader_hears()
    assert error is not None
    assert "machine 1 did not join within 0.1 s" in error.what


def test_strangers_and_leftovers_are_kept_out(pair: Pair) -> None:
    member = pair.join()
    with pytest.raises(ConfigError, match="machine 1 has joined already"):
        Member(pair.address, SECRET, replace(FACTS, name="c"), 1, timeout_s=5)
    with pytest.raises(NotTrusted):
        Store(pair.address, secret="another secret", timeout_s=1)
    with pytest.raises(StaleRank, match="earlier start"):
        Store(pair.address, secret=SECRET, generation=6, timeout_s=5)
    member.close()
