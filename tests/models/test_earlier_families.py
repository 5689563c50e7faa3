"""Families of earlier years against transformers: see `families.check_family`."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import EARLIER, check_family


@pytest.mark.parametrize("case", EARLIER)
def test_answers_as_transformers_does(case: str, tmp_path: Path) -> None:
    check_family(*EARLIER[case], tmp_path)
