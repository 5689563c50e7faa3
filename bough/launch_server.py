"""`python -m bough.launch_server --model-path MODEL ...`: SGLang's spelling of `bough serve`."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    runpy.run_module("bough", run_name="__main__")
