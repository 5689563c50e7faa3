"""Builds what is released: the wheel with CPU kernels for Linux on x86-64, the pure-Python wheel, and the sdist.

python deploy/build_wheels.py [--out dist]
Needs the package `build`, and a C++ compiler for the first of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds the wheels and the sdist.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory for them (%(default)s)")
    parser.add_argument("--only", choices=("prebuilt", "pure"), help="one of the wheels, and no sdist")
    arguments = parser.parse_args()
    for kind in ("prebuilt", "pure"):
        if arguments.only in (None, kind):
            _build(arguments.out, "--wheel", BOUGH_PREBUILT="1" if kind == "prebuilt" else "")
    if arguments.only is None:
        _build(arguments.out, "--sdist")
    for path in sorted(arguments.out.glob("bough-*")):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path}")
    return 0


def _build(out: Path, what: str, **variables: str) -> None:
    command = [sys.executable, "-m", "build", what, "--outdir", str(out), str(ROOT)]
    subprocess.run(command, env={**os.environ, **variables}, check=True)


if __name__ == "__main__":
    sys.exit(main())
