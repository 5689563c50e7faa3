"""`python -m bough.detokenizer DIRECTORY`: the detokenizer process, started by `bough.launch`."""

import sys

from bough.detokenizer.process import run
from bough.ipc import Launch, run_child
from bough.observability.switches import LogListener


def body(launch: Launch) -> None:
    LogListener(launch.endpoints.path(""), "detokenizer").follow()
    run(launch)


if __name__ == "__main__":
    sys.exit(run_child("detokenizer", sys.argv[1], body, janitor=True))
