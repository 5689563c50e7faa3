"""Families with experts against transformers: see `families.check_family`."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import EXPERTS, check_family


@pytest.mark.parametrize("case", EXPERTS)
def test_answers_as_transformers_does(case: str, tmp_path: Path) -> None:
    check_family(*EXPERTS[case], tmp_path)
