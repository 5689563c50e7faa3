"""Sessions against a plain model of them: a dictionary of token lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bough.core.errors import Conflict, InvalidRequest, NotFound
from bough.core.messages import pack_ids
from bough.engine_client.sessions import MAX_TURNS, SessionParams, Sessions, SessionTurn


class Played:
    """A client of one session that keeps its own account."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.sessions = Sessions(lambda rid, _tenant: self.aborted.append(rid))
        self.id = self.sessions.open()
        self.made = 0

    def turn(
        self, own: list[int], said: list[int], *, end: bool = True, failed: bool = False, **where: object
    ) -> SessionTurn:
        params = SessionParams(id=self.id, **where)  # type: ignore[arg-type]
        prompt = np.concatenate([self.sessions.prefix(params), np.asarray(own, np.int32)])
        self.made += 1
        made = self.sessions.begin(params, f"r{self.made}", prompt)
        made.add(pack_ids(said))
        if end:
            self.sessions.end(params, made, failed=failed)
        return made


def test_going_on_branching_and_cutting() -> None:
    played = Played()
    first = played.turn([1, 2], [3])
    second = played.turn([4], [5], rid="r1")
    assert second.prompt.tolist() == [1, 2, 3, 4]
    assert played.turn([9], [], rid="r1").prompt.tolist() == [1, 2, 3, 9]
    assert played.turn([9], [], rid="r2", offset=2).prompt.tolist() == [1, 2, 9]
    assert played.turn([9], [], rid="r2", offset=-1).prompt.tolist() == [1, 2, 3, 4, 9]
    assert played.turn([9], [], rid="r2", drop_previous_output=True).prompt.tolist() == [1, 2, 3, 4, 9]
    assert played.turn([7], []).prompt.tolist() == [7]
    assert first.tokens.tolist() == [1, 2, 3]


def test_replacing_forgets_what_went_on_from_there() -> None:
    played = Played()
    played.turn([1], [2])
    played.turn([3], [4], rid="r1")
    played.turn([5], [6], rid="r2", end=False)
    assert played.turn([8], [], rid="r1", replace=True).prompt.tolist() == [1, 2, 8]
    assert played.aborted == ["r3"]
    for gone in ("r2", "r3"):
        with pytest.raises(NotFound):
            played.turn([1], [], rid=gone)
    played.turn([1], [], replace=True)
    with pytest.raises(NotFound):
        played.turn([1], [], rid="r1")


def test_what_can_not_be() -> None:
    played = Played()
    played.turn([1], [2])
    for offset in (4, -3, -2):
        with pytest.raises(InvalidRequest, match="offset"):
            played.turn([1], [], rid="r1", offset=offset)
    running = played.turn([1], [2], end=False)
    with pytest.raises(Conflict, match="not ended"):
        played.turn([1], [], rid=running.rid)
    with pytest.raises(Conflict, match="has a request"):
        played.sessions.begin(SessionParams(id=played.id), "r1", np.asarray([1], np.int32))
    with pytest.raises(NotFound):
        played.sessions.prefix(SessionParams(id="other"))
    with pytest.raises(NotFound):
        played.sessions.prefix(SessionParams(id=played.id), "somebody")
    failed = played.turn([1], [2], failed=True)
    with pytest.raises(NotFound):
        played.turn([1], [], rid=failed.rid)


def test_closing_ends_what_runs() -> None:
    played = Played()
    played.turn([1], [2], end=False)
    played.sessions.close(played.id)
    assert played.aborted == ["r1"]
    assert len(played.sessions) == 0
    with pytest.raises(NotFound):
        played.sessions.close(played.id)


def test_bounds() -> None:
    now = 0.0
    sessions = Sessions(lambda *_: None, max_sessions=2, max_tokens=100, clock=lambda: now)
    first = sessions.open("a", capacity=10, timeout_s=5)
    with pytest.raises(Conflict):
        sessions.open("a")
    sessions.open(timeout_s=50)
    with pytest.raises(InvalidRequest, match="open"):
        sessions.open()
    with pytest.raises(InvalidRequest, match="11 tokens"):
        sessions.begin(SessionParams(id=first), "r", np.zeros(11, np.int32))
    now = 10.0
    sessions.open("b")
    with pytest.raises(NotFound):
        sessions.prefix(SessionParams(id=first))
    with pytest.raises(InvalidRequest, match="too much"):
        sessions.begin(SessionParams(id="b"), "r", np.zeros(101, np.int32))


def test_a_session_does_not_expire_while_its_request_runs() -> None:
    """However long that takes; its time begins anew when the request has ended."""
    now = 0.0
    sessions = Sessions(lambda *_: None, clock=lambda: now)
    name = sessions.open("a", timeout_s=5)
    turn = sessions.begin(SessionParams(id=name), "r", np.zeros(3, np.int32))
    now = 100.0
    sessions.open()  # what has expired goes now
    turn.add(np.array([7], "<i4").tobytes())
    sessions.end(SessionParams(id=name), turn, failed=False)
    now = 104.0
    sessions.open()
    assert sessions.prefix(SessionParams(id=name, rid="r")).tolist() == [0, 0, 0, 7]
    now = 106.0
    sessions.open()
    with pytest.raises(NotFound):
        sessions.prefix(SessionParams(id=name))


def test_a_session_forgets_its_oldest() -> None:
    played = Played()
    for _ in range(MAX_TURNS + 3):
        played.turn([1], [])
    with pytest.raises(NotFound):
        played.turn([1], [], rid="r3")
    played.turn([1], [], rid="r5")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_walk_gives_the_tokens_of_the_path(data: st.DataObject) -> None:
    played = Played()
    known: dict[str, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        parent = data.draw(st.sampled_from([None, *known]))
        own = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        said = data.draw(st.lists(st.integers(0, 9), max_size=3))
        before = known[parent] if parent else []
        offset = data.draw(st.none() | st.integers(1, len(before))) if before else None
        made = played.turn(own, said, rid=parent, offset=offset)
        expected = [*(before[:offset] if offset else before), *own]
        assert made.prompt.tolist() == expected
        known[made.rid] = [*expected, *said]
