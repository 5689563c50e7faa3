"""The flags of `bough serve` and `bough run`: parsing, and help that is grouped and can be searched."""

from __future__ import annotations

import argparse
import os
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from bough.config.flags import (
    ALIASES,
    VALUE_WORDS,
    Setting,
    abbreviated,
    groups,
    is_setting,
    lookup,
    parse_value,
    settings,
    show_value,
    unknown_name,
)
from bough.config.presets import PURPOSES
from bough.config.server_args import Loaded, load_config
from bough.config.sglang import ACTING, MAPPED, is_switch, refused, take
from bough.config.sglang_refused import REFUSALS
from bough.core.errors import ConfigError

_OWN = ("config", "profile", "dump_config", "help", "verbose")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedFlags:
    """A parsed command line."""

    loaded: Loaded
    dump_config: bool
    """Print the configuration instead of starting."""


class _Gather(argparse.Action):
    """A list flag: each use of the flag adds one or more members."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option: object = None) -> None:
        more = parse_value(lookup(self.dest)[0], values, f"--{self.dest.replace('_', '-')}")
        assert isinstance(more, tuple)
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), *more])


class _Parser(argparse.ArgumentParser):
    """Raises `ConfigError` where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(what=message, why="the command line can't be read", fix="see `bough serve --help`")


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> ParsedFlags:
    """Reads `[MODEL] --flags` over variables, file and profile. Raises `ConfigError`."""
    expanded, notes = _expand(argv)
    parser = _build(expanded)
    namespace, unknown = parser.parse_known_args(expanded)
    for name, value in vars(namespace).items():
        if name not in _OWN and name != "MODEL" and not is_setting(name):
            take(name, value, "--" + name.replace("_", "-"))  # refused flags raise before their values are checked
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
    if own["verbose"]:
        if "log_level" in given:
            raise ConfigError(
                what="-v and --log-level both set the log level", why="-v is --log-level debug", fix="keep one of them"
            )
        given["log_level"] = "debug"
    loaded = load_config(
        given,
        environ=os.environ if environ is None else environ,
        file=own["config"] or "",
        profile=own["profile"] or "",
        as_flags=True,
    )
    loaded = replace(loaded, notes=(*notes, *loaded.notes))
    return ParsedFlags(loaded=loaded, dump_config=bool(own["dump_config"]))


def _expand(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command line with abbreviated flags expanded, and messages about them."""
    expanded: list[str] = []
    notes: list[str] = []
    for argument in argv:
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or not name or _is_flag(name):
            expanded.append(argument)
            continue
        meant = abbreviated(name)
        if meant is not None:
            whole = "--" + meant.replace("_", "-")
            notes.append(f"{flag} is read as {whole}")
            argument = whole + equals + value
        expanded.append(argument)
    return expanded, notes


def without_flags(argv: Sequence[str], *flags: str) -> list[str]:
    """The command line without the given flags and their values."""
    kept, drops = [], 0
    for argument in argv:
        if argument.partition("=")[0].replace("_", "-") in flags:
            drops = 1 if "=" in argument else 2
        if not drops:
            kept.append(argument)
        drops = max(0, drops - 1)
    return kept


def _is_flag(name: str) -> bool:
    plain = name.removeprefix("no_")
    return name in _OWN or is_setting(name) or is_switch(name) is not None or (plain != name and is_setting(plain))


def wants_help(argv: Sequence[str]) -> str | None:
    """The help that the arguments request. None: none; "": all of it; otherwise a group or a search word."""
    for argument in argv:
        if argument in ("-h", "--help"):
            return ""
        if argument.startswith("--help="):
            return argument.removeprefix("--help=")
    return None


def help_text(command: str, about: str, topic: str) -> str:
    """The help of all flags, of one group, or of those that a word occurs in."""
    if topic == "markdown":
        return markdown().rstrip("\n")
    if topic == "sglang":
        return sglang_markdown().rstrip("\n")
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


def markdown() -> str:
    """The reference of all flags, as in docs/flags.md."""
    lines = [
        "# Flags",
        "",
        "Every setting of `bough serve` and `bough run`. Generated by `bough serve --help=markdown > docs/flags.md`.",
        "",
        "A setting can be given as a flag (`--port 8000`), a variable (`BOUGH_PORT=8000`), a line in the file of",
        "`--config` (`port: 8000`) or a keyword of `bough.ServerArgs` and `bough.Engine` (`port=8000`). A flag wins over a",
        "variable, that over the file, that over the profile. `--dump-config` prints the result as such a file.",
        "",
        "Sizes may have a unit: `k m g t` are powers of 1,000, `K M G T` of 1,024, `GiB` and `GB` what they say.",
        "",
        "## Profiles",
        "",
        *(f"- `--profile {name}`: {purpose}." for name, purpose in PURPOSES.items()),
    ]
    for group, purpose in groups().items():
        lines += ["", f"## {group}", "", purpose, "", "| flag | default | meaning |", "|---|---|---|"]
        for setting in settings().values():
            if setting.group == group:
                lines.append(_table_row(setting))
    lines += ["", "SGLang's flags, and what becomes of each: [SGLang's flags](sglang_flags.md)."]
    return "\n".join(lines) + "\n"


def sglang_markdown() -> str:
    """How each of SGLang's flags is treated, as in docs/sglang_flags.md."""
    acting = [name for name in sorted({*ACTING, *MAPPED, *refused()}) if is_setting(name) or name == "config"]
    lines = [
        "# SGLang's flags", "",
        "What becomes of each, as of SGLang 0.5.23 and some releases before it. Generated by "
        "`bough serve --help=sglang > docs/sglang_flags.md`.", "",
        "## Flags that act", "",
    ]  # fmt: skip
    same = [name for name in acting if name not in ALIASES]
    lines += ["By the same name: " + ", ".join(map(_code, same)) + ".", "", "| flag | is |", "|---|---|"]
    for name in acting:
        if name in ALIASES:
            alias = ALIASES[name]
            lines.append(f"| {_code(name)} | {_code(('no_' if alias.inverted else '') + alias.target)} |")
    lines += ["", "Values that are read as others:", "", "| flag | value | is read as |", "|---|---|---|"]
    for setting, words in VALUE_WORDS.items():
        for word, meant in words.items():
            why = f": {meant.note}" if meant.note else ""
            lines.append(f"| {_code(setting)} | `{word}` | `{meant.value}`{why} |")
    lines += ["", "## Flags that are mapped", "", "Each use is said at the start.", "", "| flag | |", "|---|---|"]
    lines += [f"| {_code(name)} | {entry.said} |" for name, entry in MAPPED.items() if not is_setting(name)]
    lines += ["", "## Flags that are refused", "", "A flag at SGLang's own default is let through.", ""]
    for why, fix, flags in REFUSALS:
        names = [flag.partition("=")[0] for flag in flags.split()]
        names = [name for name in names if not is_setting(name)]
        if names:
            lines.append(f"- {why[:1].upper()}{why[1:]} ({fix}): {', '.join(map(_code, names))}.")
    return "\n".join(lines) + "\n"


def _code(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def _table_row(setting: Setting) -> str:
    first, *others = spellings(setting)
    text = setting.help
    if setting.choices:
        text += f" One of: {', '.join(setting.choices)}."
    if others:
        text += f" Also: {', '.join(f'`{other}`' for other in others)}."
    default = show_value(setting.default)
    return f"| `{first}` | {f'`{default}`' if default else ''} | {text.replace('|', chr(92) + '|')} |"


def spellings(setting: Setting) -> list[str]:
    """All flags of a setting, its own name first."""
    first = setting.flag if setting.kind != "bool" else f"--[no-]{setting.flag.removeprefix('--')}"
    aliases = [name for name, alias in ALIASES.items() if alias.target == setting.name]
    return [first, *("--" + name.replace("_", "-") for name in aliases)]


def _build(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of every setting, and of those flags of SGLang's that `argv` has."""
    parser = _Parser(prog="bough", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("MODEL", nargs="?")
    parser.add_argument("--config")
    parser.add_argument("--profile")
    parser.add_argument("--dump-config", action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true")
    for name in settings():
        _add(parser, name, settings()[name])
    for name, alias in ALIASES.items():
        _add(parser, name, settings()[alias.target], switch_only=alias.inverted)
    present = {argument.partition("=")[0].removeprefix("--") for argument in argv if argument.startswith("--")}
    for name in sorted(each.replace("-", "_") for each in present):
        switch = is_switch(name)
        if switch is not None and not is_setting(name):
            flag = "--" + name.replace("_", "-")
            if switch:
                parser.add_argument(flag, dest=name, action="store_true")
            else:
                parser.add_argument(flag, dest=name, nargs="?")
    return parser


def _add(parser: argparse.ArgumentParser, name: str, setting: Setting, switch_only: bool = False) -> None:
    flag = "--" + name.replace("_", "-")
    if setting.kind == "list":
        parser.add_argument(flag, dest=name, action=_Gather)
    elif setting.kind != "bool":
        parser.add_argument(flag, dest=name)
    elif switch_only:
        parser.add_argument(flag, dest=name, action="store_true")
    else:
        parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction)


def _refuse_conflicts(given: Mapping[str, Any], positional: str | None) -> None:
    """Raises `ConfigError` if one setting is given by two different flags."""
    seen: dict[str, str] = {"model": "the model's place"} if positional is not None else {}
    for name in given:
        if not is_setting(name):  # one of SGLang's
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
        ("-v, --verbose", 'The same as --log-level debug: how each "auto" was decided, and the memory plan.'),
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
        lines += _entry(names[0] + value, _explanation(setting))
    return lines


def _explanation(setting: Setting) -> str:
    text = setting.help
    if setting.choices and _placeholder(setting) == "NAME":
        text += f" One of: {', '.join(setting.choices)}."
    default = show_value(setting.default)
    if default:
        text += f" (default: {default})"
    also = spellings(setting)[1:]
    return f"{text} Also: {', '.join(also)}." if also else text


def _placeholder(setting: Setting) -> str:
    if setting.choices:
        joined = "|".join(setting.choices)
        return joined if len(joined) <= 40 else "NAME"
    names = {"int": "N", "float": "X", "text": "TEXT", "list": "A,B"}
    return "NAME=KEY" if setting.name == "api_key" else names[setting.kind]


def _entry(name: str, text: str) -> list[str]:
    width = max(60, min(120, shutil.get_terminal_size().columns))
    indent = " " * 34
    body = textwrap.wrap(text, width - len(indent), break_long_words=False, break_on_hyphens=False) or [""]
    head = f"  {name}"
    if len(head) < len(indent) - 1:
        return [head.ljust(len(indent)) + body[0], *(indent + line for line in body[1:])]
    return [head, *(indent + line for line in body)]
