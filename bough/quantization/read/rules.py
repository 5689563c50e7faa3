"""What a checkpoint's configuration says of each layer, and how it names layers."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bough.core.errors import UnsupportedModel
from bough.quantization.formats import WeightFormat

LayerKind = Literal["linear", "head", "embedding", "expert"]
"""head: the output projection. expert: a projection of one expert."""

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KvRule:
    """Keys and values are to be cached in 8 bits, by scales of the checkpoint."""

    kind: Literal["fp8_e4m3"] = "fp8_e4m3"


@dataclass(frozen=True, slots=True)
class Rules:
    """A checkpoint's quantisation."""

    method: str
    """As users know it: "fp8", "awq", "compressed-tensors"."""
    summary: str
    """One line for people: "FP8, blocks of 128 x 128"."""
    of: Callable[[str, LayerKind], WeightFormat | None]
    """The format of a layer, by the checkpoint's own name of it; None: plain floats."""
    kv: KvRule | None = None


def refuse(what: str, why: str, fix: str = "use another quantised form of the model") -> UnsupportedModel:
    return UnsupportedModel(what=what, why=why, fix=fix)


def skips(entries: Iterable[str], *, style: Literal["exact", "substring", "glob"]) -> Callable[[str], bool]:
    """Whether a list of excluded layers names one.

    All styles: an entry is a module, which excludes all that is below it; `re:` begins a regular expression; a suffix
    `.linear`, which wrappers leave behind, is ignored. substring: an entry may stand anywhere in the name. glob: `*` stands
    for anything.
    """
    exact, patterns = set(), []
    for entry in entries:
        if entry.startswith("re:"):
            patterns.append(re.compile(entry[3:]))
        elif "*" in entry:
            tail = "" if style == "glob" else r"(\..*)?"
            patterns.append(re.compile(fnmatch.translate(entry).removesuffix(r"\Z").removesuffix(r"\z") + tail + r"\Z"))
        else:
            exact.add(entry.removesuffix(".linear"))

    def skipped(name: str) -> bool:
        if any(pattern.match(name) for pattern in patterns):
            return True
        if style == "substring" and any(entry in name for entry in exact):
            return True
        return any(above in exact for above in _and_above(name))

    return skipped


def _and_above(name: str) -> Iterable[str]:
    """A module's name and those of the modules it is in; with and without the leading `model.`"""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        yield ".".join(parts[:end])
    if parts[0] == "model":
        for end in range(len(parts), 1, -1):
            yield ".".join(parts[1:end])
    else:
        for end in range(len(parts), 0, -1):
            yield "model." + ".".join(parts[:end])


def number(config: Config, *keys: str, default: int | None = None) -> int:
    """The first of the keys that the configuration has. Raises `UnsupportedModel` if it has none and there is no default."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    if default is None:
        raise refuse(
            f"the quantisation config has no {keys[0]}", f"it has {', '.join(sorted(config))}", "check config.json"
        )
    return default


def words(config: Config, *keys: str) -> list[str]:
    """The list of strings under the first key that is there; empty if none is."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, list):
            return [str(each) for each in value]
    return []
