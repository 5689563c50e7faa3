"""`bough bench NAME ...`: runs one of the benchmarks in `bough.bench`, which are listed without importing them."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from bough.core.errors import ConfigError

_PACKAGE = "bough.bench"


def run(argv: Sequence[str]) -> int:
    found = benches()
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: bough bench NAME [...]\n")
        print("\n".join(f"  {name:<12} {about}" for name, about in found.items()))
        print("\n`bough bench NAME --help` says more.")
        return 0
    name = argv[0].replace("-", "_")
    if name not in found:
        close = difflib.get_close_matches(name, found, n=1)
        raise ConfigError(
            what=f"there is no measurement {argv[0]!r}",
            why=f"there are: {', '.join(found)}",
            fix=f"did you mean `bough bench {close[0]}`?" if close else "see `bough bench --help`",
        )
    module = importlib.import_module(f"{_PACKAGE}.{name}")
    before = sys.argv
    sys.argv = [f"bough bench {name}", *argv[1:]]
    try:
        status = module.main()
    finally:
        sys.argv = before
    return status if isinstance(status, int) else 0


def benches() -> dict[str, str]:
    """Benchmarks by name: the modules of `bough.bench` with a `main`, and the first line of their docstrings."""
    spec = importlib.util.find_spec(_PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    found: dict[str, str] = {}
    for file in sorted(file for place in places for file in Path(place).glob("[!_]*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[file.stem] = (ast.get_docstring(tree) or "").split("\n")[0]
    return found
