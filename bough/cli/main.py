"""`bough COMMAND ...`: finds the command's module and runs it; prints errors as what, why, fix."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Protocol

from bough.core.errors import BoughError, ConfigError

COMMANDS: Mapping[str, tuple[str, str]] = {
    "serve": ("bough.cli.serve", "serve a model over HTTP"),
    "chat": ("bough.cli.chat", "chat with a running server"),
    "run": ("bough.cli.run", "serve a model and chat with it, or ask one question"),
    "models": ("bough.cli.models", "list, download and remove models"),
    "quantize": ("bough.cli.quantize", "write a model's weights in fewer bits"),
    "shard": ("bough.cli.shard", "cut a checkpoint into one file per rank"),
    "train-draft": ("bough.cli.train_draft", "train a draft head for speculative decoding"),
    "doctor": ("bough.cli.doctor", "check this machine, and whether a model fits"),
    "simulate": ("bough.cli.simulate", "simulate how a fleet of GPUs serves a model"),
    "top": ("bough.cli.top", "watch a running server"),
    "replay": ("bough.cli.replay", "send recorded requests again"),
    "profile": ("bough.cli.profile", "profile steps of a running server"),
    "debug": ("bough.cli.debug", "compare two runs of one request, layer by layer"),
    "bench": ("bough.cli.bench", "measure a server or an engine"),
    "completion": ("bough.cli.completion", "print a script that completes commands in your shell"),
    "version": ("bough.cli.version", "print the version"),
}

FAILURE = 1
"""Exit status of a command that failed while running."""
USAGE_ERROR = 2
"""Exit status for wrong usage: a flag, a file, a name or an address is wrong."""
INTERRUPTED = 130
BROKEN_PIPE = 141


class Command(Protocol):
    """The interface of a command's module."""

    def run(self, argv: Sequence[str]) -> int:
        """Runs the command and returns its exit status."""
        ...


def overview() -> str:
    """What `bough --help` prints."""
    lines = ["bough: serve language models, and program them", "", "usage: bough COMMAND [...]", ""]
    lines += [f"  {name:<11} {what}" for name, (_, what) in COMMANDS.items()]
    lines += [
        "",
        "`bough COMMAND --help` says more. Start with `bough serve`, which needs nothing else:",
        "it serves a small default model at http://127.0.0.1:30000, on any machine.",
        "",
        "Exit status: 0 done; 1 it failed; 2 a flag, a file, a name or an address is wrong; 130 interrupted.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `bough` script. Returns the exit status; errors become three lines on stderr."""
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # whether its reader is still there shows now, not when the interpreter ends
    except BoughError as error:
        print(error.lines(), file=sys.stderr)
        return exit_status(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return status


def exit_status(error: BoughError) -> int:
    """The exit status of a command that ended with this error."""
    return USAGE_ERROR if isinstance(error, ConfigError) else FAILURE


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if arguments else USAGE_ERROR
    name = "version" if arguments[0] in ("-V", "--version") else arguments[0]
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        print(f"error: unknown command {name!r}", file=sys.stderr)
        print(f"  fix: did you mean `bough {close[0]}`?" if close else "  fix: see `bough --help`", file=sys.stderr)
        return USAGE_ERROR
    command: Command = import_module(COMMANDS[name][0])
    return command.run(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
