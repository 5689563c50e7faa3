"""Tokenising off the event loop, and what is left waiting when that ends."""

from __future__ import annotations

import asyncio
import threading

import pytest

from bough.config.default_model import default_model_path
from bough.core.errors import Unavailable
from bough.tokenizer import Tokenizer, TokenizerPool, load_tokenizer

LONG = "All work and no play. " * 400


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(default_model_path())


async def test_threads_encode_as_the_tokenizer_does(tokenizer: Tokenizer) -> None:
    pool = TokenizerPool(tokenizer, 2)
    texts = [LONG + str(number) for number in range(6)]
    assert await pool.encode_batch(texts) == tokenizer.encode_batch(texts)
    assert await asyncio.gather(*map(pool.encode, texts)) == tokenizer.encode_batch(texts)
    pool.close()


async def test_whoever_waits_at_the_end_is_told_so(tokenizer: Tokenizer) -> None:
    pool = TokenizerPool(tokenizer, 1)
    held = threading.Event()
    pool._threads.submit(held.wait, 60)
    waiting = [asyncio.create_task(pool.encode(LONG)), asyncio.create_task(pool.encode_batch([LONG]))]
    given_up = asyncio.create_task(pool.encode(LONG))
    await asyncio.sleep(0.01)
    given_up.cancel()
    pool.close()
    for each in waiting:
        with pytest.raises(Unavailable, match="shutting down"):
            await asyncio.wait_for(each, 30)
    with pytest.raises(asyncio.CancelledError):
        await given_up
    with pytest.raises(Unavailable, match="shutting down"):
        await pool.encode(LONG)
    assert await pool.encode("short") == tokenizer.encode("short")
    held.set()
