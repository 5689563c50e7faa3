"""`python -m bough.engine DIRECTORY [RANK NAME]`: one rank of an engine, started by `bough.launch`."""

import gc
import sys
import time
from functools import partial

from bough.config.layout import Layout
from bough.engine.places import device_index, sharing
from bough.ipc import Launch, run_child
from bough.platform.environment import prepare_environment
from bough.platform.facts import computes_on_gpu


def run(launch: Launch, name: str, rank: int) -> None:
    prepare_environment(on_gpu=partial(computes_on_gpu, launch.config.device.device))  # before torch is imported
    from bough.engine.early import Early
    from bough.observability.switches import LogListener

    LogListener(launch.server.path(""), name).follow()
    alone = Layout.of(launch.config.parallel).size == 1
    early = Early(launch.config, device_index(launch, rank), sharing(launch) if alone else 0)
    began = time.perf_counter()
    from bough.engine.build import run_rank

    run_rank(launch, rank, early, time.perf_counter() - began)


if __name__ == "__main__":
    gc.disable()  # until the engine is ready: modules are no garbage
    number, title = (int(sys.argv[2]), sys.argv[3]) if len(sys.argv) > 2 else (0, "engine")
    sys.exit(run_child(title, sys.argv[1], lambda launch: run(launch, title, number)))
