"""What happens around the loop's turns: the heartbeat, the numbers, the log line, profiles, the use of quiet moments."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bough.cache.prefix import PrefixCache
from bough.config.concerns import Config
from bough.core.step import Runner
from bough.engine.control import Hooks
from bough.engine.loop import Loop
from bough.engine.meter import EngineMeter, ExpertLoad
from bough.engine.profile import Profiler
from bough.engine.recorder import Quarantine, RecordingRunner
from bough.ipc import Launch, read_quarantine
from bough.observability.flight import FlightRecorder
from bough.observability.health import Heartbeat, State
from bough.observability.metrics import Sheet
from bough.platform import Device
from bough.scheduler.queues import Queues

_log = logging.getLogger(__name__)


class Watch:
    """The loop's hooks. `follow` must be called before the first turn."""

    QUIET_S = 2.0
    """Seconds without a step after which background work may start."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        queues: Queues,
        meter: EngineMeter,
        profiler: Profiler,
        when_quiet: Callable[[], None] | None,
    ) -> None:
        self._heartbeat = heartbeat
        self._queues = queues
        self._meter = meter
        self._profiler = profiler
        self._when_quiet = when_quiet
        self._loop: Loop | None = None
        self._steps = -1
        self._since_s = time.monotonic()

    def hooks(self) -> Hooks:
        return Hooks(heartbeat=self.beat, report=self.report, profile=self._profiler.handle)

    def watch_experts(self, load: ExpertLoad) -> None:
        """Writes how even the load of ranks is, too."""
        self._meter.experts = load

    def follow(self, loop: Loop) -> None:
        """This is the loop whose turns are watched."""
        self._loop = loop

    def beat(self, steps: int) -> None:
        """Once a turn."""
        queues, loop = self._queues, self._loop
        assert loop is not None, "follow comes first"
        state = State.DRAINING if queues.draining else State.PAUSED if loop.control.paused else State.READY
        waiting = len(queues.waiting) + len(queues.compiling)
        self._heartbeat.beat(steps, state, queues.num_live, waiting, queues.counters.accepted - waiting)
        self._meter.look(loop.laps)
        self._profiler.look(steps)
        if steps != self._steps or not queues.idle:
            self._steps, self._since_s = steps, time.monotonic()
        elif self._when_quiet is not None and time.monotonic() - self._since_s > self.QUIET_S:
            self._when_quiet()

    def report(self, report: dict[str, Any]) -> None:
        """Every few seconds while there is work."""
        _log.info(
            "running %d, queued %d, KV %.0f %%, cache hits %.0f %%, %.0f tokens/s out, %.0f in, %d retracted so far%s",
            report["running"] + report["prefilling"],
            report["queued"] + report["compiling"],
            100 * report["token_usage"],
            100 * report["cache_hit_rate_recent"],
            report["output_tokens_per_s"],
            report["prompt_tokens_per_s"],
            report["counters"]["retractions"],
            f", accept length {report['accept_length']:.2f}" if "accept_length" in report else "",
        )


def observe(
    runner: Runner,
    config: Config,
    launch: Launch,
    queues: Queues,
    cache: PrefixCache,
    device: Device,
    when_quiet: Callable[[], None] | None,
) -> tuple[Runner, Watch]:
    """The runner with its flight recorded, and a watch over the loop that will drive it."""
    endpoints = launch.endpoints
    runner = RecordingRunner(runner, queues, FlightRecorder(endpoints.flight, queues.limits.num_slots))
    known_bad = read_quarantine(endpoints)
    if known_bad:
        queues.screen = Quarantine(known_bad).check
    board = "engine" if config.parallel.num_schedulers == 1 else f"engine{launch.scheduler}"
    sheet = Sheet(launch.server.board(board), "engine")
    free_bytes = device.free_bytes if device.is_async else None
    meter = EngineMeter(sheet, queues, cache, free_bytes=free_bytes, utilization=device.utilization())
    directory = config.log.profile_dir or str(Path(tempfile.gettempdir()) / f"bough-profiles-{os.getuid()}")
    profiler = Profiler(Path(directory).expanduser(), cuda=device.is_async)
    return runner, Watch(Heartbeat(endpoints.heartbeat), queues, meter, profiler, when_quiet)
