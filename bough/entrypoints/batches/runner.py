"""Processes batches one after another, many lines at once. Written answers survive a restart; the rest is computed
again.

An answer is appended to the batch's part file before it counts as done, so that after a crash every line has at most
been computed twice and is reported exactly once. A line whose answer was cut off (the server drains, an operator aborts
all requests) is not answered: it is sent again, by this process or the next. Lack of file descriptors, memory or disk
space (`OSError`) does not fail a batch: the work continues when they are available again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from bough.core.errors import NotFound
from bough.entrypoints.batches.files import FileStore, new_file_id, open_private
from bough.entrypoints.batches.records import BatchRecord, BatchStore, Status
from bough.observability.keeper import Keeper

_log = logging.getLogger(__name__)

MAX_LINES: Final = 50_000
MAX_LINE_BYTES: Final = 8 * 1024 * 1024
_MOST_ERRORS: Final = 100
_LOOK_EVERY_S: Final = 1.0
_SAVE_EVERY_S: Final = 1.0
_AGAIN: Final = (429, 499, 503)
"""Statuses after which a line is sent again: the server is busy, the answer was aborted, the server drains or
restarts."""
TASK: Final = "batches"
"""The runner's name among the background tasks."""
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode

Json = dict[str, Any]
Call = Callable[[str, Json, str], Awaitable[tuple[int, str, Json]]]
"""Answers one request: (endpoint, body, tenant) -> (status, request id, body of the response)."""


class BatchRunner:
    """Active in one process per directory; other processes wait for the lock."""

    def __init__(
        self,
        files: FileStore,
        batches: BatchStore,
        call: Call,
        endpoints: frozenset[str],
        *,
        keeper: Keeper | None = None,
        at_once: int = 32,
    ) -> None:
        """`keeper` runs the work in the background and is notified of failures."""
        self._files = files
        self._batches = batches
        self._call = call
        self._endpoints = endpoints
        self._keeper = keeper or Keeper()
        self._at_once = at_once
        self._task: asyncio.Task[None] | None = None
        self._draining = asyncio.Event()

    def start(self) -> None:
        """Starts with the batches that an earlier process left unfinished."""
        self._task = self._keeper.keep(TASK, self._run)

    async def drain(self, now: bool = False) -> None:
        """Starts no more lines and returns when those in progress have ended; `now`: aborts them."""
        self._draining.set()
        if self._task is not None:
            if now:
                self._task.cancel()
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """Stops at once; the next process continues from there."""
        await self.drain(now=True)

    async def _run(self) -> None:
        while (right := self._batches.own()) is None:
            if await self._pause(_LOOK_EVERY_S):
                return
        try:
            await asyncio.to_thread(self._files.tidy)
            while not self._draining.is_set():
                await self._work_all()
        finally:
            os.close(right)

    async def _pause(self, seconds: float) -> bool:
        """Waits, at most until the server drains. Returns whether it does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._draining.wait()
        return self._draining.is_set()

    async def _work_all(self) -> None:
        waiting = self._batches.unfinished()
        pause_s = 0.0 if waiting else _LOOK_EVERY_S
        for batch in waiting:
            try:
                await self._work(batch)
            except OSError as error:
                pause_s = max(pause_s, self._keeper.stumbled(TASK, error))
            except Exception:
                _log.exception("batch %s failed", batch.id)
                batch.errors = [_problem("internal_error", "the server failed to work on this batch", None)]
                self._enter(batch, "failed")
            if self._draining.is_set():
                return
        if pause_s:
            await self._pause(pause_s)

    # -- one batch --------------------------------------------------------------------------------

    async def _work(self, batch: BatchRecord) -> None:
        try:
            source = self._files.path(self._files.get(batch.input_file_id, batch.tenant))
            source.stat()
        except (NotFound, FileNotFoundError):
            what = f"the file {batch.input_file_id} was deleted"
            batch.errors = [_problem("invalid_file", what, None)]
            self._enter(batch, "failed")
            return
        if batch.endpoint not in self._endpoints:
            batch.errors = [_problem("invalid_endpoint", f"this server does not serve {batch.endpoint}", None)]
            self._enter(batch, "failed")
        if batch.status == "validating":
            batch.total, batch.errors = await asyncio.to_thread(self._validate, source, batch.endpoint)
            self._enter(batch, "failed" if batch.errors else "in_progress")
        if batch.status == "in_progress":
            await self._answer_all(batch, source)
            if self._draining.is_set() and batch.completed + batch.failed < batch.total:
                self._batches.save(batch)
                return
            if self._batches.is_cancelling(batch):
                batch.times["cancelling_at"] = int(time.time())
            self._enter(batch, "finalizing")
        if batch.status == "finalizing":
            thread = asyncio.ensure_future(asyncio.to_thread(self._finalize, batch, source))
            try:
                await asyncio.shield(thread)
            finally:  # cancelled or not: the next process must not begin while this one still writes
                await asyncio.wait([thread])

    def _validate(self, source: Path, endpoint: str) -> tuple[int, list[Json]]:
        """The number of lines, and the errors in them."""
        problems: list[Json] = []
        seen: set[str] = set()
        count = 0
        for number, raw in _lines(source):
            count += 1
            if count > MAX_LINES:
                return count, [_problem("too_many_tasks", f"a batch has at most {MAX_LINES} requests", number)]
            problem = _wrong(raw, endpoint, seen)
            if problem is not None:
                problems.append(_problem(*problem, number))
                if len(problems) >= _MOST_ERRORS:
                    break
        if not count:
            problems.append(_problem("empty_file", "the file has no requests", None))
        return count, problems

    async def _answer_all(self, batch: BatchRecord, source: Path) -> None:
        done = {
            *_custom_ids(self._batches.part(batch, "out")),
            *_custom_ids(self._batches.part(batch, "err")),
        }
        batch.completed = sum(1 for _ in _custom_ids(self._batches.part(batch, "out")))
        batch.failed = len(done) - batch.completed
        batch.usage = _spent(self._batches.part(batch, "out"))
        running: set[asyncio.Task[None]] = set()
        saved_s = time.monotonic()
        with (
            open_private(self._batches.part(batch, "out"), append=True) as out,
            open_private(self._batches.part(batch, "err"), append=True) as err,
        ):
            try:
                for _, raw in _lines(source):
                    line = _decode(raw)
                    if line["custom_id"] in done:
                        continue
                    if self._over(batch) or self._draining.is_set():
                        break
                    running.add(asyncio.ensure_future(self._answer(batch, line, out, err)))
                    if len(running) >= self._at_once:
                        running = await self._some(batch, running)
                    if time.monotonic() - saved_s > _SAVE_EVERY_S:
                        self._batches.save(batch)
                        saved_s = time.monotonic()
                while running and not self._over(batch):
                    running = await self._some(batch, running)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    async def _some(self, batch: BatchRecord, running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        """Waits until some are done, or until it is time to check for a cancellation."""
        done, left = await asyncio.wait(running, timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return left

    def _over(self, batch: BatchRecord) -> bool:
        return time.time() > batch.expires_at or self._batches.is_cancelling(batch)

    async def _answer(self, batch: BatchRecord, line: Json, out: BinaryIO, err: BinaryIO) -> None:
        """Processes one line, with retries while the server can't answer it. If the server drains, the line may stay
        unanswered."""
        while True:
            status, request_id, body = await self._call(batch.endpoint, line["body"], batch.tenant)
            if status not in _AGAIN:
                break
            if await self._pause(_LOOK_EVERY_S):
                return
        good = status < 400
        answer = {
            "id": f"batch_req_{request_id}",
            "custom_id": line["custom_id"],
            "response": {"status_code": status, "request_id": request_id, "body": body},
            "error": None,
        }
        target = out if good else err
        target.write(_encode(answer) + b"\n")
        target.flush()
        if good:
            batch.completed += 1
            _add_usage(batch.usage, body)
        else:
            batch.failed += 1

    def _finalize(self, batch: BatchRecord, source: Path) -> None:
        cancelled, expired = self._batches.is_cancelling(batch), time.time() > batch.expires_at
        out, err = self._batches.part(batch, "out"), self._batches.part(batch, "err")
        done = {*_custom_ids(out), *_custom_ids(err)} if out.exists() or err.exists() else set()
        if batch.output_file_id is None and batch.error_file_id is None and len(done) < batch.total:
            self._tell_undone(source, err, done, "batch_cancelled" if cancelled else "batch_expired")
        if batch.output_file_id is None and out.exists() and out.stat().st_size:
            batch.output_file_id = new_file_id()
        if batch.error_file_id is None and err.exists() and err.stat().st_size:
            batch.error_file_id = new_file_id()
        self._batches.save(batch)  # from here on a restart finds the same names
        for path, file_id, kind in ((out, batch.output_file_id, "output"), (err, batch.error_file_id, "error")):
            if file_id is not None:
                name = f"{batch.id}_{kind}.jsonl"
                self._files.adopt(path, file_id, filename=name, purpose="batch_output", tenant=batch.tenant)
        whole = batch.completed + batch.failed >= batch.total
        self._enter(batch, "completed" if whole else "cancelled" if cancelled or not expired else "expired")
        self._batches.tidy(batch)

    def _tell_undone(self, source: Path, err: Path, done: set[str], code: str) -> None:
        with open_private(err, append=True) as target:
            for _, raw in _lines(source):
                custom_id = _decode(raw)["custom_id"]
                if custom_id not in done:
                    error = {"code": code, "message": "this request was not answered before the batch ended"}
                    target.write(
                        _encode({"id": None, "custom_id": custom_id, "response": None, "error": error}) + b"\n"
                    )

    def _enter(self, batch: BatchRecord, status: Status) -> None:
        batch.status = status
        batch.times[f"{status}_at"] = int(time.time())
        self._batches.save(batch)


# -- lines ----------------------------------------------------------------------------------------


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, from 1; blank ones are left out."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield number, raw


def _custom_ids(path: Path) -> Iterator[str]:
    """Ids of the answers in a part file. A line that a crash cut short is cut off."""
    with contextlib.suppress(FileNotFoundError):
        size = path.stat().st_size
        with path.open("rb") as file:
            whole = 0
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                whole += len(raw)
                yield str(_decode(raw)["custom_id"])
        if whole < size:
            os.truncate(path, whole)


def _spent(path: Path) -> dict[str, int]:
    """Tokens of the answers in a part file."""
    total: dict[str, int] = {}
    if path.exists():
        for _, raw in _lines(path):
            _add_usage(total, _decode(raw)["response"]["body"])
    return total


def _add_usage(total: dict[str, int], answer: Json) -> None:
    """Adds an answer's usage, in the format of any of the routes."""
    usage = answer.get("usage") or {}
    prompt = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    output = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    cached = prompt.get("cached_tokens", 0)
    own = usage.get("cache_read_input_tokens", 0)  # Anthropic's input_tokens leave out what came from the cache
    counted = {
        "input": usage.get("prompt_tokens", usage.get("input_tokens", 0)) + own,
        "cached": cached + own,
        "output": usage.get("completion_tokens", usage.get("output_tokens", 0)),
        "reasoning": output.get("reasoning_tokens", 0),
    }
    for name, value in counted.items():
        total[name] = total.get(name, 0) + value


def _wrong(raw: bytes, endpoint: str, seen: set[str]) -> tuple[str, str] | None:
    """The error of a line: a code and a message."""
    if len(raw) > MAX_LINE_BYTES:
        return "line_too_long", f"a line has at most {MAX_LINE_BYTES} bytes"
    try:
        line = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "invalid_json_line", "the line is not JSON"
    if not isinstance(line, dict) or not isinstance(line.get("body"), dict):
        return "invalid_request", "the line is no object with a body"
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id or len(custom_id) > 512:
        return "missing_custom_id", "the line has no custom_id"
    if custom_id in seen:
        return "duplicate_custom_id", f"the custom_id {custom_id[:80]!r} was used before"
    seen.add(custom_id)
    if line.get("method") != "POST":
        return "invalid_method", "the method must be POST"
    if line.get("url") != endpoint:
        return "invalid_url", f"the url must be the batch's endpoint, {endpoint}"
    if line["body"].get("stream"):
        return "invalid_request", "requests of a batch can't stream"
    return None


def _problem(code: str, message: str, line: int | None) -> Json:
    return {"code": code, "message": message, "param": None, "line": line}
