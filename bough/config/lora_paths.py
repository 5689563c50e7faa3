"""Adapters that the operator gives (--lora-paths), read before any weight is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bough.config.adapter_facts import AdapterFacts
from bough.config.adapter_folders import ADAPTER_WEIGHTS, read_adapter_config
from bough.config.fields import Fields
from bough.config.model_facts import Gqa, ModelFacts
from bough.core.errors import ConfigError

GIVEN: Final = "lora_adapters"
"""Under this name the config has them."""
_NAME: Final = re.compile(r"[^\s,=\x00-\x1f]{1,200}")
_PAIR: Final = re.compile(r"(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True, slots=True)
class LoraPath:
    """An adapter as it is given."""

    name: str
    folder: Path


def parse_paths(given: Sequence[str]) -> list[LoraPath]:
    """`NAME=DIRECTORY`, or a directory, whose name it has then. Raises `ConfigError`."""
    found: list[LoraPath] = []
    for text in given:
        name, equals, path = text.partition("=")
        folder = Path(path if equals else text).expanduser().absolute()
        name = name if equals else folder.name
        if not _NAME.fullmatch(name):
            raise _bad(f"{text!r} names no adapter", "a name has no spaces, commas or equals signs", "NAME=DIRECTORY")
        if any(each.name == name for each in found):
            raise _bad(f"there are two adapters {name!r}", "requests name them", "another name for one of them")
        if not folder.is_dir():
            raise _bad(f"there is no directory {folder}", "adapters are read from directories", "the path of one")
        found.append(LoraPath(name, folder))
    return found


def read_paths(
    paths: Sequence[LoraPath], *, most: int, most_rank: int
) -> tuple[dict[str, Any], tuple[tuple[str, Path], ...]]:
    """What the config gets to know of adapters, and names of their own with their files. Raises `ConfigError` for what is
    not served."""
    if len(paths) > most:
        raise _bad(
            f"{len(paths)} adapters are given",
            f"at most {most} fit on the device",
            "fewer, or a larger --max-loras-per-batch",
        )
    known, files = {}, []
    for number, path in enumerate(paths, 1):
        sizes = read_adapter_config(path.folder)
        if sizes["r"] > most_rank:
            raise _bad(
                f"the adapter {path.name} has rank {sizes['r']}",
                f"--max-lora-rank is {most_rank}",
                "a larger --max-lora-rank",
            )
        file = path.folder / ADAPTER_WEIGHTS
        _check_pairs(path.name, file)
        known[f"lora{number}"] = {"name": path.name, **sizes}
        files.append((f"lora{number}", file))
    return {GIVEN: known}, tuple(files)


def _check_pairs(name: str, file: Path) -> None:
    """Every tensor is one of two products of a matrix, and both are there."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            names = set(opened.keys())
    except (SafetensorError, OSError) as error:
        raise _bad(f"{file} can't be read", str(error).splitlines()[0], "a sound file") from error
    other = {"A": "B", "B": "A"}
    odd = [
        each for each in sorted(names)
        if not (found := _PAIR.fullmatch(each)) or f"{found[1]}.lora_{other[found[2]]}.weight" not in names
    ]  # fmt: skip
    if odd or not names:
        shown = ", ".join(odd[:4]) + (f" and {len(odd) - 4} more" if len(odd) > 4 else "")
        raise ConfigError(
            what=f"the adapter {name} has tensors that are not served: {shown}"
            if odd
            else f"the adapter {name} is empty",
            why="an adapter is lora_A and lora_B of matrices of attention and feed-forward blocks",
            fix="merge it into its model, or train it for those alone",
            param="lora_paths",
        )


def names_of(config: Mapping[str, Any]) -> list[str]:
    """As requests name them, in the order of their numbers."""
    return [str(each["name"]) for each in (config.get(GIVEN) or {}).values()]


def with_given(facts: ModelFacts, fields: Fields) -> ModelFacts:
    """The model with the adapters that its config got to know by `read_paths`. Raises `ConfigError` where it can't have
    any."""
    given = fields.inner(GIVEN)
    if not given.raw:
        return facts
    why = ""
    if facts.adapters:
        why = "its checkpoint brings adapters of its own, which its media choose"
    elif facts.through_transformers:
        why = "it runs in transformers' module"
    elif not all(isinstance(mixer, Gqa) for mixer in facts.mixers):
        why = "adapters are served for models all of whose layers attend by queries, keys and values of heads"
    if why:
        raise ConfigError(
            what=f"--lora-paths can't be had with {facts.architecture}", why=why, fix="leave it out", param="lora_paths"
        )
    adapters = []
    for name in given.raw:
        each = given.inner(name)
        rank = each.count("r")
        adapters.append(AdapterFacts(name=name, rank=rank, scale=each.number("lora_alpha") / rank))
    return facts.with_adapters(tuple(adapters), built_in=False)


def _bad(what: str, why: str, wanted: str) -> ConfigError:
    return ConfigError(what=what, why=why, fix=f"give {wanted}", param="lora_paths")
