"""Every snippet of docs/language.md runs, in order, against a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import bough.lang as sgl

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
WRITTEN_URL = "http://127.0.0.1:30000"


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """A server with the default model on a free port."""
    with sgl.Runtime(log_level="warning") as runtime:
        yield runtime.url


def test_every_snippet_runs(server_url: str, tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "language.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 10
    script = tmp_path / "guide.py"
    script.write_text("\n".join(snippets).replace(WRITTEN_URL, server_url))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=400, env=environment, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "The capital of France is Paris" in done.stdout
    assert "can't do regex" in done.stdout
    assert "the program has no variable 'anwser'" in done.stdout
