"""What recipes show is there: the code in them is the code of this repository, and it is as short as they say."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from bough.models.catalogue import GROUPS
from bough.models.registry import ARCHITECTURES

ROOT = Path(__file__).parents[3]
RECIPE = (ROOT / "docs" / "recipes" / "add_model.md").read_text()


@pytest.mark.parametrize(
    ("begin", "file"),
    [("def read(", "bough/models/qwen3.py"), ("class PreNormBlock", "bough/layers/blocks.py")],
)
def test_the_recipe_shows_code_that_exists(begin: str, file: str) -> None:
    (shown,) = [code for code in re.findall(r"```python\n(.*?)```", RECIPE, re.DOTALL) if code.startswith(begin)]
    assert shown in (ROOT / file).read_text()


def test_a_dense_family_takes_less_than_80_lines() -> None:
    """Its reader and its mapping of names included."""
    dense = next(group for group in GROUPS if group.title == "Dense")
    modules = {ARCHITECTURES[name] for name in dense.examples}
    lines = {module: len(Path(str(import_module(module).__file__)).read_text().splitlines()) for module in modules}
    assert max(lines.values()) < 80, lines
