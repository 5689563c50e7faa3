"""Families whose attention reads latents against transformers: see `families.check_family`."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import LATENTS, check_family


@pytest.mark.parametrize("case", LATENTS)
def test_answers_as_transformers_does(case: str, tmp_path: Path) -> None:
    check_family(*LATENTS[case], tmp_path)
