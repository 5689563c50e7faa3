"""A server for coding agents that needs no large model: it calls their shell once, and then says what it answered.

    python tests/clients/agent_server.py     # prints its address, and serves until its input ends

Everything but the model is real: routes, prompts, parsers, streams. The agents' prompts have tens of thousands of tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit" / "entrypoints")]

import scripted_server as scripted  # noqa: E402

MARK = "BOUGH-TOOL-OUTPUT"
CALLS = {
    "functions__exec": {"input": f"text(await tools.exec_command({{cmd: 'echo {MARK}'}}))"},
    "exec_command": {"cmd": f"echo {MARK}"},
    "Bash": {"command": f"echo {MARK}", "description": "Says a word."},
    "run_commands": {"commands": [f"echo {MARK}"]},
}
"""The shells of Codex (within a program, or by itself), of Claude Code and Continue, and of Cline, and what they are called
with."""


def answer(message: object, prompt: str) -> scripted.Answer:
    if "*file listing*" in prompt:  # aider, which reads edits out of the text
        return scripted.Answer(pieces=["Here it is:\n\nword.txt\n``", f"`\n{MARK}\n```", "\n"])
    plain = prompt.replace(" ", "")
    if f"tool\n{MARK}" not in prompt and MARK not in prompt.rpartition("tool\n")[2]:
        for name, arguments in CALLS.items():
            if f'"name":"{name}"' in plain:
                call = json.dumps({"name": name, "arguments": arguments})
                return scripted.Answer(pieces=["<tool_call>\n", call[:9], call[9:], "\n</tool_call>"])
    return scripted.Answer(pieces=["It said ", MARK, "."] if MARK in prompt else ["Hello."])


def main() -> None:
    scripted.CONTEXT = 1_000_000
    served = {"tool_parser": "hermes", "patterns": ("claude-*", "gpt-*", "codex-*")}
    with scripted.serving(answer, served=served) as running:
        print(running.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
