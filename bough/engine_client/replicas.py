"""The engine replicas behind one server: which of them gets a request, and which are alive.

Each has the whole model and a KV cache of its own. A request's id holds the number of its replica, so that whatever follows
(an abort, a stop) finds it without a table.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np

from bough.config.concerns import LoadBalance
from bough.core.errors import InvalidRequest, Unavailable
from bough.core.messages import Generate, Ids, home_replica
from bough.ipc import AsyncOutbox, Endpoints
from bough.observability.health import Pulse

_MOST_HELD_BYTES = 256 * 1024 * 1024
"""Maximum bytes of requests that an engine has not read yet; above it, no more are sent."""
BLOCK: Final = 64
"""Tokens per block of a remembered prefix."""
_MOST_BLOCKS: Final = 1 << 16
"""Prefix blocks remembered per replica."""
_DEEPEST: Final = 256
"""Maximum number of blocks of a prompt that are compared."""
_SLACK_TOKENS: Final = 2048
_SLACK: Final = 1.5
"""A replica with a prompt's prefix is too busy if it has this factor times the tokens of the least busy one, plus this
number of tokens."""


class Writer(Protocol):
    """The writing end of one engine's channel."""

    def send(self, message: Any) -> None: ...

    def send_all(self, messages: Sequence[Any]) -> None: ...

    def close(self) -> None: ...


class Replicas:
    """The writing ends to all engines. Everything runs in one event loop."""

    def __init__(self, outboxes: Sequence[Writer], pulses: Sequence[Pulse], method: LoadBalance) -> None:
        """`pulses`: the engines' heartbeats; of a lone one none is needed."""
        self._method = method
        self._outboxes = outboxes
        self._pulses = pulses
        self._alive = [True] * len(outboxes)
        self._requests = [0] * len(outboxes)
        self._tokens = [0] * len(outboxes)
        self._next = 0
        self._prefixes: list[OrderedDict[int, None]] = [OrderedDict() for _ in outboxes]

    @classmethod
    def connect(cls, endpoints: Sequence[Endpoints], method: LoadBalance) -> Replicas:
        outboxes = [AsyncOutbox(each.engine, max_held_bytes=_MOST_HELD_BYTES) for each in endpoints]
        return cls(outboxes, [Pulse(each.heartbeat) for each in endpoints] if len(endpoints) > 1 else [], method)

    def __len__(self) -> int:
        return len(self._outboxes)

    @property
    def alive(self) -> list[int]:
        """Numbers of the replicas that take requests."""
        return [number for number, alive in enumerate(self._alive) if alive]

    def set_alive(self, number: int, alive: bool) -> None:
        self._alive[number] = alive
        if not alive:
            self._prefixes[number].clear()

    # -- choosing ----------------------------------------------------------------------------------------------------

    def choose(self, prompt: Ids, namespace: str, *, wanted: int | None = None, sticky: str = "") -> int:
        """The replica for a request. `wanted`: the one that the client names; `sticky`: what keeps requests together.

        Raises `InvalidRequest` if there is no such replica, `Unavailable` if it, or all of them, are gone.
        """
        if len(self) == 1 and wanted in (None, 0):
            return 0
        if wanted is not None:
            return self._named(wanted)
        alive = self.alive
        if not alive:
            raise Unavailable(what="no replica is left", fix="the server's log says why")
        if sticky:
            first = self.home(sticky)
            return min(alive, key=lambda each: (each - first) % len(self))
        match self._method:
            case "round_robin":
                self._next += 1
                return alive[self._next % len(alive)]
            case "total_requests":
                return min(alive, key=lambda each: (self._busy(each), self._tokens[each]))
            case "total_tokens":
                return min(alive, key=lambda each: (self._tokens[each], self._busy(each)))
            case "prefix":
                return self._by_prefix(prompt, namespace, alive)

    def home(self, name: str) -> int:
        """The replica for everything with this name."""
        return home_of(name, len(self))

    def began(self, number: int, tokens: int) -> None:
        self._requests[number] += 1
        self._tokens[number] += tokens

    def ended(self, number: int, tokens: int) -> None:
        self._requests[number] -= 1
        self._tokens[number] -= tokens

    def _named(self, wanted: int) -> int:
        if not 0 <= wanted < len(self):
            raise InvalidRequest(
                what=f"data_parallel_rank is {wanted}",
                why=f"the replicas of this server are 0 to {len(self) - 1}",
                fix="send one of them, or leave it out",
                param="data_parallel_rank",
            )
        if not self._alive[wanted]:
            raise Unavailable(what=f"replica {wanted} is not there", fix="leave out data_parallel_rank, or try again")
        return wanted

    def _busy(self, number: int) -> int:
        """Number of requests of a replica: those of this API process, or the heartbeat's count for all, if larger."""
        beat = self._pulses[number].read()
        return max(self._requests[number], beat.num_running + beat.num_waiting)

    def _by_prefix(self, prompt: Ids, namespace: str, alive: list[int]) -> int:
        blocks = prefix_blocks(prompt, namespace)
        idlest = min(alive, key=lambda each: (self._tokens[each], self._busy(each), each))
        limit = _SLACK * self._tokens[idlest] + _SLACK_TOKENS
        depths = {each: self._depth(each, blocks) for each in alive}
        best = max(alive, key=lambda each: (depths[each], -self._tokens[each]))
        chosen = best if depths[best] and self._tokens[best] <= limit else idlest
        known = self._prefixes[chosen]
        for block in blocks:
            known[block] = None
            known.move_to_end(block)
        while len(known) > _MOST_BLOCKS:
            known.popitem(last=False)
        return chosen

    def _depth(self, number: int, blocks: list[int]) -> int:
        known = self._prefixes[number]
        return next((at for at, block in enumerate(blocks) if block not in known), len(blocks))

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, message: Any, number: int) -> None:
        self._outboxes[number].send(message)

    def send_all(self, messages: Sequence[Generate]) -> None:
        if len(self) == 1:
            self._outboxes[0].send_all(messages)
            return
        by_home: dict[int, list[Generate]] = {}
        for message in messages:
            by_home.setdefault(home_replica(message.id), []).append(message)
        for number, its in by_home.items():
            self._outboxes[number].send_all(its)

    def close(self) -> None:
        for outbox in self._outboxes:
            outbox.close()


def home_of(name: str, num_replicas: int) -> int:
    """A number below `num_replicas` that is the same in all API processes."""
    return zlib.crc32(name.encode(errors="surrogatepass")) % num_replicas


def prefix_blocks(prompt: Ids, namespace: str) -> list[int]:
    """Hashes of a prompt's blocks, each of the whole prefix up to its end."""
    packed = np.ascontiguousarray(prompt[: BLOCK * _DEEPEST], np.int32).tobytes()
    blocks, number = [], hash(namespace)
    for begin in range(0, len(packed) - 4 * BLOCK + 1, 4 * BLOCK):
        number = hash((number, packed[begin : begin + 4 * BLOCK]))
        blocks.append(number)
    return blocks


def merged(bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges the replies of all replicas: sums counts and lists, averages shares, and takes other fields from the
    first."""
    if len(bodies) == 1:
        return bodies[0]
    return {name: _together([body[name] for body in bodies if name in body]) for name in bodies[0]}


def _together(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, bool):
        return all(values)
    if isinstance(first, int):
        return sum(values)
    if isinstance(first, float):
        return sum(values) / len(values)
    if isinstance(first, dict):
        return merged(values)
    if isinstance(first, list) and all(type(each) is int for value in values for each in value):
        return [sum(column) for column in zip(*values, strict=False)]
    if isinstance(first, list) and all(isinstance(each, list) for value in values for each in value):
        return [_together(list(column)) for column in zip(*values, strict=False)]
    return first
