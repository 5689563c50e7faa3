"""A real engine loop with a simulated device, which records the time of each hop: for `bough bench hops`.

    python -m bough.bench.hops_engine FILE DEVICE_MS SPIN_MS DIRECTORY

Everything from the socket to the launch and back is the real engine; a step takes DEVICE_MS, during which the host
spins as a driver does. At the end the times are written to FILE as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bough.bench.fake_runner import NullLaunched, NullRunner
from bough.cache.prefix import PrefixCache
from bough.config.hf import open_checkpoint
from bough.core.messages import Generate, ToDetokenizer, ToEngine, Tokens
from bough.core.step import Launched, Mask, Outcome, RunnerLimits, SpanCosts, Step
from bough.engine.inbox import MessageSink
from bough.engine.outbox import open_outbox
from bough.ipc import EngineStatus, Inbox, Launch, run_child, write_status
from bough.platform.environment import prepare_environment

PAGE_SIZE = 16
CONTEXT = 16384
MAX_RUNNING = 512
STEP_TOKENS = 8192
KV_TOKENS = 600_000


class Stamps:
    """Times (time.monotonic, which all processes of a machine share) by what happened then."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {"received": [], "launched": [], "computed": [], "sent": []}

    def note(self, name: str, times: int = 1) -> None:
        self.times[name] += [time.monotonic()] * times


class StampedInbox:
    """The engine's inbox; a request is received when the loop has it."""

    def __init__(self, inner: Inbox[ToEngine], stamps: Stamps) -> None:
        self._inner = inner
        self._stamps = stamps

    @property
    def closed(self) -> bool:
        return self._inner.closed

    def drain(self, block_s: float) -> Sequence[ToEngine]:
        messages = self._inner.drain(block_s)
        self._stamps.note("received", sum(isinstance(message, Generate) for message in messages))
        return messages


class StampedOutbox:
    """The engine's outbox."""

    def __init__(self, inner: MessageSink, stamps: Stamps) -> None:
        self._inner = inner
        self._stamps = stamps

    def send(self, message: ToDetokenizer) -> None:
        self._inner.send(message)
        if isinstance(message, Tokens):
            self._stamps.note("sent")


class TimedStep:
    """A step that is done when its time has passed."""

    needs_masks = False

    def __init__(self, inner: NullLaunched, done_s: float, stamps: Stamps) -> None:
        self.step = inner.step
        self._inner = inner
        self._done_s = done_s
        self._stamps = stamps

    def sample(self, masks: Mask) -> None:
        self._inner.sample(masks)

    def wait(self) -> Outcome:
        while time.monotonic() < self._done_s:
            pass
        self._stamps.note("computed")
        return self._inner.wait()


class TimedRunner:
    """Steps take `device_s` each, one after the other."""

    def __init__(self, limits: RunnerLimits, device_s: float, stamps: Stamps) -> None:
        self.limits = limits
        self._device_s = device_s
        self._stamps = stamps
        self._inner = NullRunner(limits)
        self._free_s = 0.0

    def launch(self, step: Step) -> Launched:
        self._stamps.note("launched")
        self._free_s = max(self._free_s, time.monotonic()) + self._device_s
        return TimedStep(self._inner.launch(step), self._free_s, self._stamps)

    def clear(self) -> None:
        """Nothing is queued."""


def serve(launch: Launch, file: Path, device_s: float, spin_s: float) -> None:
    from bough.engine.loop import Loop
    from bough.engine.watch import observe
    from bough.platform import Device
    from bough.scheduler.limits import Limits
    from bough.scheduler.queues import Queues

    model, endpoints = launch.config.model, launch.endpoints
    checkpoint = open_checkpoint(model.model, load_format=model.load_format)
    stamps = Stamps()
    runner_limits = RunnerLimits(
        num_slots=MAX_RUNNING,
        num_pages=KV_TOKENS // PAGE_SIZE,
        page_size=PAGE_SIZE,
        pages_per_slot=CONTEXT // PAGE_SIZE,
        context_length=CONTEXT,
        max_step_tokens=STEP_TOKENS,
        vocab_size=checkpoint.vocab,
        spans=SpanCosts(),
    )
    inbox: Inbox[ToEngine] = Inbox(endpoints.engine, ToEngine, spin_s=spin_s)
    limits = Limits.of(runner_limits, launch.config.scheduler)
    cache = PrefixCache(num_pages=limits.num_pages, page_size=limits.page_size)
    queues = Queues(limits)
    runner, watch = observe(
        TimedRunner(runner_limits, device_s, stamps), launch.config, launch, queues, cache, Device("cpu"), None
    )
    loop = Loop(
        runner=runner,
        queues=queues,
        cache=cache,
        limits=limits,
        inbox=StampedInbox(inbox, stamps),
        outbox=StampedOutbox(open_outbox(launch), stamps),
        hooks=watch.hooks(),
    )
    watch.follow(loop)
    facts = {
        "model": checkpoint.name,
        "context_length": CONTEXT,
        "vocab_size": limits.vocab_size,
        "kv_tokens": KV_TOKENS,
        "page_size": PAGE_SIZE,
        "max_running_requests": MAX_RUNNING,
        "eos_ids": list(checkpoint.eos_ids),
        "device": "none",
        "dtype": "none",
    }
    write_status(endpoints, EngineStatus(phase="ready", facts=facts))
    try:
        loop.run()
    finally:
        file.write_text(json.dumps(stamps.times))


if __name__ == "__main__":
    prepare_environment()
    where, device_ms, spin_ms = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    body = lambda launch: serve(launch, where, device_ms / 1e3, spin_ms / 1e3)
    sys.exit(run_child("engine", sys.argv[-1], body))
