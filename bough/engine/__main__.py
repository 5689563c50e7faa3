"""`python -m bough.engine DIRECTORY [RANK]`: one rank of the engine, started by `bough.launch`."""

import sys

from bough.platform.environment import prepare_environment

if __name__ == "__main__":
    prepare_environment()  # before torch is imported

    from bough.engine.build import run_rank
    from bough.ipc import run_child

    rank = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    name = "engine" if rank == 0 else f"rank{rank}"
    sys.exit(run_child(name, sys.argv[1], lambda launch: run_rank(launch, rank)))
