"""`bough completion SHELL`: prints a script that completes commands, flags, their values and models in bash, zsh or fish."""

from __future__ import annotations

import argparse
import shlex
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module

from bough.cli.main import COMMANDS
from bough.config.command_line import CommandParser, subcommands
from bough.config.flags import ALIASES, settings

EPILOG = """to use it, put one of these lines into a file that your shell reads:
  ~/.bashrc                      source <(bough completion bash)
  ~/.zshrc                       source <(bough completion zsh)
  ~/.config/fish/config.fish     bough completion fish | source"""

_TAKES_SETTINGS = ("serve", "run", "doctor")
"""Commands with all flags of `bough serve`, and a model as their first word."""
_HAS_PARSER = ("chat", "run", "models", "doctor", "top", "replay", "profile", "debug", "quantize", "completion")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag as a shell completes it."""

    name: str
    about: str
    takes_value: bool = False
    values: tuple[str, ...] = ()
    """Possible values; empty: anything, so file names are offered."""


@dataclass(frozen=True, slots=True)
class Words:
    """Words and flags that may follow a command."""

    about: str
    flags: tuple[Flag, ...] = ()
    words: tuple[str, ...] = ()
    """Words that may follow: actions, benchmarks, shells."""
    takes_model: bool = False
    actions: dict[str, Words] = field(default_factory=dict)


def parser() -> CommandParser:
    made = CommandParser(
        prog="bough completion", description="Prints a script that completes bough's command line.", epilog=EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("shell", choices=("bash", "zsh", "fish"))
    return made


def run(argv: Sequence[str]) -> int:
    shell = parser().parse_args(list(argv)).shell
    print({"bash": bash, "zsh": zsh, "fish": fish}[shell](), end="")
    return 0


def vocabulary() -> dict[str, Words]:
    """Words and flags that may follow each command."""
    from bough.cli.bench import benches

    found: dict[str, Words] = {}
    for name, (module, about) in COMMANDS.items():
        own = import_module(module).parser() if name in _HAS_PARSER else CommandParser(add_help=False)
        found[name] = Words(
            about,
            (*(_settings_flags() if name in _TAKES_SETTINGS else ()), *_flags_of(own)),
            tuple(benches()) if name == "bench" else (*subcommands(own), *_choices(own)),
            name in _TAKES_SETTINGS,
            {action: Words("", tuple(_flags_of(each))) for action, each in subcommands(own).items()},
        )
    return found


def _settings_flags() -> list[Flag]:
    flags = [
        Flag("--config", "read settings from a YAML file", True),
        Flag("--dump-config", "print the settings"),
        Flag("--verbose", "log how settings were decided"),
        Flag("--help", "help"),
    ]
    for setting in settings().values():
        about = setting.help.partition(". ")[0].rstrip(".")
        if setting.kind == "bool":
            flags += [Flag(setting.flag, about), Flag(f"--no-{setting.flag.removeprefix('--')}", f"not: {about}")]
        else:
            flags.append(Flag(setting.flag, about, True, setting.choices))
    for name, alias in ALIASES.items():
        setting = settings()[alias.target]
        switch = setting.kind == "bool"
        flags.append(Flag("--" + name.replace("_", "-"), f"see {setting.flag}", not switch, setting.choices))
    return flags


def _flags_of(parser: argparse.ArgumentParser) -> list[Flag]:
    return [
        Flag(name, (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%"),
             action.nargs != 0, tuple(map(str, action.choices or ())))
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--")
    ]  # fmt: skip


def _choices(parser: argparse.ArgumentParser) -> list[str]:
    """Values of a positional argument that has a fixed set of them."""
    return [
        str(choice)
        for action in parser._actions
        if not action.option_strings and not isinstance(action, argparse._SubParsersAction)
        for choice in action.choices or ()
    ]


# -- bash and zsh ---------------------------------------------------------------------------------


def bash() -> str:
    """The script for bash."""
    known = vocabulary()
    flags = "\n".join(
        f"    {name}) flags={_quoted(each.flags)} words={_words(each.words)} ;;" for name, each in known.items()
    )
    actions = "\n".join(
        f"    {name}/{action}) flags={_quoted(each.flags)} words='' ;;"
        for name, words in known.items()
        for action, each in words.actions.items()
    )
    values = {flag.name: flag for each in known.values() for flag in each.flags if flag.takes_value}
    chosen = "\n".join(
        f'    {name}) COMPREPLY=($(compgen -W {_words(flag.values)} -- "$cur")); return ;;'
        for name, flag in values.items()
        if flag.values
    )
    others = "|".join(name for name, flag in values.items() if not flag.values)
    models = "|".join(name for name, each in known.items() if each.takes_model)
    return f"""_bough() {{
  local cur prev command flags words
  cur="${{COMP_WORDS[COMP_CWORD]}}"
  prev="${{COMP_WORDS[COMP_CWORD-1]}}"
  command="${{COMP_WORDS[1]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W {_words(tuple(known))} -- "$cur"))
    return
  fi
  case "$prev" in
{chosen}
    {others}) COMPREPLY=($(compgen -f -- "$cur")); return ;;
  esac
  case "$command" in
{flags}
    *) return ;;
  esac
  case "$command/${{COMP_WORDS[2]}}" in
{actions}
  esac
  case "$cur" in
    -*) COMPREPLY=($(compgen -W "$flags" -- "$cur")); return ;;
  esac
  case "$command" in
    {models}) words="$words $(bough models list --names 2>/dev/null)" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur") $(compgen -f -- "$cur"))
}}
complete -o filenames -F _bough bough
"""


def zsh() -> str:
    """The script for zsh, which understands bash's."""
    return "autoload -U +X compinit && compinit -u\nautoload -U +X bashcompinit && bashcompinit\n" + bash()


def _quoted(flags: Sequence[Flag]) -> str:
    return _words(tuple(dict.fromkeys(flag.name for flag in flags)))


def _words(words: Sequence[str]) -> str:
    return shlex.quote(" ".join(words)) if words else "''"


# -- fish -----------------------------------------------------------------------------------------


def fish() -> str:
    """The script for fish, with a description of each flag."""
    lines = ["complete -c bough -f"]
    for name, each in vocabulary().items():
        lines.append(f"complete -c bough -n __fish_use_subcommand -a {name} -d {shlex.quote(each.about)}")
        within = f"-n '__fish_seen_subcommand_from {name}'"
        if each.words:
            lines.append(f"complete -c bough {within} -a {_words(each.words)}")
        if each.takes_model:
            lines.append(f"complete -c bough {within} -a '(bough models list --names 2>/dev/null)'")
            lines.append(f"complete -c bough {within} -F")
        flags = {flag.name: flag for flag in (*each.flags, *(f for a in each.actions.values() for f in a.flags))}
        for flag in flags.values():
            value = "" if not flag.takes_value else f" -x -a {_words(flag.values)}" if flag.values else " -r"
            about = shlex.quote(flag.about.partition("\n")[0][:80])
            lines.append(f"complete -c bough {within} -l {flag.name.removeprefix('--')}{value} -d {about}")
    return "\n".join(lines) + "\n"
