"""A prompt of thousands of tokens is computed while others read their answers: they keep the time per token that the server
has set itself, on the default model. A CPU reads the whole prompt's KV again for each chunk, so that chunks can't be tiny.

It measures time, which needs a quiet machine: hence with the slow tests. `tests/sim/test_fairness.py` holds a GPU's numbers,
128k tokens and twice the idle time per token, by the clock of a simulated device.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from default_server import default_server

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]

USERS = 4
LONG = 7000
_FIRST = count(100)
"""Each long prompt begins otherwise, so that none is cached."""


class User(threading.Thread):
    """Reads a streamed answer and notes when its tokens came."""

    def __init__(self, url: str, number: int, tokens: int) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.enough = threading.Event()
        self._url = url
        self._body = {
            "input_ids": [50 + number, *range(100, 160)], "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }  # fmt: skip
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", f"{self._url}/generate", json=self._body, timeout=120) as answer:
            for line in answer.iter_lines():
                if self.enough.is_set():
                    return
                if line.startswith("data: {"):
                    tokens = json.loads(line.removeprefix("data: "))["meta_info"]["completion_tokens"]
                    self.times += [time.monotonic()] * (tokens - len(self.times))

    def tpot_s(self, after: float = 0.0, before: float = float("inf")) -> float:
        """Of the tokens that came within the span."""
        times = [each for each in self.times if after <= each <= before]
        return (times[-1] - times[0]) / (len(times) - 1)


def measure(url: str) -> tuple[float, float, float]:
    """(time per token of the slowest user alone, beside the long prompt; seconds that the long prompt took)"""
    idle = [User(url, number, 100) for number in range(USERS)]
    for user in idle:
        user.join(120)
    busy = [User(url, 10 + number, 1000) for number in range(USERS)]
    while not all(len(user.times) > 10 for user in busy):
        time.sleep(0.01)
    prompt: dict[str, Any] = {
        "input_ids": [next(_FIRST), *(7 * at % 40_000 + 10 for at in range(LONG - 1))],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
    }
    began = time.monotonic()
    told = httpx.post(f"{url}/generate", json=prompt, timeout=200).json()
    ended = time.monotonic()
    assert told["meta_info"]["cached_tokens"] == 0
    for user in busy:
        user.enough.set()
        user.join(120)
    beside = [user.tpot_s(began, ended) for user in busy]
    return max(user.tpot_s() for user in idle), max(beside), ended - began


def test_others_keep_their_time_per_token_beside_a_long_prompt() -> None:
    url = default_server()
    target_s = 0.25  # what `--tpot-target-ms auto` is on a CPU
    measure(url)  # the first one teaches the scheduler what a prompt's token costs
    idle, beside, took = measure(url)
    print(f"{1e3 * idle:.1f} ms a token, {1e3 * beside:.1f} ms beside a prompt of {LONG} tokens ({took:.1f} s)")
    assert idle < beside <= 1.2 * target_s
    assert took < 60
