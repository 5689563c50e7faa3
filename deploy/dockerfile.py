"""Reads a Dockerfile: stages, and their instructions in order. Knows what this repository's file uses, refuses the rest."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

KNOWN = frozenset(
    (
        "FROM",
        "ARG",
        "ENV",
        "RUN",
        "COPY",
        "WORKDIR",
        "USER",
        "VOLUME",
        "EXPOSE",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
        "LABEL",
    )
)


class Unreadable(Exception):
    """The file has something that is not known here."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, its lines joined."""

    name: str
    text: str
    line: int

    def words(self) -> list[str]:
        """Its arguments, whether they are written as JSON or as words."""
        if self.text.startswith("["):
            return [str(word) for word in json.loads(self.text)]
        return shlex.split(self.text)


@dataclass(slots=True)
class Stage:
    """What follows one FROM."""

    base: str
    """An image, or the name of a stage before this one."""
    name: str
    instructions: list[Instruction] = field(default_factory=list)


def read_dockerfile(path: Path) -> list[Stage]:
    """The stages of a Dockerfile. Raises `Unreadable`."""
    stages: list[Stage] = []
    for instruction in _instructions(path.read_text()):
        if instruction.name == "FROM":
            match = re.fullmatch(r"(\S+)(?:\s+AS\s+(\S+))?", instruction.text, re.IGNORECASE)
            if match is None:
                raise Unreadable(f"line {instruction.line}: FROM {instruction.text}")
            stages.append(Stage(match[1], match[2] or str(len(stages))))
        elif not stages:
            raise Unreadable(f"line {instruction.line}: {instruction.name} before FROM")
        else:
            stages[-1].instructions.append(instruction)
    return stages


def _instructions(text: str) -> list[Instruction]:
    found: list[Instruction] = []
    parts: list[str] = []
    begun = 0
    for number, raw in enumerate(text.splitlines(), start=1):
        if raw.lstrip().startswith("#") or (not raw.strip() and not parts):
            continue
        begun = begun if parts else number
        goes_on = raw.rstrip().endswith("\\")
        parts.append(raw.rstrip().removesuffix("\\").strip())
        if not goes_on:
            name, _, rest = " ".join(parts).partition(" ")
            if name.upper() not in KNOWN:
                raise Unreadable(f"line {begun}: {name}")
            found.append(Instruction(name.upper(), rest.strip(), begun))
            parts = []
    return found


def assignments(text: str) -> dict[str, str]:
    """The `NAME=value` pairs of ENV and ARG; an ARG without a value is empty."""
    pairs = (word.partition("=") for word in shlex.split(text))
    return {name: value for name, _, value in pairs}


def needed(stages: list[Stage], target: str) -> list[Stage]:
    """The stages that `target` is made of, in the order of the file. Raises `Unreadable` if there is no such stage."""
    by_name = {stage.name: stage for stage in stages}
    if target not in by_name:
        raise Unreadable(f"there is no stage {target}; there are {', '.join(by_name)}")
    wanted: set[str] = set()
    open_ = [target]
    while open_:
        stage = by_name[open_.pop()]
        wanted.add(stage.name)
        sources = [stage.base, *(copied_from(each) for each in stage.instructions if each.name == "COPY")]
        open_ += [name for name in sources if name in by_name and name not in wanted]
    return [stage for stage in stages if stage.name in wanted]


def copied_from(copy: Instruction) -> str:
    """The stage that a COPY takes files from; empty: the build's context."""
    match = re.match(r"--from=(\S+)", copy.text)
    return match[1] if match else ""
