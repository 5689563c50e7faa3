"""The operations page tells of every metric and every bound, as they are."""

from __future__ import annotations

from pathlib import Path

from bough.core.bounds import BOUNDS
from bough.observability.metrics import METRICS

TEXT = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()


def test_every_metric_is_there() -> None:
    for metric in METRICS:
        labels = f" by {', '.join(metric.labels)}" if metric.labels else ""
        assert f"| `bough:{metric.name}`{labels} | {metric.kind} | {metric.about} |" in TEXT, metric.name


def test_every_bound_is_there() -> None:
    for name, bound in BOUNDS.items():
        assert f"| `{name}` | {bound.most:,} {bound.unit} |" in TEXT, name
