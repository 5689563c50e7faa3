"""Usage per API key: counters by the name of the key. They are on separate boards because keys can be added while a
server runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bough.observability.board import Board
from bough.observability.metrics import KEY_METRICS, Cell, series_key


class KeyUsage:
    """The counters of one process. The counters of a removed key are kept."""

    def __init__(self, place: Callable[[int], Path] | None = None) -> None:
        """`place`: path of the n-th board; None: the numbers stay in this process."""
        self.boards: list[Board] = []
        self._place = place
        self._cells: dict[tuple[str, str], Cell] = {}

    def know(self, names: frozenset[str]) -> None:
        """Adds names that are counted from now on."""
        new = sorted(name for name in names if (KEY_METRICS[0].name, name) not in self._cells)
        if not new:
            return
        series = [(metric.name, name) for metric in KEY_METRICS for name in new]
        place = self._place(len(self.boards)) if self._place is not None else None
        board = Board(place, [series_key(metric, (name,)) for metric, name in series])
        self.boards.append(board)
        self._cells.update({each: Cell(board.cells, at) for at, each in enumerate(series)})

    def used(self, name: str, *, requests: int, prompt: int, generated: int) -> None:
        """Counts usage of a known name; other names are ignored."""
        for metric, amount in (
            ("key_requests_total", requests),
            ("key_prompt_tokens_total", prompt),
            ("key_generation_tokens_total", generated),
        ):
            self._add(metric, name, amount)

    def refused(self, name: str) -> None:
        """Counts a request that exceeded the key's limits."""
        self._add("key_refused_total", name, 1)

    def _add(self, metric: str, name: str, amount: int) -> None:
        cell = self._cells.get((metric, name))
        if cell is not None and amount:
            cell.add(amount)
