"""Numbers that one process writes and others read: float64 cells in a shared file, preceded by their names.

A writer names its cells once and then only stores into them (tens of nanoseconds, no lock, no system call). Readers see
whole numbers, because a cell is one aligned store. The last numbers of a writer that died stay readable.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from bough.platform.whole_file import write_whole

SUFFIX = ".board"
_HEAD = struct.Struct("<8sQQ")
"""magic, bytes of names, cells"""
_MAGIC = b"boughnum"
_WORD = 8


class Board:
    """The writing end; one writer per file at a time. Without a path the numbers stay in this process. A process that
    replaces a dead one continues with its numbers."""

    def __init__(self, path: Path | None, names: Sequence[str]) -> None:
        self.names = tuple(names)
        if len(set(self.names)) != len(self.names):
            raise ValueError("two cells have the same name")
        self.cells: memoryview[float] = memoryview(bytearray(_WORD * len(self.names))).cast("d")
        if path is not None:
            self.cells = _create(path, self.names)

    def read(self) -> dict[str, float]:
        return dict(zip(self.names, self.cells.tolist(), strict=True))


def _create(path: Path, names: tuple[str, ...]) -> memoryview[float]:
    text = msgspec.json.encode(names)
    head = _HEAD.pack(_MAGIC, len(text), len(names)) + text
    start = -(-len(head) // _WORD) * _WORD
    size = start + _WORD * max(1, len(names))
    if not (path.exists() and path.read_bytes()[: len(head)] == head):
        write_whole(path, head.ljust(size, b"\0"))
    with path.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), size)
    return memoryview(shared)[start : start + _WORD * len(names)].cast("d")


class Boards:
    """The reading end: every board in a directory, summed by name."""

    def __init__(
        self,
        directory: Path | None,
        own: Callable[[], Sequence[Board]] | None = None,
        means: Collection[str] = (),
    ) -> None:
        """`own`: the boards of this process, if there is no directory. `means`: names whose mean over the boards that have
        them is read, not their sum (shares and averages of several engines)."""
        self._directory = directory
        self._own = own
        self._means = frozenset(means)
        self._open: dict[Path, tuple[tuple[str, ...], memoryview[float]]] = {}

    def read(self) -> dict[str, float]:
        """Returns the cells of all processes, summed by name, or averaged if the name is one of `means`."""
        if self._directory is None:
            own = self._own() if self._own is not None else ()
            return {name: value for board in own for name, value in board.read().items()}
        total: dict[str, float] = {}
        counts = dict.fromkeys(self._means, 0)
        for path in sorted(self._directory.glob(f"*{SUFFIX}")):
            board = self._open.get(path) or self._map(path)
            if board is not None:
                for name, value in zip(board[0], board[1].tolist(), strict=True):
                    total[name] = total.get(name, 0.0) + value
                    if name in counts:
                        counts[name] += 1
        return total | {name: total[name] / count for name, count in counts.items() if count > 1}

    def _map(self, path: Path) -> tuple[tuple[str, ...], memoryview[float]] | None:
        try:
            with path.open("rb") as file:
                shared = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return None
        magic, num_bytes, num_cells = _HEAD.unpack_from(shared)
        if magic != _MAGIC:
            return None
        names = msgspec.json.decode(shared[_HEAD.size : _HEAD.size + num_bytes], type=tuple[str, ...])
        start = -(-(_HEAD.size + num_bytes) // _WORD) * _WORD
        self._open[path] = (names, memoryview(shared)[start : start + _WORD * num_cells].cast("d"))
        return self._open[path]
