"""Tokenises off the event loop: short texts at once, long ones and batches in threads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bough.core.errors import Unavailable
from bough.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")

_SHORT_CHARS = 4096
"""Tokenised in about a millisecond: less than a thread's round trip is worth."""


class TokenizerPool:
    """A tokenizer for an asyncio process. The library releases the interpreter, so threads run side by side."""

    def __init__(self, tokenizer: Tokenizer, num_threads: int | None = None) -> None:
        self.tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(num_threads or min(4, os.cpu_count() or 1), thread_name_prefix="tokenize")
        self._closed = False

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) <= _SHORT_CHARS:
            return self.tokenizer.encode(text, add_special_tokens)
        return await self._in_thread(self.tokenizer.encode, text, add_special_tokens)

    async def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        if sum(map(len, texts)) <= _SHORT_CHARS:
            return self.tokenizer.encode_batch(texts, add_special_tokens)
        return await self._in_thread(self.tokenizer.encode_batch, texts, add_special_tokens)

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Any work on texts of `size` characters (or ids) in all."""
        return work() if size <= _SHORT_CHARS else await self._in_thread(work)

    def close(self) -> None:
        """Closes the pool: calls that wait for a thread, and later ones, raise `Unavailable`."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, encode: Callable[..., T], *arguments: object) -> T:
        if self._closed:
            raise _closing()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, encode, *arguments)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):
                raise _closing() from None
            raise


def _closing() -> Unavailable:
    return Unavailable(what="the server is shutting down")
