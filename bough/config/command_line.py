"""The parser of every command but `serve` and `run`: wrong flags become a `ConfigError` that names the right one."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from typing import NoReturn

from bough.core.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:30000"


class CommandParser(argparse.ArgumentParser):
    """argparse that raises where it would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            what=message, why="the command line can't be read", fix=self._meant(message) or f"see `{self.prog} --help`"
        )

    def _meant(self, message: str) -> str:
        """What was probably meant by an unknown flag, action or value, if that is what the message is about."""
        if unknown := re.fullmatch(r"unrecognized arguments: (--?[\w-]+).*", message):
            known = option_strings(self)
        elif unknown := re.fullmatch(r".*: invalid choice: '([^']*)' \(choose from (.*)\)", message):
            known = re.findall(r"[\w.-]+", unknown[2])
        else:
            return ""
        near = difflib.get_close_matches(unknown[1], known, n=1, cutoff=0.6)
        return f"did you mean {near[0]}?" if near else ""


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a command's actions, by name."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found.update(action.choices)
    return found


def option_strings(parser: argparse.ArgumentParser) -> list[str]:
    """Every flag of a command and of its actions."""
    own = list(parser._option_string_actions)
    return own + [flag for each in subcommands(parser).values() for flag in option_strings(each)]


def add_server_arguments(parser: argparse.ArgumentParser, *, key: str = "BOUGH_API_KEY") -> None:
    """`--url` (or `--base-url`) and `--api-key`, for commands that talk to a running server."""
    parser.add_argument(
        "--url", "--base-url", dest="url", metavar="URL", default=os.environ.get("BOUGH_URL", DEFAULT_URL),
        help="address of the server; default: the variable BOUGH_URL, or %(default)s",
    )  # fmt: skip
    parser.add_argument("--api-key", metavar="KEY", default="", help=f"its key; default: the variable {key}")
