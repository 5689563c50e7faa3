"""Numbers between bounds, against comparison."""

from __future__ import annotations

import json
import re
from decimal import Decimal

from hypothesis import given, settings, strategies as st

from bough.grammar.notation import to_regex
from bough.grammar.numbers import NumberBounds, integers, numbers
from bough.grammar.rules import NOTHING, Grammar

SMALL = st.builds(lambda n, places: Decimal(n).scaleb(-places), st.integers(-3000, 3000), st.integers(0, 3))
EDGES = st.one_of(st.none(), SMALL)


def inside(value: Decimal, bounds: NumberBounds) -> bool:
    above = bounds.low is None or value > bounds.low or (value == bounds.low and not bounds.low_open)
    below = bounds.high is None or value < bounds.high or (value == bounds.high and not bounds.high_open)
    return above and below


def plain(value: Decimal) -> str:
    return format(value, "f")


@settings(deadline=None)
@given(EDGES, EDGES, st.booleans(), st.booleans(), st.lists(SMALL, min_size=1, max_size=20))
def test_numbers_in_and_out(
    low: Decimal | None, high: Decimal | None, low_open: bool, high_open: bool, values: list[Decimal]
) -> None:
    bounds = NumberBounds(low, high, low_open and low is not None, high_open and high is not None)
    edges = [edge for edge in (low, high) if edge is not None]
    near = [edge + step for edge in edges for step in (Decimal(0), Decimal("0.01"), Decimal("-0.01"), Decimal(1))]
    node, whole = numbers(bounds), integers(bounds)
    number, integer = re.compile(to_regex(node)), re.compile(to_regex(whole))
    for value in [*values, *near]:
        if value or not plain(value).startswith("-"):
            assert bool(number.fullmatch(plain(value))) == inside(value, bounds), (value, bounds)
        rounded = Decimal(int(value))
        assert bool(integer.fullmatch(plain(rounded))) == inside(rounded, bounds), (rounded, bounds)


@settings(deadline=None)
@given(EDGES, EDGES, st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_what_is_drawn_is_inside_even_after_rounding(
    low: Decimal | None, high: Decimal | None, low_open: bool, high_open: bool, rng: object
) -> None:
    from tests.unit.grammar.random_texts import Sampler

    bounds = NumberBounds(low, high, low_open and low is not None, high_open and high is not None)
    for node in (numbers(bounds), integers(bounds)):
        if node != NOTHING:
            value = json.loads(Sampler(Grammar({"root": node}), rng).text())  # type: ignore[arg-type]
            assert low is None or value > float(low) or (value == float(low) and not bounds.low_open)
            assert high is None or value < float(high) or (value == float(high) and not bounds.high_open)
