"""Families with experts against transformers: see `families.check_family`. In two files, which `make test` runs at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import EXPERTS, check_family


@pytest.mark.parametrize("case", list(EXPERTS)[0::2])
def test_answers_as_transformers_does(case: str, tmp_path: Path) -> None:
    check_family(*EXPERTS[case], tmp_path)
