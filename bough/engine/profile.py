"""Records some of the engine's steps with the torch profiler, on demand, into a directory of the operator's choice."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bough.core.errors import Conflict, InvalidRequest
from bough.core.messages import Profile
from bough.kernels.cpu_build import library, mark_kernels

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_STEPS = 1000
"""After this time a profile that was not stopped ends by itself: its memory grows with every step."""
_TOP = 15


class Profiler:
    """At most one recording at a time. `look` is called between steps and ends it when it has its steps."""

    def __init__(self, directory: Path, *, cuda: bool) -> None:
        self._directory = directory
        self._cuda = cuda
        self._active: torch.profiler.profile | None = None
        self._unmark: Callable[[], None] | None = None
        self._steps = 0
        self._begun_at = 0
        self._wanted = 0
        self._target = directory
        self._last: dict[str, Any] = {}

    def handle(self, message: Profile) -> dict[str, Any]:
        """Starts or stops. Raises `Conflict` or `InvalidRequest`."""
        return self._start(message) if message.start else self._stop()

    def look(self, steps: int) -> None:
        """Counts `steps` settled steps."""
        self._steps = steps
        if self._active is not None and steps - self._begun_at >= self._wanted:
            self._finish()

    def _start(self, message: Profile) -> dict[str, Any]:
        if self._active is not None:
            raise Conflict(what="a profile is being recorded already", fix="stop it first")
        self._target = self._directory / self._subdirectory(message.output_dir)
        self._target.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._wanted = min(message.num_steps, _MOST_STEPS) if message.num_steps > 0 else _MOST_STEPS
        self._begun_at = self._steps
        self._last = {}
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._cuda:
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._active = torch.profiler.profile(activities=kinds, record_shapes=True)
        loaded = None if self._cuda else library()
        if loaded is not None:
            self._unmark = mark_kernels(loaded)
        self._active.start()
        return {"directory": str(self._target), "num_steps": self._wanted}

    def _subdirectory(self, name: str) -> str:
        """Clients name a directory, they don't choose a place."""
        if name and not _NAME.fullmatch(name):
            raise InvalidRequest(
                what="output_dir is no plain name",
                why="profiles are written below the server's --profile-dir",
                fix="send a name of letters, digits, dots and dashes, or leave it out",
                param="output_dir",
            )
        return name

    def _stop(self) -> dict[str, Any]:
        if self._active is not None:
            self._finish()
        if not self._last:
            raise Conflict(what="no profile is being recorded", fix="start one first")
        return self._last

    def _finish(self) -> None:
        active, self._active = self._active, None
        assert active is not None, "only called while recording"
        active.stop()
        if self._unmark is not None:
            self._unmark()
            self._unmark = None
        path = self._target / f"trace-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
        active.export_chrome_trace(str(path))
        path.chmod(0o600)
        by_time = "self_cuda_time_total" if self._cuda else "self_cpu_time_total"
        averages = sorted(
            active.key_averages(),
            key=lambda event: event.self_device_time_total if self._cuda else event.self_cpu_time_total,
            reverse=True,
        )
        self._last = {
            "file": str(path),
            "num_steps": self._steps - self._begun_at,
            "sorted_by": by_time,
            "top": [
                {
                    "name": event.key[:120],
                    "calls": event.count,
                    "microseconds": round(event.self_device_time_total if self._cuda else event.self_cpu_time_total, 1),
                }
                for event in averages[:_TOP]
            ],
        }
