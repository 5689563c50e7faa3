"""The quick start and the recipes: every Python and shell snippet runs, in the order of its page, against one server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from default_server import default_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WRITTEN_URL = "http://127.0.0.1:30000"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [
    ROOT / "README.md",
    DOCS / "quickstart.md",
    DOCS / "operations.md",
    *sorted(page for page in (DOCS / "recipes" / "serving").glob("*.md") if page.name != "agents.md"),
]
SAYS = {
    "README.md": ["Paris"],
    "quickstart.md": ["Paris", "Rome", "first token after"],
    "chat.md": ["Paris", "prompt tokens were cached"],
    "rag.md": ["prompt tokens were cached"],
    "json.md": ["name='Lisbon'", "It is "],
    "tools.md": ["get_weather"],
    "batch.md": ["The largest city of Norway is"],
    "cpu.md": ["KV cache"],
    "operations.md": ["# HELP"],
}


def snippets(page: Path, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(page.read_text()) if kind == language]


SHORT = {"README.md", "quickstart.md", "operations.md", "json.md"}
"""Pages whose snippets `make test` runs; `make test-long` runs those of all."""


@pytest.mark.parametrize(
    "page", [pytest.param(each, id=each.name, marks=[pytest.mark.long] * (each.name not in SHORT)) for each in PAGES]
)
def test_every_snippet_runs(page: Path, tmp_path: Path) -> None:
    url = default_server()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "BOUGH_URL": url,
    }
    script = tmp_path / "page.py"
    script.write_text("\n".join(snippets(page, "python")).replace(WRITTEN_URL, url))
    commands = tmp_path / "page.sh"
    commands.write_text("set -euo pipefail\n" + "\n".join(snippets(page, "sh")).replace(WRITTEN_URL, url))
    said = ""
    for command in ([sys.executable, str(script)], ["bash", str(commands)]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
        said += done.stdout + done.stderr
        assert done.returncode == 0, said
    for words in SAYS[page.name]:
        assert words in said, said


def test_pages_have_snippets_and_know_no_other_languages() -> None:
    assert {page.name for page in PAGES} == set(SAYS)
    for page in PAGES:
        assert snippets(page, "python"), page
        kinds = {kind for kind, _ in FENCE.findall(page.read_text())}
        assert kinds <= {"python", "sh", "console", "text", "yaml"}, f"{page}: {kinds}"
