"""Few combinations of many axes, such that every pair of values of any two axes occurs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any


def pairwise_cover(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Greedy: each new combination takes the value that covers most open pairs, axis by axis. Deterministic."""
    names = list(axes)
    open_pairs = {
        ((a, x), (b, y))
        for a, b in combinations(names, 2)
        for x, y in product(range(len(axes[a])), range(len(axes[b])))
    }
    rows = []
    while open_pairs:
        seed = min(open_pairs)
        chosen: dict[str, int] = dict(seed)
        for name in names:
            if name in chosen:
                continue
            chosen[name] = max(
                range(len(axes[name])), key=lambda value, name=name: _gain(name, value, chosen, open_pairs, names)
            )
        open_pairs -= {((a, chosen[a]), (b, chosen[b])) for a, b in combinations(names, 2)}
        rows.append({name: axes[name][chosen[name]] for name in names})
    return rows


def _gain(name: str, value: int, chosen: dict[str, int], open_pairs: set[Any], names: list[str]) -> int:
    gain = 0
    for other, picked in chosen.items():
        pair = ((name, value), (other, picked))
        if names.index(name) > names.index(other):
            pair = (pair[1], pair[0])
        gain += pair in open_pairs
    return gain
