"""One name means one thing: no two classes of the package share a name, but for those of one concept listed here."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2] / "bough"

SAME_CONCEPT = {
    "BoughServicer",  # generated, and what implements it
    "ChatTemplate",  # the model's, and the language's for servers that report none
    "ReasoningFormat",  # the parsers', and the language's names for them
    "SamplingParams",  # the engine's, and those of a `gen`
}


@cache
def repeated() -> dict[str, list[str]]:
    """Public class names that several files have. Files are parsed where a line of several looks like the same class."""
    lines: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for name in re.findall(r"\bclass\s+(\w+)", path.read_text(encoding="utf-8")):
            lines[name].append(path)
    suspects = {path for paths in lines.values() if len(paths) > 1 for path in paths}
    files: dict[str, list[str]] = defaultdict(list)
    for path in sorted(suspects):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(str(path.relative_to(ROOT)))
    return {name: found for name, found in files.items() if len(found) > 1}


def test_no_name_has_two_meanings() -> None:
    found = {name: files for name, files in repeated().items() if name not in SAME_CONCEPT}
    assert not found, f"rename one of each: {found}"


def test_every_excuse_is_needed() -> None:
    assert set(repeated()) >= SAME_CONCEPT
