"""Completion: what the shells themselves make of the scripts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from bough.cli.completion import bash, fish, vocabulary, zsh
from bough.cli.main import COMMANDS, main
from bough.config.flags import ALIASES, settings


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "bough.bash"
    path.write_text(bash())
    return path


def completed(script: Path, line: str) -> set[str]:
    """What bash offers at the end of a command line."""
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    program = f"""
bough() {{ echo 'org/repo'; }}
source {script}
COMP_WORDS=({quoted}) COMP_CWORD={len(words) - 1}
_bough
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, check=True, timeout=60, cwd=script.parent
    )
    assert not done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("bough ser", {"serve"}),
        ("bough serve --sched", {"--schedule-policy", "--schedule-conservativeness"}),
        ("bough serve m --log-level ", {"debug", "info", "warning", "error"}),
        ("bough serve --no-radix", {"--no-radix-cache"}),
        ("bough serve --disable-radix", {"--disable-radix-cache"}),
        ("bough run org/", {"org/repo"}),
        ("bough models p", {"pull"}),
        ("bough models pull --rev", {"--revision"}),
        ("bough chat --b", {"--base-url"}),
        ("bough bench thr", {"throughput"}),
        ("bough completion z", {"zsh"}),
        ("bough nothing --x", set()),
        ("bough serve --config bough.b", {"bough.bash"}),
    ],
)
def test_bash_completes(script: Path, line: str, offered: set[str]) -> None:
    assert completed(script, line) == offered


def test_every_command_and_every_flag_is_known() -> None:
    known = vocabulary()
    assert set(known) == set(COMMANDS)
    for command in ("serve", "run", "doctor"):
        names = {flag.name for flag in known[command].flags}
        assert {setting.flag for setting in settings().values()} <= names
        assert {"--" + name.replace("_", "-") for name in ALIASES} <= names
    assert all(known[command].flags for command in ("chat", "top", "models", "replay", "profile"))


@pytest.mark.parametrize(("shell", "text"), [("zsh", zsh), ("fish", fish)])
def test_other_shells_read_theirs(shell: str, text: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert printed == text()  # type: ignore[operator]
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"there is no {shell}")
    path = tmp_path / "script"
    path.write_text(printed)
    subprocess.run([found, "-n", str(path)], check=True, timeout=60)


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes(tmp_path: Path) -> None:
    path = tmp_path / "script.fish"
    path.write_text(fish())
    asked = f"source {path}; complete -C 'bough serve --schedule-p'"
    done = subprocess.run(["fish", "-c", asked], capture_output=True, text=True, timeout=60, check=True)
    assert "--schedule-policy" in done.stdout
