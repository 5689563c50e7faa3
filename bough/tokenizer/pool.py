"""Tokenises off the event loop: short texts at once, long ones and batches in threads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from bough.tokenizer.tokenizer import Tokenizer

_SHORT_CHARS = 4096
"""Tokenised in about a millisecond: less than a thread's round trip is worth."""


class TokenizerPool:
    """A tokenizer for an asyncio process. The library releases the interpreter, so threads run side by side."""

    def __init__(self, tokenizer: Tokenizer, num_threads: int | None = None) -> None:
        self.tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(num_threads or min(4, os.cpu_count() or 1), thread_name_prefix="tokenize")

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) <= _SHORT_CHARS:
            return self.tokenizer.encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.tokenizer.encode, text, add_special_tokens)

    async def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        if sum(map(len, texts)) <= _SHORT_CHARS:
            return self.tokenizer.encode_batch(texts, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.tokenizer.encode_batch, texts, add_special_tokens)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
