"""What steps cost by how many tokens they verify, learned while they run."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

_WINDOW = 15
"""Steps whose times are remembered for each size: their median is not moved by one slow step."""
_ENOUGH = 3
"""Steps without drafts of a number of rows, before any with drafts is run."""
_LEAST_MS = 1e-3
_SLOPE = 0.1
"""Of a plain step's time: what one token more takes, as long as nothing is known."""


def size_of(num_tokens: int) -> int:
    """The size class of a token count: each of the first 32, then fewer."""
    if num_tokens <= 32:
        return num_tokens
    step = 8 if num_tokens <= 128 else 32
    return -(-num_tokens // step) * step


def rows_of(num_rows: int) -> int:
    """The class of a number of rows: each of the first 8, then by doubling."""
    return num_rows if num_rows <= 8 else 8 + num_rows.bit_length()


class _Times:
    """Median milliseconds of steps, by their tokens."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._median: dict[int, float] = {}
        self._sizes: list[int] = []

    def add(self, num_tokens: int, ms: float) -> None:
        size = size_of(num_tokens)
        recent = self._recent.get(size)
        if recent is None:
            recent = self._recent[size] = deque(maxlen=_WINDOW)
            insort(self._sizes, size)
        recent.append(ms)
        self._median[size] = sorted(recent)[len(recent) // 2]

    def count(self, num_tokens: int) -> int:
        """How many steps of this size are remembered."""
        return len(self._recent.get(size_of(num_tokens), ()))

    def of(self, num_tokens: int, slope_ms: float) -> float | None:
        """Milliseconds of a step: measured, between two that were, or `slope_ms` for each token beyond them."""
        if not self._sizes:
            return None
        size = size_of(num_tokens)
        found = self._median.get(size)
        if found is not None:
            return found
        at = bisect_left(self._sizes, size)
        if at == len(self._sizes):
            return self._median[self._sizes[-1]] + (size - self._sizes[-1]) * slope_ms
        high = self._sizes[at]
        if at == 0:
            return max(self._median[high] - (high - size) * slope_ms, 0.5 * self._median[high])
        low = self._sizes[at - 1]
        share = (size - low) / (high - low)
        return self._median[low] + share * (self._median[high] - self._median[low])


class VerifyCosts:
    """Milliseconds of a step of decode rows with drafts, by rows and tokens.

    Steps that wait for the one before to settle (`serial`) are counted apart from those that overlap with it.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[bool, int], _Times] = {}
        self.slope = _SLOPE
        """Of a plain step's time: what one token more takes, where it was not measured."""

    def add(self, num_rows: int, num_tokens: int, ms: float, *, serial: bool) -> None:
        self._times.setdefault((serial, rows_of(num_rows)), _Times()).add(num_tokens, max(ms, _LEAST_MS))

    def knows(self, num_rows: int, *, serial: bool) -> bool:
        """Whether steps of `num_rows` rows (rounded to their class) have run."""
        return (serial, rows_of(num_rows)) in self._times

    def knows_plain(self, num_rows: int) -> bool:
        """Whether the time of steps of `num_rows` rows without drafts is known; only then is it known what drafts save."""
        rows = rows_of(num_rows)
        return any(times.count(num_rows) >= _ENOUGH for (_, each), times in self._times.items() if each == rows)

    def of(self, num_rows: int, num_tokens: int, *, serial: bool) -> float:
        """Expected milliseconds. Where nothing of the kind has run yet, in units of a plain step's time."""
        rows = rows_of(num_rows)
        times = self._times.get((serial, rows)) or self._times.get((not serial, rows))
        plain = None if times is None else times.of(num_rows, 0.0)
        if times is None or plain is None:
            return 1.0 + (num_tokens - num_rows) * self.slope
        found = times.of(num_tokens, self.slope * plain)
        assert found is not None, "it has times"
        return found
