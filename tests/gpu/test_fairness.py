"""One prompt of 128k tokens on a model of 8 billion parameters: what others notice of it, measured."""

from __future__ import annotations

import json

import pytest

from bough.bench.fairness import MOST_RATIO, MOST_SHORT_S
from bough.cli import bench

pytestmark = [pytest.mark.timeout(240), pytest.mark.alone]


def test_others_hardly_notice(capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.run(["fairness", "--json", "--seconds", "15"]) == 0
    facts = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
    assert facts["tpot_ratio"] <= MOST_RATIO, facts
    assert facts["worst_short_ttft_s"] <= MOST_SHORT_S, facts
    assert facts["short_prompts"] >= 3
