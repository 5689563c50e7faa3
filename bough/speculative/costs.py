"""What steps take by their kind, learned while they run, on machines whose speed changes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

_WINDOW = 64
"""Steps whose times are remembered for each kind; the mean of the middle half of them counts, which slow ones don't move."""
_ENOUGH = 3
"""Steps of a kind, before it is compared with others."""
_FOLLOW, _FALL_BACK = 0.1, 0.02
"""How much of a step's deviation counts as a change of the machine's speed, and how much of such changes is taken back with
each step: what lasts will be seen in the times of all kinds."""
_MOST_DEVIATION = 1.5
_DOUBT = 1.2
"""How far the mean of a few steps may be off: in ranges of their middle half, divided by the root of their number."""
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


class StepPace:
    """How slow the machine is at present, beside when steps were first timed.

    What counts is how steps of several kinds compare, and they seldom run at the same time. A machine that is busy with
    other work slows all of them down, so deviations of any step from what its kind usually takes are taken for the
    machine's, and all times are measured by it.
    """

    def __init__(self) -> None:
        self.slowness = 1.0

    def note(self, deviation: float) -> None:
        """Notes the ratio of the time a step took to the time that was expected."""
        bounded = min(max(deviation, 1 / _MOST_DEVIATION), _MOST_DEVIATION)
        self.slowness = float(self.slowness ** (1 - _FALL_BACK) * bounded**_FOLLOW)


class StepTimes:
    """Usual milliseconds of steps by their kind: a number with which they take longer."""

    def __init__(self, pace: StepPace) -> None:
        self._pace = pace
        self._recent: dict[int, deque[float]] = {}
        self._middle: dict[int, float] = {}
        self._doubt: dict[int, float] = {}
        self._kinds: list[int] = []

    def add(self, kind: int, ms: float) -> None:
        ms = max(ms, _LEAST_MS)
        recent = self._recent.get(kind)
        if recent is None:
            recent = self._recent[kind] = deque(maxlen=_WINDOW)
            insort(self._kinds, kind)
        if len(recent) >= _ENOUGH:
            self._pace.note(ms / (self._pace.slowness * self._middle[kind]))
        recent.append(ms / self._pace.slowness)
        ordered, count = sorted(recent), len(recent)
        middle = ordered[count // 4 : count - count // 4]
        if count < 4:  # one of them may be the first of its kind ever, and have taken very long
            middle = ordered[(count - 1) // 2 : (count + 1) // 2]
        self._middle[kind] = sum(middle) / len(middle)
        self._doubt[kind] = _DOUBT * (middle[-1] - middle[0]) / len(recent) ** 0.5

    @property
    def largest(self) -> int:
        """Of the kinds that have run; 0: none has."""
        return self._kinds[-1] if self._kinds else 0

    def known(self, kind: int, count: int = _ENOUGH) -> bool:
        """Have as many steps of the kind run?"""
        return len(self._recent.get(kind, ())) >= count

    def at_least(self, kind: int) -> float:
        """Milliseconds of a step of a kind that has run; less, the less is known about it."""
        return (self._middle[kind] - self._doubt[kind]) * self._pace.slowness

    def of(self, kind: int, slope_ms: float | None = None) -> float | None:
        """Milliseconds of a step at the machine's present speed: measured, on the line between two kinds that were, or
        `slope_ms` for each one beyond them (None: as the line goes on). None: nothing has run."""
        found = self._at(kind, None if slope_ms is None else slope_ms / self._pace.slowness)
        return None if found is None else found * self._pace.slowness

    def _at(self, kind: int, slope: float | None) -> float | None:
        if not self._kinds:
            return None
        found = self._middle.get(kind)
        if found is not None:
            return found
        first, last = self._kinds[0], self._kinds[-1]
        if slope is None:
            slope = max(self._middle[last] - self._middle[first], 0.0) / max(last - first, 1)
        if kind > last:
            return self._middle[last] + (kind - last) * slope
        if kind < first:
            return max(self._middle[first] - (first - kind) * slope, 0.5 * self._middle[first])
        at = bisect_left(self._kinds, kind)
        low, high = self._kinds[at - 1], self._kinds[at]
        share = (kind - low) / (high - low)
        return self._middle[low] + share * (self._middle[high] - self._middle[low])


class VerifyCosts:
    """Milliseconds of a step of decode rows with drafts, by rows and tokens.

    Steps that wait for the one before to settle (`serial`) are counted apart from those that overlap with it.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[bool, int], StepTimes] = {}
        self._pace = StepPace()
        self.slope = _SLOPE
        """Of a plain step's time: what one token more takes, where it was not measured."""

    def add(self, num_rows: int, num_tokens: int, ms: float, *, serial: bool) -> None:
        self._times.setdefault((serial, rows_of(num_rows)), StepTimes(self._pace)).add(size_of(num_tokens), ms)

    def knows(self, num_rows: int, *, serial: bool) -> bool:
        """Whether steps of `num_rows` rows (rounded to their class) have run."""
        return (serial, rows_of(num_rows)) in self._times

    def knows_plain(self, num_rows: int) -> bool:
        """Whether the time of steps with this many rows without drafts is known. Otherwise the gain of drafts is unknown."""
        rows, size = rows_of(num_rows), size_of(num_rows)
        return any(times.known(size) for (_, each), times in self._times.items() if each == rows)

    def plain(self, num_rows: int, *, serial: bool) -> float:
        """Milliseconds of a step without drafts, rather too few than too many; in units of its own if none has run."""
        times, size = self._times.get((serial, rows_of(num_rows))), size_of(num_rows)
        if times is None or not times.known(size, 1):
            return self.of(num_rows, num_rows, serial=serial)
        return times.at_least(size)

    def most_tokens(self, num_rows: int) -> int:
        """Tokens that a step of `num_rows` rows should have at most: what far larger steps than seen cost is unknown."""
        rows = rows_of(num_rows)
        return 2 + 2 * max(times.largest for (_, each), times in self._times.items() if each == rows)

    def of(self, num_rows: int, num_tokens: int, *, serial: bool) -> float:
        """Expected milliseconds. Where nothing of the kind has run yet, in units of a plain step's time."""
        rows = rows_of(num_rows)
        times = self._times.get((serial, rows)) or self._times.get((not serial, rows))
        plain = None if times is None else times.of(size_of(num_rows), 0.0)
        if times is None or plain is None:
            return 1.0 + (num_tokens - num_rows) * self.slope
        found = times.of(size_of(num_tokens), self.slope * plain)
        assert found is not None, "it has times"
        return found
