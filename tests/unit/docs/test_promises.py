"""docs/promises.md names tests: each of them is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "promises.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_named_test_exists() -> None:
    named = NAMED.findall(PAGE.read_text())
    assert len(named) > 60
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in found, f"{path} has no {name}"


def test_every_promise_names_a_test() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "shown by" not in line]
    for row in rows:
        assert NAMED.search(row), row
