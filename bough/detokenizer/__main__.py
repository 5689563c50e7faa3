"""`python -m bough.detokenizer DIRECTORY`: the detokenizer process, started by `bough.launch`."""

import sys

from bough.detokenizer.process import run
from bough.ipc import run_child

if __name__ == "__main__":
    sys.exit(run_child("detokenizer", sys.argv[1], run, janitor=True))
