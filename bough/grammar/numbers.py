"""JSON numbers between bounds, as grammar trees over their decimal digits."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from bough.grammar.rules import EMPTY, NOTHING, Chars, LiteralText, Node, alt, one_of, optional, repeat, seq, text

MAX_DIGITS = 32
"""Digits of an integer; a number has half of them before the point and half after it."""
_HALF = MAX_DIGITS // 2
_DIGIT = Chars(((48, 57),))
_FIRST = Chars(((49, 57),))


@dataclass(frozen=True, slots=True)
class NumberBounds:
    """Limits of a number. Exclusive ones are not reached."""

    low: Decimal | None = None
    high: Decimal | None = None
    low_open: bool = False
    high_open: bool = False

    @property
    def free(self) -> bool:
        return self.low is None and self.high is None


def integers(bounds: NumberBounds) -> Node:
    """Integers within the bounds, of at most `MAX_DIGITS` digits."""
    if bounds.free:
        return alt(LiteralText("0"), seq(optional(LiteralText("-")), _FIRST, repeat(_DIGIT, 0, MAX_DIGITS - 1)))
    most = 10**MAX_DIGITS - 1
    low, high = -most, most
    if bounds.low is not None:
        low = max(low, int(bounds.low.to_integral_value(ROUND_CEILING)))
        low += bounds.low_open and low == bounds.low
    if bounds.high is not None:
        high = min(high, int(bounds.high.to_integral_value(ROUND_FLOOR)))
        high -= bounds.high_open and high == bounds.high
    if low > high:
        return NOTHING
    branches: list[Node] = []
    if low < 0:
        branches.append(seq(LiteralText("-"), _between(max(1, -high), -low)))
    if high >= 0:
        branches.append(_between(max(0, low), high))
    return alt(*branches)


def numbers(bounds: NumberBounds) -> Node:
    """Numbers within the bounds. Free ones may have an exponent."""
    if bounds.free:
        whole = alt(LiteralText("0"), seq(_FIRST, repeat(_DIGIT, 0, _HALF - 1)))
        fraction = optional(seq(LiteralText("."), repeat(_DIGIT, 1, _HALF)))
        exponent = optional(seq(one_of("eE"), optional(one_of("+-")), repeat(_DIGIT, 1, 2)))
        return seq(optional(LiteralText("-")), whole, fraction, exponent)
    branches: list[Node] = []
    if bounds.low is None or bounds.low < 0:
        high = -bounds.low if bounds.low is not None else None
        below = bounds.high is not None and bounds.high < 0
        low = -bounds.high if below and bounds.high is not None else Decimal(0)
        branches.append(
            seq(LiteralText("-"), _magnitude(low, bounds.high_open if below else True, high, bounds.low_open))
        )
    if bounds.high is None or bounds.high >= 0:
        above = bounds.low is not None and bounds.low >= 0
        low = bounds.low if above and bounds.low is not None else Decimal(0)
        branches.append(_magnitude(low, above and bounds.low_open, bounds.high, bounds.high_open))
    return alt(*branches)


# -- whole numbers ----------------------------------------------------------------------------------


def _between(low: int, high: int) -> Node:
    """Decimal spellings, without leading zeros, of the integers 0 <= low..high."""
    if low > high:
        return NOTHING
    branches: list[Node] = []
    for num_digits in range(len(str(low)), len(str(high)) + 1):
        least = max(low, 0 if num_digits == 1 else 10 ** (num_digits - 1))
        most = min(high, 10**num_digits - 1)
        if least <= most:
            branches.append(_same_width(str(least), str(most)))
    return alt(*_joined_widths(branches))


def _joined_widths(branches: list[Node]) -> list[Node]:
    """Joins alternatives with consecutive numbers of free digits into one repetition."""
    free = [seq(_FIRST, repeat(_DIGIT, n, n)) for n in range(MAX_DIGITS)]
    at = [free.index(branch) if branch in free else -1 for branch in branches]
    known = [n for n in at if n > 0]
    if len(known) < 3:
        return branches
    rest = [branch for branch, n in zip(branches, at, strict=True) if n <= 0]
    return [*rest, seq(_FIRST, repeat(_DIGIT, known[0], known[-1]))]


def _same_width(low: str, high: str) -> Node:
    """Digit strings between two of the same length."""
    if low == high:
        return text(low)
    if set(low) == {"0"} and set(high) == {"9"}:
        return repeat(_DIGIT, len(low), len(low))
    if low[0] == high[0]:
        return seq(LiteralText(low[0]), _same_width(low[1:], high[1:]))
    rest = len(low) - 1
    if not rest:
        return _digits(low, high)
    branches: list[Node] = []
    first, last = low[0], high[0]
    if set(low[1:]) != {"0"}:
        branches.append(seq(LiteralText(first), _same_width(low[1:], "9" * rest)))
        first = chr(ord(first) + 1)
    tail: list[Node] = []
    if set(high[1:]) != {"9"}:
        tail.append(seq(LiteralText(last), _same_width("0" * rest, high[1:])))
        last = chr(ord(last) - 1)
    if first <= last:
        branches.append(seq(_digits(first, last), repeat(_DIGIT, rest, rest)))
    return alt(*branches, *tail)


def _digits(low: str, high: str) -> Node:
    return LiteralText(low) if low == high else Chars(((ord(low), ord(high)),))


# -- magnitudes: a whole part and a fraction --------------------------------------------------------


def _magnitude(low: Decimal, low_open: bool, high: Decimal | None, high_open: bool) -> Node:
    """Numbers without sign and exponent, low <= x <= high (or strictly, where open)."""
    if high is not None and (low > high or (low == high and (low_open or high_open))):
        return NOTHING
    low_whole, low_part = _split(low)
    high_whole, high_part = _split(high) if high is not None else (10**_HALF, "")
    high_open = high_open or high is None
    if low_whole == high_whole:
        return seq(text(str(low_whole)), _fraction_between(low_part, low_open, high_part, high_open, low_whole))
    branches: list[Node] = [seq(text(str(low_whole)), _fraction_from(low_part, low_open, low_whole))]
    branches.append(seq(_between(low_whole + 1, min(high_whole, 10**_HALF) - 1), _ANY_FRACTION))
    if high_whole < 10**_HALF:
        branches.append(seq(text(str(high_whole)), _fraction_to(high_part, high_open, high_whole)))
    return alt(*(branch for branch in branches if branch != NOTHING))


_ANY_FRACTION = optional(seq(LiteralText("."), repeat(_DIGIT, 1, _HALF)))


def _split(value: Decimal) -> tuple[int, str]:
    """Whole part, and the digits after the point without trailing zeros."""
    whole = int(value)
    digits = format(value - whole, "f").partition(".")[2].rstrip("0")
    return whole, digits[:_HALF]


def _room(is_open: bool, whole: int) -> int:
    """Digits after the point: few enough that a reader's rounding never reaches a bound that must not be reached."""
    return max(1, 15 - len(str(whole))) if is_open else _HALF


def _fraction_from(low: str, is_open: bool, whole: int) -> Node:
    """A fraction (or none) of at least .low."""
    if not low and not is_open:
        return _ANY_FRACTION
    return seq(LiteralText("."), _digits_from(low, is_open, _room(is_open, whole)))


def _fraction_to(high: str, is_open: bool, whole: int) -> Node:
    """A fraction (or none) of at most .high."""
    if not high:
        return NOTHING if is_open else optional(seq(LiteralText("."), repeat(LiteralText("0"), 1, _HALF)))
    return optional(seq(LiteralText("."), _digits_to(high, is_open, _room(is_open, whole), first=True)))


def _fraction_between(low: str, low_open: bool, high: str, high_open: bool, whole: int) -> Node:
    """A fraction (or none) from .low to .high."""
    bare = EMPTY if not low and not low_open and (high or not high_open) else NOTHING
    dotted = seq(LiteralText("."), _digits_between(low, low_open, high, high_open, _room(low_open or high_open, whole)))
    return (
        alt(*(part for part in (bare, dotted) if part != NOTHING)) if bare != NOTHING or dotted != NOTHING else NOTHING
    )


def _some(room: int, at_least: int = 0) -> Node:
    return repeat(_DIGIT, at_least, room) if room >= at_least else NOTHING


def _digits_from(low: str, is_open: bool, room: int) -> Node:
    """At least one digit, .digits >= .low."""
    if room <= 0:
        return NOTHING
    if not low:
        if not is_open:
            return _some(room, 1)
        return alt(*(seq(text("0" * n), _FIRST, _some(room - n - 1)) for n in range(min(room, _HALF))))
    branches: list[Node] = []
    if low[0] < "9":
        branches.append(seq(_digits(chr(ord(low[0]) + 1), "9"), _some(room - 1)))
    if len(low) == 1 and not is_open:
        branches.append(seq(LiteralText(low), _some(room - 1)))
    else:
        branches.append(seq(LiteralText(low[0]), _digits_from(low[1:], is_open, room - 1)))
    return alt(*(branch for branch in branches if branch != NOTHING))


def _digits_to(high: str, is_open: bool, room: int, *, first: bool = False) -> Node:
    """.digits <= .high; no digits at all only after the first one."""
    if room <= 0:
        return NOTHING if first else EMPTY
    if not high:
        if is_open:
            return NOTHING
        return repeat(LiteralText("0"), 1 if first else 0, room)
    branches: list[Node] = []
    if high[0] > "0":
        branches.append(seq(_digits("0", chr(ord(high[0]) - 1)), _some(room - 1)))
    rest = _digits_to(high[1:], is_open, room - 1)
    if rest != NOTHING:
        branches.append(seq(LiteralText(high[0]), rest))
    body = alt(*branches)
    return body if first else optional(body)


def _digits_between(low: str, low_open: bool, high: str, high_open: bool, room: int) -> Node:
    """At least one digit, .low <= .digits <= .high."""
    if not low and not low_open:
        return _digits_to(high, high_open, room, first=True)
    if room <= 0:
        return NOTHING
    head_low, head_high = low[:1] or "0", high[:1] or "0"
    if head_low > head_high:
        return NOTHING
    if head_low == head_high:
        rest = _digits_between(low[1:], low_open, high[1:], high_open, room - 1)
        ends_here = not low[1:] and not low_open and (bool(high[1:]) or not high_open)
        if ends_here:
            rest = optional(rest) if rest != NOTHING else EMPTY
        if not low and not high:
            return NOTHING
        return seq(LiteralText(head_low), rest) if rest != NOTHING else NOTHING
    branches: list[Node] = []
    if not low[1:] and not low_open:
        branches.append(seq(LiteralText(head_low), _some(room - 1)))
    else:
        branches.append(seq(LiteralText(head_low), _digits_from(low[1:], low_open, room - 1)))
    if ord(head_high) - ord(head_low) > 1:
        branches.append(seq(_digits(chr(ord(head_low) + 1), chr(ord(head_high) - 1)), _some(room - 1)))
    rest = _digits_to(high[1:], high_open, room - 1)
    if rest != NOTHING:
        branches.append(seq(LiteralText(head_high), rest))
    return alt(*(branch for branch in branches if branch != NOTHING))
