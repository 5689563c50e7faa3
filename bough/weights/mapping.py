"""How a checkpoint's names become a model's slots, as data.

Names are given without their last word (`weight`, `bias`), which is carried over. A `*` stands for one number; numbers are
carried over in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from bough.weights.slots import Slot
from bough.weights.stored import RowRange, Stored

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Rename:
    """The tensors of `source` fill `target`."""

    source: str
    target: str


@dataclass(frozen=True, slots=True, init=False)
class Fuse:
    """Several tensors fill the parts of one layer: `Fuse("layers.*.qkv", q="...q_proj", k="...k_proj", v="...v_proj")`."""

    target: str
    parts: dict[str, str]

    def __init__(self, target: str, **parts: str) -> None:
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "parts", parts)


@dataclass(frozen=True, slots=True)
class Split:
    """A tensor that is fused on disk is cut, top to bottom, into parts of a layer."""

    source: str
    target: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ignore:
    """Tensors that no layer needs."""

    source: str


Rule = Rename | Fuse | Split | Ignore


@dataclass(slots=True)
class Fit:
    """What a checkpoint has for a model, and what does not fit."""

    pairs: list[tuple[Slot, Stored]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)


class Mapping:
    """The rules of one architecture."""

    def __init__(self, *rules: Rule) -> None:
        self.rules = rules
        self._targets: dict[str, tuple[str, ...]] = {}
        """Source pattern -> target patterns: none to ignore it, several to cut it."""
        self._sources: dict[str, str] = {}
        """Target pattern -> source pattern, to say what is missing in the checkpoint's own words."""
        for rule in rules:
            match rule:
                case Rename(source, target):
                    self._add(source, (target,))
                case Fuse():
                    for part, source in rule.parts.items():
                        self._add(source, (f"{rule.target}.{part}",))
                case Split(source, target, parts):
                    self._add(source, tuple(f"{target}.{part}" for part in parts))
                case Ignore(source):
                    self._add(source, ())

    def _add(self, source: str, targets: tuple[str, ...]) -> None:
        if source in self._targets:
            raise ValueError(f"two rules for {source}")
        self._targets[source] = targets
        self._sources |= dict.fromkeys(targets, source)

    def fit(self, tensors: dict[str, Stored], slots: dict[str, Slot]) -> Fit:
        """Pairs every tensor with its slot. Reads nothing."""
        fit = Fit()
        filled: set[str] = set()
        for name, stored in tensors.items():
            targets = self.targets_of(name)
            if targets is None or any(target not in slots for target in targets):
                fit.extra.append(name)
                continue
            shapes = [slots[target].shape for target in targets]
            filled |= set(targets)
            if targets and not _covers(stored.shape, shapes):
                want = shapes[0] if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:])
                fit.misshaped.append(f"{name} is {list(stored.shape)}, expected {list(want)}")
                continue
            fit.pairs += [(slots[target], part) for target, part in zip(targets, _cut(stored, shapes), strict=True)]
        fit.missing = [self.source_of(name) for name, slot in slots.items() if name not in filled and not slot.optional]
        return fit

    def targets_of(self, name: str) -> tuple[str, ...] | None:
        """The slots that a tensor fills; None if no rule knows it."""
        stem, _, last = name.rpartition(".")
        numbers = _NUMBER.findall(stem)
        targets = self._targets.get(_NUMBER.sub("*", stem))
        if targets is None:
            return None
        return tuple(f"{_fill(target, numbers)}.{last}" for target in targets)

    def source_of(self, slot: str) -> str:
        """The name of the tensor that fills a slot; the slot's own if no rule leads there."""
        stem, _, last = slot.rpartition(".")
        source = self._sources.get(_NUMBER.sub("*", stem))
        return slot if source is None else f"{_fill(source, _NUMBER.findall(stem))}.{last}"


def _fill(pattern: str, numbers: list[str]) -> str:
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern


def _covers(shape: tuple[int, ...], shapes: list[tuple[int, ...]]) -> bool:
    if len(shapes) == 1:
        return shape == shapes[0]
    return shape[0] == sum(part[0] for part in shapes) and all(shape[1:] == part[1:] for part in shapes)


def _cut(stored: Stored, shapes: list[tuple[int, ...]]) -> Iterable[Stored]:
    if len(shapes) == 1:
        return [stored]
    parts, start = [], 0
    for shape in shapes:
        parts.append(RowRange(stored, start, start + shape[0]))
        start += shape[0]
    return parts
