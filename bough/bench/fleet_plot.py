"""Curves of a simulation as an SVG file, written without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

Points = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT = 960, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 400, 40, 50
_COLOURS = ("#1b6ca8", "#c44536", "#2a9d60", "#8f5bb0", "#d08700", "#3a3a3a", "#00929b", "#b0397a")


def draw(title: str, x_label: str, y_label: str, curves: Mapping[str, Points]) -> str:
    """Both axes are logarithmic. Every curve has points with positive coordinates."""
    points = [point for curve in curves.values() for point in curve]
    low_x, high_x = _decades([x for x, _ in points], 2)
    low_y, high_y = _decades([y for _, y in points], 10)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - math.log(low_x)) / (math.log(high_x) - math.log(low_x))
        up = (math.log(y) - math.log(low_y)) / (math.log(high_y) - math.log(low_y))
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text x="18" y="{_HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 18 {_HEIGHT / 2})">',
        f"{escape(y_label)}</text>",
    ]
    parts += _grid(low_x, high_x, low_y, high_y, place)
    for number, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        placed = [place(x, y) for x, y in sorted(curve)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in placed]
        below = _TOP + 18 * number
        parts.append(f'<rect x="{_WIDTH - _RIGHT + 16}" y="{below}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 34}" y="{below + 11}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _decades(values: Sequence[float], base: float) -> tuple[float, float]:
    """Powers of `base` around the values."""
    low = base ** math.floor(math.log(min(values), base) + 1e-9)
    high = base ** math.ceil(math.log(max(values), base) - 1e-9)
    return low, high if high > low else low * base


def _grid(low_x: float, high_x: float, low_y: float, high_y: float, place: object) -> list[str]:
    assert callable(place)
    parts, x = [], low_x
    while x <= high_x * 1.001:
        (at, bottom), (_, top) = place(x, low_y), place(x, high_y)
        parts.append(f'<line x1="{at:.1f}" y1="{bottom:.1f}" x2="{at:.1f}" y2="{top:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{x:g}</text>')
        x *= 2
    y = low_y
    while y <= high_y * 1.001:
        for step in (1, 2, 5):
            if y * step <= high_y * 1.001:
                (left, at), (right, _) = place(low_x, y * step), place(high_x, y * step)
                parts.append(f'<line x1="{left:.1f}" y1="{at:.1f}" x2="{right:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
                parts.append(f'<text x="{left - 6:.1f}" y="{at + 4:.1f}" text-anchor="end">{y * step:g}</text>')
        y *= 10
    return parts
