"""Metrics of an API worker, and of the whole server: its own, the other workers' and the engine's.

Everything comes from shared boards and the heartbeat: no process is asked, so that the numbers of a stuck
engine can still be read.
"""

from __future__ import annotations

from collections.abc import Iterable

from bough.ipc import Endpoints
from bough.observability.board import Boards
from bough.observability.health import Beat
from bough.observability.metrics import MEANS, OTHER, STATUSES, Cell, Sheet, worked_out
from bough.observability.requests import RequestMeter
from bough.observability.trace import OtlpExporter
from bough.observability.usage import KeyUsage


class Telemetry:
    """Metrics of one API worker. Without endpoints, only of this process."""

    def __init__(self, endpoints: Endpoints | None = None, worker: int = 0, paths: Iterable[str] = ()) -> None:
        """`paths`: the routes that are counted one by one."""
        name = f"api{worker}"
        self.exporter: OtlpExporter | None = None
        """Where traces go, if anywhere."""
        self._paths = frozenset(paths)
        self.sheet = Sheet(endpoints.board(name) if endpoints is not None else None, "api", self._paths)
        self.meter = RequestMeter(self.sheet)
        self.keys = KeyUsage(None if endpoints is None else lambda number: endpoints.board(f"{name}.keys{number}"))
        self._boards = Boards(
            endpoints.path("") if endpoints is not None else None,
            lambda: [self.sheet.board, *self.keys.boards],
            MEANS,
        )
        self._background_failures = self.sheet.cell("background_failures_total")
        self._waiting_tokens = self.sheet.cell("queued_prompt_tokens")
        self._refused = self.sheet.cell("refused_requests_total")
        self._responses: dict[tuple[str, int], Cell] = {}

    def responded(self, path: str, status: int) -> None:
        """A response has begun."""
        cell = self._responses.get((path, status))
        if cell is None:
            known = path if path in self._paths else OTHER
            cell = self.sheet.cell("http_requests_total", known, str(status) if str(status) in STATUSES else OTHER)
            if known != OTHER:
                self._responses[path, status] = cell
        cell.add()

    def task_failed(self, name: str) -> None:
        """A background task has failed."""
        self._background_failures.add()

    def admission_changed(self, waiting_tokens: int, refused: int) -> None:
        self._waiting_tokens.set(waiting_tokens)
        self._refused.set(refused + self.meter.refused)

    def readings(self, beat: Beat, *, up: bool) -> dict[str, float]:
        """Every number there is, by name."""
        readings = self._boards.read()
        readings.setdefault("num_running_reqs", beat.num_running)
        readings.setdefault("num_queue_reqs", beat.num_waiting)
        return worked_out(readings, up=up, heartbeat_age_s=beat.age_s)
