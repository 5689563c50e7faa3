"""The engine's flags beside a benchmark's own: `bough bench latency MODEL --dtype bfloat16 --batch-size 1`."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any

from bough.config.flags import is_setting, lookup, settings, unknown_name
from bough.config.sglang import is_switch
from bough.core.errors import ConfigError

NOTE = "Every flag of `bough serve` is taken too (--dtype, --mem-fraction-static, --load-format dummy, ...)."


def parse_with_settings(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The benchmark's own options, and the engine's settings: a MODEL as the first argument and all other flags. Raises
    `ConfigError` for an unknown flag.
    """
    words = list(argv)
    found: dict[str, Any] = {}
    if words and not words[0].startswith("-"):
        found["model_path"] = words.pop(0)
    options, rest = parser.parse_known_args(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ConfigError(
                what=f"unexpected argument {word!r}",
                why="the model stands first, values follow their flags",
                fix=f"see `{parser.prog} --help`",
            )
        flag, _, value = word.partition("=")
        try:
            found |= _setting(flag.removeprefix("--").replace("-", "_"), value, rest)
        except ConfigError as error:
            own = difflib.get_close_matches(flag, parser._option_string_actions, n=1, cutoff=0.75)
            if error.param != flag or not own:
                raise
            raise ConfigError(
                what=error.what, why="neither this measurement nor an engine has it", fix=f"did you mean {own[0]}?"
            ) from error
    return options, found


def _setting(name: str, value: str, rest: list[str]) -> dict[str, Any]:
    """One flag as a setting; takes its value from `rest` if it needs one."""
    flag = "--" + name.replace("_", "-")
    if not is_setting(name) and (is_theirs_switch := is_switch(name)) is not None:
        return {name: True if is_theirs_switch else value or _following(flag, rest)}
    switched_off = name.startswith("no_") and name.removeprefix("no_") in settings()
    setting, _ = lookup(name.removeprefix("no_") if switched_off else flag)
    if setting.kind == "bool":
        return {setting.name: False} if switched_off else {name: value or True}
    if switched_off:
        raise unknown_name(flag)
    return {name: value or _following(flag, rest)}


def _following(flag: str, rest: list[str]) -> str:
    """The value after a flag; it is removed from `rest`."""
    if not rest:
        raise ConfigError(what=f"{flag} has no value", fix="write one behind it")
    return rest.pop(0)
