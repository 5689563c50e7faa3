"""How steps go from rank 0 to the others: a ring in shared memory on its own machine, authenticated links to other machines.

A message is encoded once, however many ranks hear of it.
"""

from __future__ import annotations

import select
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
from msgspec import Struct

from bough.config.concerns import ParallelConfig
from bough.config.hosts import crew_of, nodes_of_ranks
from bough.core.errors import Unavailable
from bough.ipc import Codec, Endpoints, Inbox, Outbox
from bough.ipc.codec import OwnFrame, encoder
from bough.ipc.link import Link, Listener, NotTrusted, connect, show_address, split_address
from bough.ipc.ring import RingReader, RingWriter
from bough.ipc.store import AnyStore
from bough.platform.futex import STORES_STAY_IN_ORDER

_RING: Final = "ring"
_STEPS: Final = "steps"
_SEND_S = 10.0
"""A rank on another machine that takes nothing for this long is lost."""


class StepChannel(Protocol):
    """From rank 0 to all others."""

    def send(self, message: Any) -> None: ...


class StepSource(Protocol):
    """Where another rank hears from rank 0."""

    @property
    def closed(self) -> bool: ...

    def drain(self, block_s: float) -> Sequence[Any]: ...


class _Way(Protocol):
    def send_encoded(self, frame: bytes) -> None: ...


class Ways:
    """A channel of several ways, each to some of the ranks. `links`: those to ranks on other machines."""

    def __init__(self, ways: Sequence[_Way], links: Mapping[int, Link] | None = None) -> None:
        self.links = links or {}
        self._ways = [*ways, *(LinkWay(link) for link in self.links.values())]
        self._encode = encoder().encode

    def send(self, message: Any) -> None:
        frame = message.to_frame() if isinstance(message, OwnFrame) else self._encode(message)
        for way in self._ways:
            way.send_encoded(frame)


class _Hello(Struct):
    rank: int
    generation: int


class LinkWay:
    """To a rank on another machine."""

    def __init__(self, link: Link) -> None:
        link.set_timeout(_SEND_S)
        self._link = link

    def send_encoded(self, frame: bytes) -> None:
        try:
            self._link.send(frame)
        except OSError as error:
            raise Unavailable(what="a rank on another machine takes no steps", why=str(error)) from error


class LinkSource:
    """The reading end of a link."""

    def __init__(self, link: Link, message_type: Any) -> None:
        self.closed = False
        self.link = link
        """It goes both ways."""
        self._codec: Codec[Any] = Codec(message_type)

    def drain(self, block_s: float) -> Sequence[Any]:
        """The next message, if it comes within `block_s`. Raises `Unavailable` once the other end is gone."""
        if not select.select([self.link.fileno()], [], [], block_s)[0]:
            return []
        try:
            return [self._codec.decode(memoryview(self.link.receive()))]
        except OSError as error:
            raise Unavailable(what="a rank on another machine is gone", why=str(error)) from error


def open_channel(
    store: AnyStore, endpoints: Endpoints, parallel: ParallelConfig, generation: int, rank: int = 0
) -> Ways:
    """The way of a scheduler's first rank (`rank`) to the others. Waits for those on other machines."""
    nodes = nodes_of_ranks(parallel)
    others = crew_of(parallel, rank)[1:]
    near = [each for each in others if nodes[each] == nodes[rank]]
    ways: list[_Way] = []
    if near and STORES_STAY_IN_ORDER:
        ring = RingWriter(len(near))
        store.set(f"{_RING}/{rank}", ring.path.encode())
        ways.append(ring)
    elif near:
        ways.extend(Outbox(endpoints.rank(each)) for each in near)
    links: dict[int, Link] = {}
    if len(near) < len(others):
        links = _accept(store, parallel, set(others) - set(near), generation)
    return Ways(ways, links)


def open_source(
    store: AnyStore,
    endpoints: Endpoints,
    parallel: ParallelConfig,
    rank: int,
    message_type: Any,
    generation: int,
    *,
    spin_s: float = 0.0,
) -> StepSource:
    """The other end, on rank `rank`; `spin_s`: a wait for the next step on the first rank's machine begins busily for so
    long."""
    nodes = nodes_of_ranks(parallel)
    first, *others = crew_of(parallel, rank)
    if nodes[rank] != nodes[first]:
        address = store.get(_STEPS, parallel.dist_timeout_s).decode()
        link = connect(address, parallel.dist_secret, parallel.dist_timeout_s)
        link.send(msgspec.msgpack.encode(_Hello(rank, generation)))
        return LinkSource(link, message_type)
    if not STORES_STAY_IN_ORDER:
        return Inbox(endpoints.rank(rank), message_type, spin_s=spin_s)
    near = [each for each in others if nodes[each] == nodes[first]]
    path = store.get(f"{_RING}/{first}", parallel.dist_timeout_s).decode()
    return RingReader(path, near.index(rank), len(near), message_type, spin_s=spin_s)


def _accept(store: AnyStore, parallel: ParallelConfig, wanted: set[int], generation: int) -> dict[int, Link]:
    """Lets the ranks of other machines in, on a port of their own."""
    host, _ = split_address(parallel.dist_init_addr)
    listener = Listener(show_address(host, 0), parallel.dist_secret)
    store.set(_STEPS, listener.address.encode())
    give_up_s = time.monotonic() + parallel.dist_timeout_s
    links: dict[int, Link] = {}
    try:
        while wanted:
            listener.set_timeout(max(0.1, give_up_s - time.monotonic()))
            try:
                link = listener.accept()
                hello = msgspec.msgpack.decode(link.receive(), type=_Hello)
            except TimeoutError:
                missing = ", ".join(f"rank {rank}" for rank in sorted(wanted))
                raise Unavailable(
                    what=f"{missing} did not come for its steps within {parallel.dist_timeout_s:g} s"
                ) from None
            except (NotTrusted, ConnectionError, msgspec.DecodeError):
                continue
            if hello.generation == generation and hello.rank in wanted:
                wanted.discard(hello.rank)
                links[hello.rank] = link
            else:
                link.close()  # a rank of an earlier start
    finally:
        listener.close()
    return links
