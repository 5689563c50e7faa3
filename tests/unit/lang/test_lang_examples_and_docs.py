"""Every example and every snippet of the guide runs, here on the toy model; tests/e2e runs them on a real one."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from lang_fake_server import FakeServer
from lang_toy_engine import ToyEngine

import bough

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if path.stem != "backends")


def test_the_examples_are_all_there() -> None:
    expected = "best_of_n json_extraction llm_judge multi_turn_chat parallel_summary react tree_of_thought"
    assert " ".join(EXAMPLES) == expected


@pytest.mark.parametrize("api", ["native", "openai-chat", "openai-completion", "engine"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(
    name: str, api: str, fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", [name, "--backend-url", fake.url, "--api", api])
    monkeypatch.setattr(bough, "Engine", ToyEngine, raising=False)
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_every_snippet_of_the_guide(fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guide = (ROOT / "docs" / "language.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 10
    script = tmp_path / "guide.py"
    script.write_text("\n".join(snippets).replace("http://127.0.0.1:30000", fake.url))
    runpy.run_path(str(script), run_name="__main__")
    out = capsys.readouterr().out
    assert "can't do regex" in out
    assert "the program has no variable 'anwser'" in out
