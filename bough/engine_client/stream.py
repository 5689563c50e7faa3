"""One submitted request: its deltas as an async iterator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from bough.core.errors import BoughError
from bough.core.messages import Delta, Ids, TokenLogprobs
from bough.observability.trace import Trace


class DeltaStream:
    """Yields a request's `Delta`s; the last one has `end`. Deltas that arrived since the last one are merged. Leaving
    `async with` early, cancelling a wait or calling `abort` aborts the request. Raises `Unavailable` if the engine is
    gone. Use within one event loop.
    """

    def __init__(
        self,
        request_id: int,
        rid: str,
        index: int,
        prompt: Ids,
        give_up: Callable[[int, str], None],
        *,
        tenant: str = "",
    ) -> None:
        self.id = request_id
        self.rid = rid
        self.tenant = tenant
        """The tenant that the name `rid` belongs to."""
        self.index = index
        """Which of the request's `n` answers this is."""
        self.prompt = prompt
        self.began_s = time.monotonic()
        self.first_s = 0.0
        """Time of the first delta, by time.monotonic(); 0 before."""
        self.ended = False
        """The last delta has been yielded, or the request was aborted."""
        self.trace: Trace | None = None
        """Receives its timeline, if one was asked for."""
        self._give_up = give_up
        self._pending: list[Delta] = []
        self._complete = False
        self._error: BoughError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._only_end = False

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> Delta:
        if self.ended:
            raise StopAsyncIteration
        await self._wait(only_end=False)
        delta = merge(self._pending)
        self._pending = []
        self.ended = delta.end is not None
        return delta

    async def collect(self) -> Delta:
        """Everything, as one delta."""
        await self._wait(only_end=True)
        self.ended = True
        whole = merge(self._pending)
        self._pending = []
        return whole

    def abort(self, reason: str = "client disconnected") -> None:
        """Aborts the request; nothing more is yielded. Does nothing after its end."""
        if not self.ended:
            self.ended = True
            if not self._complete:
                self._give_up(self.id, reason)

    async def __aenter__(self) -> DeltaStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    # -- for the engine client --------------------------------------------------------------------------------------------

    def deliver(self, delta: Delta) -> None:
        self._pending.append(delta)
        if not self.first_s:
            self.first_s = time.monotonic()
        self._complete = delta.end is not None
        if self._complete or not self._only_end:
            self._wake()

    def fail(self, error: BoughError) -> None:
        if not self._complete:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self, only_end: bool) -> None:
        while not (self._complete or (self._pending and not only_end)):
            if self._error is not None:
                self.ended = True
                raise self._error
            self._only_end = only_end
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.abort()
                raise
            finally:
                self._waiter = None


def merge(deltas: list[Delta]) -> Delta:
    """Consecutive deltas of one request as one."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    hidden = [row for delta in deltas if delta.hidden_states is not None for row in delta.hidden_states]
    return Delta(
        id=last.id,
        text="".join([delta.text for delta in deltas]),
        tokens=b"".join([delta.tokens for delta in deltas]),
        events=[event for delta in deltas for event in delta.events],
        end=last.end,
        logprobs=merge_logprobs([delta.logprobs for delta in deltas if delta.logprobs is not None]),
        prompt_logprobs=merge_logprobs(
            [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
        ),
        hidden_states=hidden or None,
        embedding=b"".join([delta.embedding for delta in deltas]),
    )


def merge_logprobs(parts: list[TokenLogprobs]) -> TokenLogprobs | None:
    """Log-probabilities of consecutive positions as one; None if there are none."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    return TokenLogprobs(
        token_ids=[each for part in parts for each in part.token_ids],
        logprobs=[each for part in parts for each in part.logprobs],
        top=[each for part in parts for each in part.top],
        chosen=[each for part in parts for each in part.chosen],
        top_text=[each for part in parts for each in part.top_text],
        text=[each for part in parts for each in part.text],
    )
