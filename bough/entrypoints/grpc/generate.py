"""Requests of one call and their answers: a single one, or many over one stream."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from bough.core.bounds import BOUNDS
from bough.core.errors import InvalidRequest
from bough.engine_client import Request
from bough.engine_client.endings import raise_if_failed
from bough.engine_client.names import random_name
from bough.entrypoints.grpc import bough_pb2 as pb
from bough.entrypoints.grpc.convert import error_of, request_of, response_of
from bough.entrypoints.grpc.errors import shown
from bough.entrypoints.grpc.guard import caller_of
from bough.entrypoints.service import Service

_MOST_AT_ONCE = BOUNDS["grpc_requests"].most
"""Maximum number of requests in progress over one stream, and of deltas that wait for the client."""


def make_request(service: Service, message: pb.GenerateRequest, context: Any) -> Request:
    """The message as a request of this call. Raises `InvalidRequest`."""
    served, config = service.served, service.config
    return request_of(
        message,
        defaults=dict(served.sampling_defaults),
        want_text=served.tokenizer is not None,
        every=config.scheduler.stream_interval,
        caller=caller_of(context.invocation_metadata(), service.keyring),
        deadline_s=deadline_of(context),
    )


def deadline_of(context: Any) -> float:
    """Time (time.monotonic()) at which the call's deadline is, or 0."""
    remaining = context.time_remaining()
    return time.monotonic() + remaining if remaining is not None else 0.0


async def answers(service: Service, request: Request) -> AsyncGenerator[pb.GenerateResponse, None]:
    """The deltas of one request. Raises the error that it failed with."""
    async with contextlib.aclosing(service.run([request])) as news:
        async for _, stream, delta in news:
            raise_if_failed(delta.end)
            yield response_of(stream, delta)


class Exchange:
    """One bidirectional stream: the requests in progress, and their deltas on the way to the client.

    A client that reads slowly slows its own requests down; memory stays bounded.
    """

    def __init__(self, service: Service, context: Any) -> None:
        self._service = service
        self._context = context
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._news: asyncio.Queue[pb.GenerateResponse | None] = asyncio.Queue(_MOST_AT_ONCE)
        self._closing = False

    async def run(self, commands: AsyncIterator[pb.GenerateCommand]) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Deltas as they arrive, until the client has no more commands and every answer is complete."""
        reader = asyncio.ensure_future(self._read(commands))
        try:
            while (answer := await self._news.get()) is not None:
                yield answer
            await reader
        finally:
            self._closing = True
            tasks = [reader, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, commands: AsyncIterator[pb.GenerateCommand]) -> None:
        try:
            async for command in commands:
                match command.WhichOneof("command"):
                    case "generate":
                        await self._start(command.generate)
                    case "abort_rid":
                        task = self._tasks.get(command.abort_rid)
                        if task is not None:
                            task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        finally:
            if not self._closing:
                await self._news.put(None)

    async def _start(self, message: pb.GenerateRequest) -> None:
        message.rid = message.rid or random_name()
        rid = message.rid
        if rid in self._tasks or len(self._tasks) >= _MOST_AT_ONCE:
            error = InvalidRequest(
                what=f"{rid[:60]!r} is under way"
                if rid in self._tasks
                else f"{len(self._tasks)} requests are under way",
                why="answers are distinguished by rid" if rid in self._tasks else f"at most {_MOST_AT_ONCE} are taken",
                fix="wait for answers, or choose another rid",
                param="rid",
            )
            await self._news.put(pb.GenerateResponse(rid=rid, error=error_of(error)))
            return
        task = asyncio.ensure_future(self._answer(message))
        self._tasks[rid] = task
        task.add_done_callback(lambda _: self._tasks.pop(rid, None))

    async def _answer(self, message: pb.GenerateRequest) -> None:
        """Queues every delta of a request; also its failure, or its abort by the client."""
        try:
            request = make_request(self._service, message, self._context)
            async with contextlib.aclosing(answers(self._service, request)) as replies:
                async for answer in replies:
                    await self._news.put(answer)
        except asyncio.CancelledError:
            if self._closing:
                raise
            reason = pb.FinishReason(type="abort", message="aborted by request")
            await self._news.put(pb.GenerateResponse(rid=message.rid, finish_reason=reason))
        except Exception as error:
            await self._news.put(pb.GenerateResponse(rid=message.rid, error=error_of(shown(error))))
