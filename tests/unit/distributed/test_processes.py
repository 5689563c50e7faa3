"""Ranks as processes, over gloo and over shared memory: the same bits, which are numpy's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from talking_rank import KINDS

from bough.ipc.link import Listener
from bough.ipc.store import StoreServer

HERE = Path(__file__).parent
LONG = pytest.mark.long


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where ranks meet."""
    servers = [StoreServer([Listener(str(tmp_path / kind))]) for kind in KINDS]
    yield tmp_path
    for server in servers:
        server.close()


@pytest.mark.parametrize("sizes", [(2, 1, 1), pytest.param((2, 2, 2), marks=LONG), pytest.param((4, 2, 1), marks=LONG)])
def test_processes_talk_along_every_axis(sizes: tuple[int, int, int], folder: Path) -> None:
    tp, _, pp = sizes
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, HERE / "talking_rank.py", str(rank), *map(str, sizes), folder], env=environment
        )
        for rank in range(tp * pp)
    ]
    try:
        assert [rank.wait(timeout=150) for rank in ranks] == [0] * len(ranks)
    finally:
        for process in ranks:
            process.kill()
