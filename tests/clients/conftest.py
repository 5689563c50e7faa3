"""One server for all clients, in the environment of the project; the clients have their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    python = os.environ.get("BOUGH_PYTHON", sys.executable)
    process = subprocess.Popen(
        [python, "-m", "bough", "serve", "--port", "0", "--batch-dir", str(tmp_path_factory.mktemp("batches"))],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        found = re.search(r"(http://127\.0\.0\.1:\d+)/v1", line)
        if found:
            os.set_blocking(process.stdout.fileno(), False)
            yield found[1]
            process.terminate()
            process.wait(90)
            return
    raise AssertionError("the server did not start:\n" + "".join(said))
