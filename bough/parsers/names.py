"""Looking formats up by name."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

from bough.core.errors import InvalidRequest

T = TypeVar("T")


class UnknownParser(InvalidRequest):
    """No parser has this name."""

    code = "unknown_parser"


def lookup(entries: Mapping[str, T], aliases: Mapping[str, str], name: str, *, kind: str, flag: str) -> T:
    """The entry called `name`; case, underscores, dots and hyphens do not matter."""
    by_plain = {_plain(known): known for known in entries}
    by_plain.update({_plain(alias): target for alias, target in aliases.items()})
    known = by_plain.get(_plain(name))
    if known is not None:
        return entries[known]
    close = get_close_matches(_plain(name), by_plain, n=1)
    raise UnknownParser(
        what=f"there is no {kind} called {name!r}" + (f", did you mean {by_plain[close[0]]!r}?" if close else ""),
        why=f"known: {', '.join(sorted(entries))}",
        fix=f"use one of these names, or start with {flag} auto",
    )


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
