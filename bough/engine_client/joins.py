"""Joined contexts: branches of one prompt, one after the other, whose KV the engine has concatenated without computing
it again. A join is a session that requests continue by its id; any number of them may, at the same time, through any
API process.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from bough.core import bounds
from bough.core.errors import Conflict, InvalidRequest, NotFound, Unavailable
from bough.core.messages import Ids, JoinBranches, Recall, ToEngine, joined_namespace, owned_name, unpack_ids
from bough.engine_client.caller import ANYBODY, Caller
from bough.engine_client.replicas import home_of
from bough.tokenizer import Tokenizer

PREFIX: Final = "join-"
"""Prefix of ids of joined contexts."""
_MAX_REMEMBERED: Final = 256
_MAX_SHIFT: Final = 2**24

Json = dict[str, Any]


class Call(Protocol):
    """Asks an engine (`EngineClient.call`)."""

    def __call__(self, message: Callable[[int], ToEngine], *, replica: int | None = None) -> Awaitable[Json]: ...


@dataclass(frozen=True, slots=True)
class JoinAsk:
    """The names of the requests to join."""

    parent: str
    branches: tuple[str, ...]
    shifts: tuple[int, ...] = ()


def parse_join(fields: Mapping[str, Any]) -> JoinAsk:
    """Reads `{src_rids, dst_rid, position_ids_offset?}`. Raises `InvalidRequest` naming the field."""
    sources, parent, shifts = (fields.get(name) for name in ("src_rids", "dst_rid", "position_ids_offset"))
    if not _name(parent):
        raise _wrong("dst_rid", "the name of the request that the branches go on from")
    if not isinstance(sources, list | tuple) or not sources or not all(map(_name, sources)):
        raise _wrong("src_rids", "a list of names of requests")
    bounds.count("join_branches", sources, "src_rids")
    if shifts is not None:
        whole = isinstance(shifts, list | tuple) and all(type(each) is int for each in shifts)
        if not whole or len(shifts) != len(sources) or any(abs(each) > _MAX_SHIFT for each in shifts):
            raise _wrong("position_ids_offset", "a list with one whole number for each of src_rids")
    return JoinAsk(str(parent), tuple(sources), tuple(shifts or ()))


def _name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= bounds.BOUNDS["rid_chars"].most


def _wrong(name: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(
        what=f"{name} is missing or wrong", why=f"it must be {wanted}", fix=f"send a valid {name}", param=name
    )


def session_namespace(namespace: str, session: str, caller: Caller) -> str:
    """The cache namespace of a caller's joined context."""
    return joined_namespace(caller.namespace(namespace), owned_name(caller.tenant, session))


class Joins:
    """The joined contexts that one API process knows. `call` asks the engine."""

    def __init__(self, call: Call, tokenizer: Tokenizer | None, num_replicas: int = 1) -> None:
        self._call = call
        self._num_replicas = num_replicas
        self._tokenizer = tokenizer
        self._known: dict[str, Ids] = {}

    async def join(self, ask: JoinAsk, namespace: str = "", caller: Caller = ANYBODY) -> Json:
        """Joins and returns `{success, session_id, ...}`, or `{success: False, message}` if that is not possible."""
        own_branches = tuple(owned_name(caller.tenant, name) for name in ask.branches)
        names = (owned_name(caller.tenant, ask.parent), *own_branches)
        try:
            replica, (parent, *branches) = await self._recall(caller.namespace(namespace), names)
            session = self._name_on(replica)
            joined = session_namespace(namespace, session, caller)
            starts = tuple(self._end_of(parent, branch) for branch in branches)
            body = await self._call(
                lambda call: JoinBranches(
                    call=call,
                    namespace=caller.namespace(namespace),
                    branches=own_branches,
                    starts=starts,
                    shifts=ask.shifts,
                    joined=joined,
                ),
                replica=replica,
            )
        except Conflict as refused:
            return {"success": False, "message": refused.sentence()}
        self._remember(joined, unpack_ids(body.pop("ids")))
        return {"success": True, "session_id": session, **body}

    async def ids(self, namespace: str, session: str, caller: Caller = ANYBODY) -> Ids:
        """The tokens of a joined context. Raises `NotFound`."""
        joined = session_namespace(namespace, session, caller)
        if joined not in self._known:
            try:
                self._remember(joined, (await self._recall(joined, ("",)))[1][0])
            except Conflict as gone:
                raise NotFound(
                    what=f"there is no session {session[:80]!r}",
                    why="it never was, or was forgotten",
                    fix="join the branches again, or send the whole text",
                    param="session_params",
                ) from gone
        return self._known[joined]

    async def _recall(self, namespace: str, names: tuple[str, ...]) -> tuple[int, list[Ids]]:
        """The replica that holds all of these requests, and their tokens."""
        for replica in range(self._num_replicas):
            try:
                body = await self._call(lambda call: Recall(call, namespace, names), replica=replica)
            except (Conflict, Unavailable):
                if replica == self._num_replicas - 1:
                    raise
            else:
                return replica, [unpack_ids(packed) for packed in body["ids"]]
        raise AssertionError("the last replica answers or refuses")

    def _name_on(self, replica: int) -> str:
        """A name for a session whose requests all API processes send to this replica (`Replicas.home`)."""
        while True:
            name = PREFIX + secrets.token_hex(16)
            if home_of(name, self._num_replicas) == replica:
                return name

    def _end_of(self, parent: Ids, branch: Ids) -> int:
        """How many of a branch's tokens make up its parent. Raises `Conflict` if no token ends where the parent does.

        The parent's last tokens may be others in the branch: a line break at the end of a text is not always the token
        that it is before a word. The bytes decide.
        """
        size = len(parent)
        if np.array_equal(branch[:size], parent):
            return size
        by_id = self._tokenizer.token_bytes() if self._tokenizer is not None else None
        if by_id is not None:
            wanted, had, end = _spelled(by_id, parent), 0, 0
            for token in branch.tolist():
                if had >= len(wanted):
                    break
                had += len(by_id[token]) if token < len(by_id) else 0
                end += 1
            if _spelled(by_id, branch[:end]) == wanted:
                return end
        raise Conflict(
            what="a branch does not begin with its parent",
            why="it has another text, or its text merges with the parent's into one token",
            fix="end the parent where a token ends in every branch, say after a line break",
        )

    def _remember(self, joined: str, ids: Ids) -> None:
        self._known[joined] = ids
        while len(self._known) > _MAX_REMEMBERED:
            del self._known[next(iter(self._known))]


def _spelled(by_id: list[bytes], ids: Ids) -> bytes:
    return b"".join([by_id[token] for token in ids.tolist() if token < len(by_id)])
