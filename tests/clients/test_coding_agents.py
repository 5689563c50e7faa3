"""Codex CLI, Claude Code, Cline and Continue with their defaults: their own model names, prompts and tools, and one call of
their shell. aider with one edit, LangGraph's agent with a tool of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BINARIES = Path(os.environ.get("BOUGH_NODE_MODULES", "node_modules")) / ".bin"
MARK = "BOUGH-TOOL-OUTPUT"
if not BINARIES.exists() and importlib.util.find_spec("langgraph") is None:
    pytest.skip("no agent is installed here: run `make test-clients`", allow_module_level=True)


@pytest.fixture(scope="module")
def agents_url() -> Iterator[str]:
    python = os.environ.get("BOUGH_PYTHON", sys.executable)
    command = [python, str(HERE / "agent_server.py")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.stdin.close()
    process.wait(60)


def run(name: str, arguments: list[str], directory: Path, *, where: Path = BINARIES, **environ: str) -> str:
    binary = (where / name).absolute()
    if not binary.exists():
        pytest.skip(f"{name} is not installed")
    answer = subprocess.run(
        [str(binary), *arguments], cwd=directory, env={**os.environ, "HOME": str(directory), **environ},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_codex(agents_url: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        'model_provider = "bough"\n[model_providers.bough]\nname = "bough"\n'
        f'base_url = "{agents_url}/v1"\nwire_api = "responses"\n'
    )
    arguments = ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "Say a word with the shell."]
    assert f"It said {MARK}." in run("codex", arguments, tmp_path, CODEX_HOME=str(tmp_path), OPENAI_API_KEY="none")


def test_claude_code(agents_url: str, tmp_path: Path) -> None:
    said = run(
        "claude", ["-p", "Say a word with the shell.", "--allowedTools", "Bash"], tmp_path,
        ANTHROPIC_BASE_URL=agents_url, ANTHROPIC_API_KEY="none", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )  # fmt: skip
    assert f"It said {MARK}." in said


def test_continue(agents_url: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "name: bough\nversion: 1.0.0\nschema: v1\nmodels:\n  - name: bough\n    provider: openai\n    model: gpt-bough\n"
        f"    apiBase: {agents_url}/v1\n    apiKey: none\n    roles: [chat]\n    capabilities: [tool_use]\n"
    )
    said = run("cn", ["--config", str(config), "--auto", "-p", "Say a word with the shell."], tmp_path)
    assert f"It said {MARK}." in said


def test_cline(agents_url: str, tmp_path: Path) -> None:
    run("cline", ["auth", "-p", "openai", "-k", "none", "-m", "gpt-bough", "-b", f"{agents_url}/v1"], tmp_path)
    assert f"It said {MARK}." in run("cline", ["Say a word with the shell."], tmp_path)


def test_aider(agents_url: str, tmp_path: Path) -> None:
    (tmp_path / "word.txt").write_text("old\n")
    arguments = [
        "--openai-api-base", f"{agents_url}/v1", "--openai-api-key", "none", "--model", "openai/gpt-bough",
        "--yes-always", "--no-git", "--no-check-update", "--analytics-disable", "--no-show-model-warnings",
        "--message", "Say a word.", "word.txt",
    ]  # fmt: skip
    where = Path(os.environ.get("BOUGH_AIDER", "."))
    run("aider", arguments, tmp_path, where=where, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert (tmp_path / "word.txt").read_text() == f"{MARK}\n"


def test_langgraph(agents_url: str) -> None:
    prebuilt = pytest.importorskip("langgraph.prebuilt")
    from langchain_openai import ChatOpenAI

    def exec_command(cmd: str) -> str:
        """Runs a command."""
        return cmd.removeprefix("echo ")

    model = ChatOpenAI(base_url=f"{agents_url}/v1", api_key="none", model="gpt-anything")
    agent = prebuilt.create_react_agent(model, [exec_command])
    messages = agent.invoke({"messages": [("user", "Say a word with the tool.")]})["messages"]
    assert [each.type for each in messages] == ["human", "ai", "tool", "ai"]
    assert messages[-1].text == f"It said {MARK}." or messages[-1].content == f"It said {MARK}."
