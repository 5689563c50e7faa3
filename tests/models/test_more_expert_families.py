"""The other half of the families with experts against transformers: see `test_expert_families.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import EXPERTS, check_family


@pytest.mark.parametrize("case", list(EXPERTS)[1::2])
def test_answers_as_transformers_does(case: str, tmp_path: Path) -> None:
    check_family(*EXPERTS[case], tmp_path)
