"""Which combinations of a test's parameters `make test` runs: a cover of them; `make test-long` runs the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest


def cover(*axes: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
    """Every combination, for `pytest.mark.parametrize` with one name for each axis.

    As few as have every member of every axis are unmarked; the others are `long`. The keys of a mapping are its ids.
    """
    named = [_named(axis) for axis in axes]
    chosen = {tuple(at % len(axis) for axis in named) for at in range(max(len(axis) for axis in named))}
    made = []
    for place in product(*(range(len(axis)) for axis in named)):
        names, values = zip(*(axis[at] for axis, at in zip(named, place, strict=True)), strict=True)
        made.append(pytest.param(*values, id="-".join(names), marks=[] if place in chosen else pytest.mark.long))
    return made


def long(*values: Any) -> Any:
    """A case for `pytest.mark.parametrize` that only `make test-long` runs."""
    return pytest.param(*values, marks=pytest.mark.long)


def _named(axis: Sequence[Any] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    return list(axis.items()) if isinstance(axis, Mapping) else [(str(each), each) for each in axis]
