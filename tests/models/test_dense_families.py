"""Dense families against transformers: see `families.check_family`."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import DENSE, check_family


@pytest.mark.parametrize("case", DENSE)
def test_answers_as_transformers_does(case: str, tmp_path: Path) -> None:
    check_family(*DENSE[case], tmp_path)
