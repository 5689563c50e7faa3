"""The host's own work for a step: everything but the device, by phase. `python -m bough.bench.host`."""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from msgspec import structs

from bough.bench.fake_runner import NullRunner
from bough.cache.prefix import PrefixCache
from bough.config.concerns import SchedulerConfig
from bough.core.messages import Generate, ToDetokenizer, ToEngine, pack_ids
from bough.core.sampling import SamplingParams
from bough.core.step import RunnerLimits
from bough.engine.control import Hooks
from bough.engine.loop import Laps, Loop
from bough.scheduler.limits import Limits
from bough.scheduler.queues import Queues

_VOCAB = 32000


class _Inbox:
    """Gives its messages once, then nothing."""

    def __init__(self, messages: list[ToEngine]) -> None:
        self.messages = messages
        self.closed = False

    def drain(self, block_s: float) -> list[ToEngine]:
        messages, self.messages = self.messages, []
        return messages


class _Outbox:
    def __init__(self) -> None:
        self.count = 0

    def send(self, message: ToDetokenizer) -> None:
        self.count += 1


def measure(
    rows: int = 256,
    steps: int = 500,
    prompt_len: int = 128,
    *,
    shared_len: int = 0,
    page_size: int = 16,
    depth: int = 1,
    waiting: int = 0,
) -> dict[str, float]:
    """Decodes `rows` requests for `steps` steps on a runner that costs nothing.

    Returns microseconds a step: `step_us` in all (median), `step_p99_us`, and the mean of each phase.
    `shared_len` tokens of every prompt are the same; `waiting` more requests find no slot.
    """
    context = prompt_len + steps + 64
    per_slot = -(-context // page_size)
    runner_limits = RunnerLimits(
        num_slots=rows,
        num_pages=rows * per_slot + 2,
        page_size=page_size,
        pages_per_slot=per_slot,
        context_length=context,
        max_step_tokens=max(8192, 2 * rows),
        vocab_size=_VOCAB,
    )
    limits = Limits.of(runner_limits, SchedulerConfig(tpot_target_ms=0.0, schedule_conservativeness=0.0))
    queues = Queues(limits)
    cache = PrefixCache(num_pages=runner_limits.num_pages, page_size=page_size)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, _VOCAB, shared_len)
    asks: list[ToEngine] = [
        Generate(
            id=i,
            rid=str(i),
            prompt=pack_ids(np.concatenate([shared, rng.integers(0, _VOCAB, prompt_len - shared_len)])),
            sampling=SamplingParams(max_new_tokens=steps + 32, ignore_eos=True),
            eos_ids=(_VOCAB - 1,),
        )
        for i in range(rows + waiting)
    ]
    loop = Loop(
        runner=NullRunner(runner_limits),
        queues=queues,
        cache=cache,
        limits=limits,
        inbox=_Inbox(asks),
        outbox=_Outbox(),
        depth=depth,
        hooks=Hooks(),
    )
    while len(queues.running) < rows:
        loop.turn()
    for _ in range(8):
        loop.turn()
    loop.laps = Laps()
    taken = []
    for _ in range(steps):
        began = time.perf_counter()
        loop.turn()
        taken.append(time.perf_counter() - began)
    if len(queues.running) != rows:
        raise RuntimeError(f"{len(queues.running)} of {rows} rows are left")
    phases = {f"{name}_us": 1e6 * value / steps for name, value in structs.asdict(loop.laps).items()}
    return {
        "rows": rows,
        "steps": steps,
        "step_us": 1e6 * float(np.median(taken)),
        "step_p99_us": 1e6 * float(np.percentile(taken, 99)),
        **phases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--shared-len", type=int, default=0)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--waiting", type=int, default=0)
    options = parser.parse_args()
    for rows in options.rows:
        numbers = measure(
            rows,
            options.steps,
            options.prompt_len,
            shared_len=options.shared_len,
            page_size=options.page_size,
            waiting=options.waiting,
        )
        print(json.dumps({name: round(value, 1) for name, value in numbers.items()}))


if __name__ == "__main__":
    main()
