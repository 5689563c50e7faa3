"""Responses kept in memory: for continuation, for retrieval, and while they run in the background.

Bounded by number and by bytes; the least recently used goes first, those that still run stay. What a conversation's
responses have in common is held once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import Final

import msgspec

from bough.core.errors import InvalidRequest, NotFound
from bough.entrypoints.http.responses.schema import Json

MAX_BYTES: Final = 256 * 1024 * 1024

_encode = msgspec.json.Encoder().encode

_WHY_NONE: Final = "it runs with --response-store-size 0"

Name = tuple[str, str]
"""Tenant and id."""


class StoredResponse:
    """One response, what it answers, and, if it runs in the background, its events so far."""

    def __init__(self, response: Json, items: list[Json], new: int, tenant: str) -> None:
        """`items`: the conversation that it answers, of which the last `new` came with this request."""
        self.response = response
        self.items = items
        self.new = new
        self.tenant = tenant
        self.events: list[bytes] | None = None
        """Of a background response, by sequence number."""
        self.task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def name(self) -> Name:
        return self.tenant, self.id

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done()

    def own_items(self) -> list[Json]:
        return [*self.items[len(self.items) - self.new :], *self.response["output"]]

    def conversation(self) -> list[Json]:
        """Everything up to and with its answer."""
        return [*self.items, *self.response["output"]]

    def tell(self, events: list[bytes]) -> None:
        assert self.events is not None
        self.events += events
        self.wake()

    def wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """The events after a sequence number, as they come. Leaving early does not end the response."""
        assert self.events is not None
        at = after + 1
        while True:
            news = self._news
            while at < len(self.events):
                yield self.events[at]
                at += 1
            if not self.running:
                return
            await news.wait()


class ResponseStore:
    """Responses and their items, by tenant and id. One event loop."""

    def __init__(self, max_responses: int, *, max_bytes: int = MAX_BYTES) -> None:
        self._max = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[Name, StoredResponse] = OrderedDict()
        self._sizes: dict[Name, int] = {}
        self._items: dict[Name, Json] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def enabled(self) -> bool:
        return self._max > 0

    def need(self, param: str) -> None:
        """Raises `InvalidRequest` if responses are not stored."""
        if not self.enabled:
            raise InvalidRequest(
                what=f"{param} needs stored responses, and this server stores none",
                why=_WHY_NONE,
                fix="send the whole conversation, or start the server with --response-store-size 1024",
                param=param,
            )

    def put(self, kept: StoredResponse) -> None:
        """Keeps a response; one that is kept while it runs is updated once it has ended, when its size is known."""
        if not self.enabled:
            return
        self._forget(kept.name)
        self._kept[kept.name] = kept
        own = kept.own_items()
        size = len(_encode(own)) + sum(map(len, kept.events or ()))
        self._sizes[kept.name] = size
        self._num_bytes += size
        self._items.update({(kept.tenant, item["id"]): item for item in own if isinstance(item.get("id"), str)})
        self._evict()

    def update(self, kept: StoredResponse) -> None:
        """Notes what a kept response has grown to; one that was deleted meanwhile stays so."""
        if self._kept.get(kept.name) is kept:
            self.put(kept)

    def get(self, response_id: str, tenant: str, param: str = "response_id") -> StoredResponse:
        """Raises `NotFound`: it never existed, was removed, or belongs to another tenant."""
        kept = self._kept.get((tenant, response_id))
        if kept is None:
            raise NotFound(
                what=f"there is no response {response_id[:80]!r}",
                why=f"the last {self._max} are kept, and only those with store: true" if self._max else _WHY_NONE,
                fix="send the whole conversation as input",
                param=param,
            )
        self._kept.move_to_end(kept.name)
        return kept

    def item(self, item_id: str, tenant: str) -> Json | None:
        """A stored item of the tenant by its own id."""
        return self._items.get((tenant, item_id))

    def delete(self, kept: StoredResponse) -> None:
        if kept.task is not None:
            kept.task.cancel()
        self._forget(kept.name)

    async def close(self) -> None:
        """Ends what runs in the background."""
        running = [kept.task for kept in self._kept.values() if kept.task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _evict(self) -> None:
        for kept in list(self._kept.values()):
            if len(self._kept) <= self._max and self._num_bytes <= self._max_bytes:
                return
            if not kept.running and kept.response["status"] not in ("queued", "in_progress"):
                self._forget(kept.name)

    def _forget(self, name: Name) -> None:
        kept = self._kept.pop(name, None)
        if kept is None:
            return
        self._num_bytes -= self._sizes.pop(name)
        for item in kept.own_items():
            if isinstance(item.get("id"), str):
                self._items.pop((kept.tenant, item["id"]), None)
