"""The flags of `bough serve` and `bough run`: parsing, and help that is grouped and can be searched."""

from __future__ import annotations

import argparse
import os
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from bough.config.flags import ALIASES, NOT_SETTINGS, Setting, groups, lookup, settings, show_value, unknown_name
from bough.config.presets import PURPOSES
from bough.config.server_args import Loaded, load_config
from bough.core.errors import ConfigError

_OWN = ("config", "profile", "dump_config", "help")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What a command line asks for."""

    loaded: Loaded
    dump_config: bool
    """Print the configuration instead of starting."""


class _Parser(argparse.ArgumentParser):
    """Raises `ConfigError` where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(what=message, why="the command line can't be read", fix="see `bough serve --help`")


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Parsed:
    """Reads `[MODEL] --flags` over variables, file and profile. Raises `ConfigError`."""
    parser = _build()
    namespace, unknown = parser.parse_known_args(list(argv))
    for argument in unknown:
        if argument.startswith("-"):
            raise unknown_name(argument)
        raise ConfigError(
            what=f"unexpected argument {argument!r}",
            why="only one model can be served",
            fix="put flags before their values, as in `bough serve MODEL --port 8000`",
        )
    given: dict[str, Any] = vars(namespace)
    own = {name: given.pop(name, None) for name in _OWN}
    positional = given.pop("MODEL", None)
    _refuse_conflicts(given, positional)
    if positional is not None:
        given["model"] = positional
    loaded = load_config(
        given,
        environ=os.environ if environ is None else environ,
        file=own["config"] or "",
        profile=own["profile"] or "",
        as_flags=True,
    )
    return Parsed(loaded=loaded, dump_config=bool(own["dump_config"]))


def wants_help(argv: Sequence[str]) -> str | None:
    """What help is asked for: None: none, "": all of it, else a group or a word."""
    for argument in argv:
        if argument in ("-h", "--help"):
            return ""
        if argument.startswith("--help="):
            return argument.removeprefix("--help=")
    return None


def help_text(command: str, about: str, topic: str) -> str:
    """The help of all flags, of one group, or of those that a word occurs in."""
    chosen = list(settings().values())
    if topic in groups():
        chosen = [setting for setting in chosen if setting.group == topic]
    elif topic:
        chosen = [setting for setting in chosen if _mentions(setting, topic)]
        if not chosen:
            names = ", ".join(groups())
            return f"no flag has to do with {topic!r}; the groups are: {names}"
    lines = [f"usage: bough {command} [MODEL] [--flag value ...]", "", about, ""]
    if not topic:
        lines += [*_general_help(), ""]
    for group, purpose in groups().items():
        within = [setting for setting in chosen if setting.group == group]
        if within:
            lines += [f"{group}: {purpose}", *_rows(within), ""]
    if not topic:
        lines.append(f"`--help=GROUP` shows one group ({', '.join(groups())}), `--help=WORD` every flag about a word.")
    return "\n".join(lines).rstrip()


def spellings(setting: Setting) -> list[str]:
    """Every flag that sets a setting, its own first."""
    first = setting.flag if setting.kind != "bool" else f"--[no-]{setting.flag.removeprefix('--')}"
    aliases = [name for name, alias in ALIASES.items() if alias.target == setting.name]
    return [first, *("--" + name.replace("_", "-") for name in aliases)]


def _build() -> argparse.ArgumentParser:
    parser = _Parser(prog="bough", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("MODEL", nargs="?")
    parser.add_argument("--config")
    parser.add_argument("--profile")
    parser.add_argument("--dump-config", action="store_true")
    for name in settings():
        _add(parser, name, settings()[name])
    for name, alias in ALIASES.items():
        _add(parser, name, settings()[alias.target], switch_only=alias.inverted)
    for name in NOT_SETTINGS:
        parser.add_argument("--" + name.replace("_", "-"), dest=name, action="store_true")
    return parser


def _add(parser: argparse.ArgumentParser, name: str, setting: Setting, switch_only: bool = False) -> None:
    flag = "--" + name.replace("_", "-")
    if setting.kind != "bool":
        parser.add_argument(flag, dest=name)
    elif switch_only:
        parser.add_argument(flag, dest=name, action="store_true")
    else:
        parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction)


def _refuse_conflicts(given: Mapping[str, Any], positional: str | None) -> None:
    """Two spellings of one setting are one too many."""
    seen: dict[str, str] = {"model": "the model's place"} if positional is not None else {}
    for name in given:
        if name in NOT_SETTINGS:
            continue
        setting, _ = lookup(name)
        shown = "--" + name.replace("_", "-")
        if setting.name in seen:
            raise ConfigError(
                what=f"{seen[setting.name]} and {shown} both say what {setting.name} is",
                why="they are two spellings of one setting",
                fix=f"keep {setting.flag} only",
                param=setting.name,
            )
        seen[setting.name] = shown


def _mentions(setting: Setting, word: str) -> bool:
    lowered = word.lower().replace("-", "_").lstrip("_")
    texts = [setting.name, setting.help.lower(), *(flag.replace("-", "_") for flag in spellings(setting))]
    return any(lowered in text for text in texts) or word.lower() in setting.help.lower()


def _general_help() -> list[str]:
    rows = [
        ("--config FILE", "Read settings from a YAML file: one `name: value` a line."),
        ("--profile NAME", "; ".join(f"{name}: {purpose}" for name, purpose in PURPOSES.items()) + "."),
        ("--dump-config", "Print the settings as a YAML file, and exit."),
    ]
    intro = [
        "Every flag is also a variable (--port: BOUGH_PORT) and a line in the file of --config (port: 8000).",
        "A flag wins over a variable, that over the file, that over the profile. Sizes may be written 32k, 32K or 2GiB.",
        "",
    ]
    return [*intro, *(line for name, text in rows for line in _entry(name, text))]


def _rows(chosen: Iterable[Setting]) -> list[str]:
    lines: list[str] = []
    for setting in chosen:
        names = spellings(setting)
        value = "" if setting.kind == "bool" else f" {_placeholder(setting)}"
        default = show_value(setting.default)
        text = f"{setting.help} (default: {default})" if default else setting.help
        also = f" Also: {', '.join(names[1:])}." if names[1:] else ""
        lines += _entry(names[0] + value, text + also)
    return lines


def _placeholder(setting: Setting) -> str:
    if setting.choices:
        joined = "|".join(setting.choices)
        return joined if len(joined) <= 40 else "NAME"
    names = {"int": "N", "float": "X", "text": "TEXT", "list": "A,B"}
    return names[setting.kind]


def _entry(name: str, text: str) -> list[str]:
    width = max(60, min(120, shutil.get_terminal_size().columns))
    indent = " " * 34
    body = textwrap.wrap(text, width - len(indent), break_long_words=False) or [""]
    head = f"  {name}"
    if len(head) < len(indent) - 1:
        return [head.ljust(len(indent)) + body[0], *(indent + line for line in body[1:])]
    return [head, *(indent + line for line in body)]
