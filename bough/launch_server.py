"""`python -m bough.launch_server --model-path MODEL ...`: SGLang's spelling of `bough serve`."""

from __future__ import annotations

import sys

from bough.cli.main import call

if __name__ == "__main__":
    sys.exit(call("bough.cli.serve", sys.argv[1:]))
