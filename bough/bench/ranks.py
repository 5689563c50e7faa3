"""The cost of several ranks on one machine: rank 0's time to send a step to the others, and the collectives by size.

    bough bench ranks --ranks 8 --rows 256        # the hand-over of decode steps, through the ring and through sockets
    bough bench ranks --ranks 2 --collectives     # all-reduce in shared memory and over gloo

The other processes only read steps, or only take part in collectives: no model is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

from bough.bench.fake_runner import NullRunner
from bough.config.concerns import ParallelConfig
from bough.config.layout import Layout
from bough.core.step import RunnerLimits, Step
from bough.distributed.collectives import Collectives
from bough.distributed.join import join_mesh
from bough.engine.step_channels import StepChannel, Ways, open_channel, open_source
from bough.engine.worker import BroadcastRunner, ToWorker, run_worker
from bough.ipc import Endpoints, Inbox, Outbox
from bough.ipc.link import Listener
from bough.ipc.store import AnyStore, Store, StoreServer

_STEPS = 400
_PAUSE_S = 0.002
"""Between two steps: the device's time, in which the other ranks go back to sleep."""
_LIMITS = RunnerLimits(
    num_slots=1024, num_pages=1024, page_size=16, pages_per_slot=256, context_length=4096, max_step_tokens=8192,
    vocab_size=32000,
)  # fmt: skip
_SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20)
_ROUNDS = {4 << 10: 300, 64 << 10: 200, 1 << 20: 60, 4 << 20: 20}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="processes, rank 0 included")
    parser.add_argument("--rows", type=int, default=256, help="decode rows of a step")
    parser.add_argument("--collectives", action="store_true", help="time all-reduce instead of the hand-over of steps")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", nargs=3, metavar=("RANK", "MODE", "DIRECTORY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        rank, mode, directory = arguments.serve
        _other_rank(int(rank), arguments.ranks, mode, Endpoints(directory))
        return 0
    modes = ("shared", "gloo") if arguments.collectives else ("ring", "sockets")
    results: dict[str, dict[str, float]] = {}
    for mode in modes:
        with tempfile.TemporaryDirectory(prefix="bough-bench-") as directory:
            results[mode] = _measure(arguments.ranks, arguments.rows, mode, Endpoints(directory))
    if arguments.json:
        print(json.dumps(results))
        return 0
    unit = "all-reduce, us (median)" if arguments.collectives else f"time in launch, {arguments.rows} rows, us"
    print(f"{arguments.ranks} ranks: {unit}")
    for mode, numbers in results.items():
        print(f"  {mode:<8} " + "  ".join(f"{name} {value:.1f}" for name, value in numbers.items()))
    return 0


def _measure(num_ranks: int, num_rows: int, mode: str, endpoints: Endpoints) -> dict[str, float]:
    server = StoreServer([Listener(endpoints.meeting)])
    command = [sys.executable, "-m", "bough.bench.ranks", "--ranks", str(num_ranks)]
    others = [
        subprocess.Popen([*command, "--serve", str(rank), mode, endpoints.directory]) for rank in range(1, num_ranks)
    ]
    try:
        store = server.local()
        if mode in ("shared", "gloo"):
            return _time_collectives(_talk(0, num_ranks, mode, store))
        return _time_launches(num_ranks, num_rows, mode, endpoints, store)
    finally:
        for other in others:
            other.wait(60)
        server.close()


def _time_launches(num_ranks: int, num_rows: int, mode: str, endpoints: Endpoints, store: AnyStore) -> dict[str, float]:
    channel: StepChannel
    if mode == "ring":
        channel = open_channel(store, endpoints, ParallelConfig(tp_size=num_ranks), 0)
    else:
        channel = Ways([Outbox(endpoints.rank(rank)) for rank in range(1, num_ranks)])
    runner = BroadcastRunner(NullRunner(_LIMITS), channel)
    store.wait([f"here/{rank}" for rank in range(1, num_ranks)])
    spent: list[float] = []
    busy: list[float] = []
    for index in range(_STEPS):
        step = _decode_step(index, num_rows)
        began_busy, began = time.thread_time(), time.perf_counter()
        runner.launch(step)
        ended, ended_busy = time.perf_counter(), time.thread_time()  # the latter is a system call
        spent.append(1e6 * (ended - began))
        busy.append(1e6 * (ended_busy - began_busy))
        time.sleep(_PAUSE_S)
    runner.stop()
    return {
        "median": statistics.median(spent),
        "p90": float(np.percentile(spent, 90)),
        "CPU median": statistics.median(busy),
    }


def _decode_step(index: int, num_rows: int) -> Step:
    """As `commit` makes it: one token a row, a page-table write for some."""
    writes = num_rows // 16
    return Step(
        index=index,
        num_decodes=num_rows,
        slots=np.arange(num_rows, dtype=np.int32),
        num_query=np.ones(num_rows, np.int32),
        context=np.full(num_rows, 1000 + index, np.int32),
        samples=np.ones(num_rows, np.bool_),
        tokens=np.full(num_rows, -1, np.int32),
        table_at=np.arange(writes, dtype=np.int64),
        table_pages=np.arange(writes, dtype=np.int32),
    )


def _time_collectives(talk: Collectives) -> dict[str, float]:
    results = {}
    for size in _SIZES:
        x = torch.ones(size // 4)
        spent = []
        for _ in range(_ROUNDS[size]):
            began = time.perf_counter()
            talk.all_reduce(x)
            spent.append(1e6 * (time.perf_counter() - began))
        results[f"{size >> 10} KiB"] = statistics.median(spent[len(spent) // 10 :])
    talk.close()
    return results


def _talk(rank: int, num_ranks: int, mode: str, store: AnyStore) -> Collectives:
    torch.set_num_threads(1)
    hosts = list(range(num_ranks)) if mode == "gloo" else None
    return join_mesh(Layout(tp=num_ranks), rank, store, device=torch.device("cpu"), hosts=hosts).tp.talk


def _other_rank(rank: int, num_ranks: int, mode: str, endpoints: Endpoints) -> None:
    store = Store(endpoints.meeting)
    if mode in ("shared", "gloo"):
        _time_collectives(_talk(rank, num_ranks, mode, store))
        return
    if mode == "ring":
        source = open_source(store, endpoints, ParallelConfig(tp_size=num_ranks), rank, ToWorker, 0)
    else:
        source = Inbox[ToWorker](endpoints.rank(rank), ToWorker)
    store.set(f"here/{rank}", b"")
    run_worker(source, NullRunner(_LIMITS))


if __name__ == "__main__":
    main()
