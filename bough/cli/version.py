"""`bough version`: versions of bough and of the libraries it uses."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata

import bough


def run(argv: Sequence[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        print("usage: bough version\n\nPrints the versions of bough, Python and the libraries that matter.")
        return 0
    print(f"bough {bough.__version__}")
    print(f"python {platform.python_version()}")
    for package in ("torch", "triton", "transformers", "xgrammar"):
        print(f"{package} {installed(package) or 'not installed'}")
    return 0


def installed(package: str) -> str:
    """A package's version without importing it; empty: not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
