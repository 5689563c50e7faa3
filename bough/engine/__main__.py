"""`python -m bough.engine DIRECTORY [RANK]`: one rank of the engine, started by `bough.launch`."""

import sys

from bough.platform.environment import prepare_environment

if __name__ == "__main__":
    prepare_environment()  # before torch is imported

    from bough.engine.build import run_rank
    from bough.ipc import Launch, run_child
    from bough.observability.switches import LogListener

    rank = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    name = "engine" if rank == 0 else f"rank{rank}"

    def body(launch: Launch) -> None:
        LogListener(launch.endpoints.path(""), name).follow()
        run_rank(launch, rank)

    sys.exit(run_child(name, sys.argv[1], body))
