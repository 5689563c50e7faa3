"""What the scheduler learns while it runs: how long answers get, what a step costs, how often the tree hits."""

from __future__ import annotations

import math
from collections import deque

_WINDOW = 15
"""Steps of which the median is taken: enough that seven slow ones in a row (graph capture, a kernel being compiled) do not
change it, few enough that it follows a change of the load within a second. With one step in 40 slow, 1 to 15 make no
difference, and with 61 prompts wait 9 % longer (`benchmarks/scheduler_constants.py`)."""


class OutputRatio:
    """Share of `max_new_tokens` that requests use: moving mean and deviation."""

    def __init__(self, start: float = 0.7) -> None:
        self.mean = start
        self.variance = 0.04
        self.count = 0

    def observe(self, used: int, limit: int) -> None:
        if limit <= 0:
            return
        ratio = min(used / limit, 1.0)
        self.count += 1
        weight = max(0.02, 1.0 / (self.count + 1))
        off = ratio - self.mean
        self.mean += weight * off
        self.variance = (1.0 - weight) * (self.variance + weight * off * off)

    def retracted(self) -> None:
        """Records that the estimate was too low: memory ran out."""
        self.mean = min(1.0, self.mean * 1.1 + 0.02)

    def estimate(self, num_rows: int, conservativeness: float) -> float:
        """Share of their limits that `num_rows` rows will use in total, plus two standard deviations. The more rows,
        the closer their sum is to the mean, and the smaller the margin per row."""
        spare = 2.0 * math.sqrt(self.variance / max(num_rows, 1))
        return min(1.0, max(0.01, (self.mean + spare) * conservativeness))


class _Median:
    """Weighted median of the last few values, which a single slow step (a kernel being compiled) does not change."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self.value = 0.0

    def add(self, latest: float, weight: float = 1.0) -> None:
        self._recent.append((latest, weight))
        half = sum(each for _, each in self._recent) / 2
        for value, each in sorted(self._recent):
            half -= each
            if half < 0:
                self.value = value
                return

    def __bool__(self) -> bool:
        return bool(self._recent)


class StepCost:
    """Estimated milliseconds of a decode step, and of each additional prefill token."""

    def __init__(self) -> None:
        self._decode = _Median()
        self._per_token = _Median()

    @property
    def decode_ms(self) -> float:
        return self._decode.value

    @property
    def prefill_token_ms(self) -> float:
        return self._per_token.value

    def observe(self, ms: float, prefill_tokens: int) -> None:
        if prefill_tokens == 0:
            self._decode.add(ms)
        else:
            # Reading the weights costs as much as a decode step, even if no row decodes. Steps of few tokens say little
            # about the cost of one, so each step counts by its number of tokens.
            base = min(self._decode.value, 0.9 * ms)
            self._per_token.add((ms - base) / prefill_tokens, prefill_tokens)

    def tokens_within(self, target_ms: float | None, pace: float = 1.0) -> int | None:
        """Maximum number of prefill tokens such that a step with decode rows takes at most `pace` times the target;
        None: no limit is known."""
        if not self._per_token or self._per_token.value <= 0.0 or target_ms == 0.0:
            return None
        if target_ms is None:
            target_ms = max(50.0, 3.0 * self._decode.value)
        return max(0, int((pace * target_ms - self._decode.value) / self._per_token.value))


class HitRate:
    """Share of prompt tokens found in the prefix cache: since the start, and of the last requests (`recent`: a moving
    average in which each request counts 10 %)."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.recent = 0.0

    def observe(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.recent += 0.1 * (cached_tokens / max(prompt_tokens, 1) - self.recent)

    @property
    def overall(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
