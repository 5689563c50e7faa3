"""Sessions: requests that continue earlier ones, so that a client sends only the new part. A session is a tree of
requests. A new request starts from the beginning or continues another one (its prompt and answer, or a part of them);
continuing the same one twice creates a branch. Nothing is held in the engine: the tokens are sent again, and the prefix
cache finds them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from msgspec import Struct

from bough.core.errors import Conflict, InvalidRequest, NotFound
from bough.core.media import MediaItem
from bough.core.messages import Ids, unpack_ids
from bough.multimodal.processor import Prepared

MAX_SESSIONS: Final = 4096
MAX_TURNS: Final = 1024
"""Requests that one session remembers."""
MAX_TOKENS: Final = 64 * 1024 * 1024
"""Tokens that all sessions remember together."""
TIMEOUT_S: Final = 3600.0
_NOTHING: Final = np.empty(0, np.int32)


class SessionParams(Struct, frozen=True, kw_only=True):
    """A request's place in a session."""

    id: str
    rid: str | None = None
    """The request to continue; None: start from the beginning."""
    offset: int | None = None
    """Tokens of that request to keep (negative: to drop from its end); None or 0: all are kept."""
    replace: bool = False
    """Forget the requests that continued it before; without `rid`: all requests of the session."""
    drop_previous_output: bool = False
    """Keep that request's prompt only."""


@dataclass(slots=True)
class SessionTurn:
    """One request of a session."""

    rid: str
    parent: str | None
    prompt: Ids
    output: list[bytes] = field(default_factory=list)
    running: bool = True
    items: tuple[MediaItem, ...] = ()
    """The prompt's media."""
    prepared: tuple[Prepared, ...] = ()
    """What `items` were prepared as. Not held in the cache: a request that continues the session may have to prepare them
    again."""

    def add(self, tokens: bytes) -> None:
        """More of its answer."""
        if tokens:
            self.output.append(tokens)

    @property
    def tokens(self) -> Ids:
        """Prompt and answer."""
        return np.concatenate([self.prompt, unpack_ids(b"".join(self.output))])

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + sum(map(len, self.output)) // 4


@dataclass(slots=True)
class _Session:
    capacity: int
    timeout_s: float
    used_s: float
    turns: dict[str, SessionTurn] = field(default_factory=dict)

    def below(self, rid: str) -> list[str]:
        """All requests that continue a request, directly or indirectly."""
        found: list[str] = []
        level = [rid]
        while level:
            level = [turn.rid for turn in self.turns.values() if turn.parent in level]
            found += level
        return found


class Sessions:
    """The open sessions of one API process, by tenant and id. `abort` ends a request by its rid and its tenant."""

    def __init__(
        self,
        abort: Callable[[str, str], object],
        *,
        max_sessions: int = MAX_SESSIONS,
        max_tokens: int = MAX_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._abort = abort
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._clock = clock
        self._sessions: dict[tuple[str, str], _Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(
        self, session_id: str = "", *, capacity: int = 2**31 - 1, timeout_s: float = TIMEOUT_S, tenant: str = ""
    ) -> str:
        """Opens a session and returns its id. `capacity`: tokens that one request of it may have, with its answer.

        Raises `Conflict` if the id is taken, `InvalidRequest` if there are too many.
        """
        self._expire()
        if len(self._sessions) >= self._max_sessions:
            raise InvalidRequest(
                what=f"{len(self._sessions)} sessions are open",
                why="no more are kept",
                fix="close some with /close_session",
            )
        if (tenant, session_id) in self._sessions:
            raise Conflict(what=f"a session {session_id[:80]!r} is open", fix="close it, or choose another id")
        name = session_id or secrets.token_hex(16)
        self._sessions[tenant, name] = _Session(capacity, timeout_s, self._clock())
        return name

    def close(self, session_id: str, tenant: str = "") -> None:
        """Forgets a session and ends its requests. Raises `NotFound`."""
        session = self._get(session_id, tenant)
        self._drop(session, list(session.turns), tenant)
        del self._sessions[tenant, session_id]

    def prefix(self, params: SessionParams, tenant: str = "") -> Ids:
        """The tokens before the request's own. Changes nothing. Raises `NotFound`, `Conflict`, `InvalidRequest`."""
        session = self._get(params.id, tenant)
        if params.rid is None:
            return _NOTHING
        turn = session.turns.get(params.rid)
        if turn is None:
            raise NotFound(
                what=f"the session has no request {params.rid[:80]!r}",
                why="it never had, or forgot it",
                fix="go on from one that it has",
                param="session_params",
            )
        if turn.running and not params.replace:
            raise Conflict(
                what=f"the request {params.rid[:80]!r} has not ended",
                why="what it will say is not known",
                fix="wait for it, or send replace: true",
                param="session_params",
            )
        if params.drop_previous_output:
            return turn.prompt
        tokens = turn.tokens
        if not params.offset:
            return tokens
        if not -len(tokens) < params.offset <= len(tokens):
            raise InvalidRequest(
                what=f"offset is {params.offset}",
                why=f"that request has {len(tokens)} tokens",
                fix="send an offset within them",
                param="session_params",
            )
        return tokens[: params.offset]

    def media(self, params: SessionParams, num_tokens: int, tenant: str = "") -> SessionTurn | None:
        """The request to continue, if the `num_tokens` kept of it contain media. Raises `InvalidRequest` if they end
        within a medium."""
        turn = self._get(params.id, tenant).turns.get(params.rid or "")
        if turn is None or not any(item.start < num_tokens for item in turn.items):
            return None
        if any(item.start < num_tokens < item.stop for item in turn.items):
            raise InvalidRequest(
                what=f"{num_tokens} tokens of that request are kept",
                why="they end in the middle of an image, a video or sound",
                fix="send another offset",
                param="session_params",
            )
        return turn

    def begin(self, params: SessionParams, rid: str, prompt: Ids, tenant: str = "") -> SessionTurn:
        """Records that a request is being sent. `prompt` has the prefix in it. Raises like `prefix`."""
        session = self._get(params.id, tenant)
        if rid in session.turns:
            raise Conflict(what=f"the session has a request {rid[:80]!r}", fix="choose another rid", param="rid")
        if len(prompt) > session.capacity:
            raise InvalidRequest(
                what=f"the request has {len(prompt)} tokens",
                why=f"the session was opened for {session.capacity}",
                fix="open one with a larger capacity_of_str_len",
                param="session_params",
            )
        if params.replace:
            self._drop(session, list(session.turns) if params.rid is None else session.below(params.rid), tenant)
        self._make_room(session, len(prompt), tenant)
        turn = SessionTurn(rid, params.rid, prompt)
        session.turns[rid] = turn
        session.used_s = self._clock()
        return turn

    def end(self, params: SessionParams, turn: SessionTurn, *, failed: bool, tenant: str = "") -> None:
        """Records the end of a request. A failed one is forgotten, an aborted one keeps its output so far."""
        turn.running = False
        session = self._sessions.get((tenant, params.id))
        if session is None:
            return
        session.used_s = self._clock()
        if failed and session.turns.get(turn.rid) is turn:
            del session.turns[turn.rid]

    # -- inside -----------------------------------------------------------------------------------

    def _get(self, session_id: str, tenant: str) -> _Session:
        session = self._sessions.get((tenant, session_id))
        if session is None:
            raise NotFound(
                what=f"there is no session {session_id[:80]!r}",
                why="it was closed, has expired, or never was",
                fix="open one with /open_session",
                param="session_params",
            )
        return session

    def _drop(self, session: _Session, rids: list[str], tenant: str) -> None:
        for rid in rids:
            turn = session.turns.pop(rid)
            if turn.running:
                self._abort(rid, tenant)

    def _make_room(self, session: _Session, num_tokens: int, tenant: str) -> None:
        """The oldest requests of the session are forgotten before it has too many; other sessions' are not."""
        done = [turn.rid for turn in session.turns.values() if not turn.running]
        self._drop(session, done[: max(0, len(session.turns) - MAX_TURNS + 1)], tenant)
        self._expire()
        if sum(turn.num_tokens for turn in self._turns()) + num_tokens > self._max_tokens:
            raise InvalidRequest(
                what="the open sessions remember too much",
                why=f"{self._max_tokens} tokens are kept in all",
                fix="close sessions that are done",
                param="session_params",
            )

    def _turns(self) -> Iterator[SessionTurn]:
        for session in self._sessions.values():
            yield from session.turns.values()

    def _expire(self) -> None:
        now = self._clock()
        for name, session in list(self._sessions.items()):
            idle = not any(turn.running for turn in session.turns.values())
            if idle and now - session.used_s > session.timeout_s:
                del self._sessions[name]
