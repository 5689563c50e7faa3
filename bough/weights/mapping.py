"""How a checkpoint's names become a model's slots, as data.

Names are given without their last word (`weight`, `bias`), which is carried over. A `*` stands for one number; numbers are
carried over in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # model files are read without torch
    from bough.weights.slots import Slot
    from bough.weights.stored import Stored

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")
_ADAPTER: Final = re.compile(r"(.+)\.lora_([AB])\.([^.]+)\.weight")
"""A tensor of an adapter: what it belongs to, which of its two products, the adapter's name."""


@dataclass(frozen=True, slots=True)
class Rename:
    """The tensors of `source` fill `target`. `inputs_first`: its matrices are stored inputs first. `or_else`: what they fill
    in blocks of another kind, which have no `target`."""

    source: str
    target: str
    inputs_first: bool = False
    or_else: str = ""


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
    """A tensor that is fused on disk is cut, top to bottom, into parts of a layer.

    `by_head`: it holds, for each key-value head, its queries, its key and its value together. `inputs_first`: matrices are
    stored inputs first. `groups`: it holds that many groups of rows, in each a share of every part.
    """

    source: str
    target: str
    parts: tuple[str, ...]
    by_head: bool = False
    inputs_first: bool = False
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Stacked:
    """A tensor of all experts fills parts of each: `target.3.gate` and so on. `source` is its whole name, but for a last
    `weight`. `interleaved`: the rows of its parts take turns. `last`: the slots' last word."""

    source: str
    target: str
    parts: tuple[str, ...]
    inputs_first: bool = False
    interleaved: bool = False
    last: str = "weight"
    flat: bool = False
    """Experts lie below one another, instead of along a dimension of their own."""
    mxfp4: bool = False
    """It is stored as `source_blocks` and `source_scales`, outputs first. Experts that have slots for `blocks` and `scales`
    get them as they are, others are dequantised."""
    either_first: bool = False
    """With `inputs_first`: some writers store outputs first. The shape tells, unless it is square."""


@dataclass(frozen=True, slots=True)
class Exact:
    """One tensor fills one slot; both names are whole, last word included."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Ignore:
    """Tensors that no layer needs."""

    source: str


@dataclass(frozen=True, slots=True)
class Beyond:
    """Blocks below `source` behind the model's last one, which draft: no layer needs them."""

    source: str


@dataclass(frozen=True, slots=True)
class Outside:
    """Tensors whose names begin so belong to parts that are not computed: towers that see or hear."""

    source: str


Rule = Rename | Exact | Fuse | Split | Stacked | Ignore | Beyond | Outside


@dataclass(slots=True)
class Fit:
    """What a checkpoint has for a model, and what does not fit."""

    pairs: list[tuple[Slot, Stored]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)
    mistyped: list[str] = field(default_factory=list)

    @property
    def problems(self) -> dict[str, list[str]]:
        """What doesn't fit, by what is wrong with it."""
        found = {"missing": self.missing, "extra": self.extra, "misshaped": self.misshaped, "mistyped": self.mistyped}
        return {what: names for what, names in found.items() if names}


class Mapping:
    """The rules of one architecture."""

    def __init__(self, *rules: Rule) -> None:
        self.rules = rules
        self._targets: dict[str, tuple[str, ...]] = {}
        """Source pattern -> target patterns: none to ignore it, several to cut it."""
        self._sources: dict[str, str] = {}
        """Target pattern -> source pattern, to say what is missing in the checkpoint's own words."""
        self._exact: dict[str, str] = {}
        """Whole source pattern -> whole target pattern."""
        self._stacked: dict[str, Stacked] = {}
        """By whole source pattern."""
        self._outside: tuple[str, ...] = ()
        self._beyond: list[re.Pattern[str]] = []
        self._scales: dict[str, Stacked] = {}
        """By the whole source pattern of scales that belong to blocks."""
        self._or_else: dict[str, str] = {}
        """Source pattern -> target pattern in blocks that lack the first one."""
        self._turned: set[str] = set()
        self._by_head: set[str] = set()
        self._groups: dict[str, int] = {}
        for rule in rules:
            match rule:
                case Rename(source, target, inputs_first, or_else):
                    self._add(source, (target,))
                    if or_else:
                        self._or_else[source], self._sources[or_else] = or_else, source
                    if inputs_first:
                        self._turned.add(source)
                case Exact(source, target):
                    self._exact[source] = target
                case Fuse():
                    for part, source in rule.parts.items():
                        self._add(source, (f"{rule.target}.{part}",))
                case Split(source, target, parts, by_head, inputs_first, groups):
                    self._add(source, tuple(f"{target}.{part}" for part in parts))
                    if groups > 1:
                        self._groups[source] = groups
                    if by_head:
                        self._by_head.add(source)
                    if inputs_first:
                        self._turned.add(source)
                case Stacked():
                    if rule.mxfp4:
                        self._stacked[f"{rule.source}_blocks"] = rule
                        self._scales[f"{rule.source}_scales"] = rule
                    else:
                        self._stacked |= {rule.source: rule, f"{rule.source}.weight": rule}
                case Outside(source):
                    self._outside += (source,)
                case Beyond(source):
                    self._beyond.append(re.compile(re.escape(source) + r"\.(\d+)\."))
                case Ignore(source):
                    self._add(source, ())

    def _add(self, source: str, targets: tuple[str, ...]) -> None:
        if source in self._targets:
            raise ValueError(f"two rules for {source}")
        self._targets[source] = targets
        self._sources |= dict.fromkeys(targets, source)

    def fit(
        self, tensors: dict[str, Stored], slots: dict[str, Slot], left_out: Callable[[str], bool] | None = None
    ) -> Fit:
        """Pairs every tensor with its slot. Reads nothing. `left_out` tells the names of slots that the model is made
        without; their tensors are passed over."""
        fit = Fit()
        filled: set[str] = set()
        count = 1 + max((int(slot.split(".")[1]) for slot in slots if slot.startswith("layers.")), default=0)
        held = {name: stored for name, stored in tensors.items() if not self._is_elsewhere(name, count)}
        for name, stored, targets in self._with_targets(held, slots):
            if left_out is not None and targets and all(map(left_out, targets)):
                continue
            if targets is None or any(target not in slots for target in targets):
                fit.extra.append(name)
                continue
            parts = [slots[target] for target in targets]
            filled |= set(targets)
            if parts and stored.shape not in (_whole_shape(parts), *(parts[0].also if _is_whole(parts) else ())):
                fit.misshaped.append(f"{name} is {list(stored.shape)}, expected {list(_whole_shape(parts))}")
                continue
            wrong = [part for part in parts if part.kinds is not None and stored.kind not in part.kinds]
            if wrong:
                fit.mistyped.append(f"{name} is {stored.kind}, expected {' or '.join(sorted(wrong[0].kinds or ()))}")
                continue
            if parts:
                fit.pairs += zip(parts, self._cut(name, stored, parts), strict=True)
        fit.missing = [self.source_of(name) for name, slot in slots.items() if name not in filled and not slot.optional]
        return fit

    def _is_elsewhere(self, name: str, count: int) -> bool:
        """Whether a tensor is of a block behind the last of `count`, or of a part that is not computed."""
        if name.startswith(self._outside):
            return True
        return any((found := pattern.match(name)) and int(found[1]) >= count for pattern in self._beyond)

    def _with_targets(
        self, tensors: dict[str, Stored], slots: dict[str, Slot]
    ) -> Iterator[tuple[str, Stored, tuple[str, ...] | None]]:
        """Each tensor with its name and slots; of a stack, each expert's."""
        for name, stored in tensors.items():
            pattern = _NUMBER.sub("*", name)
            rule = self._stacked.get(pattern) or self._scales.get(pattern)
            if rule is not None and rule.mxfp4:
                yield from self._blocks_with_targets(rule, name, tensors, slots)
                continue
            if rule is None:
                turned = self.has_inputs_first(name) and len(stored.shape) == 2
                yield name, _turn(stored) if turned else stored, self._targets_among(slots, name)
                continue
            target = _fill(rule.target, _NUMBER.findall(name))
            turned = rule.inputs_first
            if turned and rule.either_first and len(stored.shape) == 3:
                names = [f"{target}.0.{part}.{rule.last}" for part in rule.parts]
                fits = all(each in slots for each in names) and stored.shape[1:] == _whole_shape(
                    [slots[n] for n in names]
                )
                turned = not fits or stored.shape[1] == stored.shape[2]
            rows = _rows_of_an_expert(rule, slots.get(f"{target}.0.{rule.parts[0]}.{rule.last}"))
            for expert in range(stored.shape[0] // rows):
                item = _item(stored, expert, rows if rule.flat else None, turned=turned)
                yield name, item, tuple(f"{target}.{expert}.{part}.{rule.last}" for part in rule.parts)

    def _targets_among(self, slots: dict[str, Slot], name: str) -> tuple[str, ...] | None:
        """As `targets_of`, in a model with these slots."""
        targets = self.targets_of(name)
        stem, _, last = name.rpartition(".")
        other = self._or_else.get(_NUMBER.sub("*", stem))
        if other is None or targets is None or targets[0] in slots:
            return targets
        return (f"{_fill(other, _NUMBER.findall(stem))}.{last}",)

    def _blocks_with_targets(
        self, rule: Stacked, name: str, tensors: dict[str, Stored], slots: dict[str, Slot]
    ) -> Iterator[tuple[str, Stored, tuple[str, ...] | None]]:
        """Of blocks or of their scales, each expert's."""
        stem, _, last = name.rpartition("_")
        stored, scales, target = tensors[name], tensors.get(f"{stem}_scales"), _fill(rule.target, _NUMBER.findall(name))
        if f"{target}.0.{rule.parts[0]}.blocks" not in slots:
            if last == "scales":
                return
            if scales is None:
                yield name, stored, None
                return
            stored, last = _dequantised(stored, scales), rule.last
        for expert in range(stored.shape[0]):
            item = _item(stored, expert, None, turned=False)
            flat = _flat(item) if len(item.shape) > 2 else item
            yield name, flat, tuple(f"{target}.{expert}.{part}.{last}" for part in rule.parts)

    def _cut(self, name: str, stored: Stored, parts: list[Slot]) -> Iterable[Stored]:
        pattern = _NUMBER.sub("*", name)
        rule = self._stacked.get(pattern) or self._scales.get(pattern)
        if rule is not None and rule.interleaved:
            return _regroup(stored, [1] * len(parts))
        adapted = _ADAPTER.fullmatch(name)
        stem = _NUMBER.sub("*", name.rpartition(".")[0] if adapted is None else adapted[1])
        shared = adapted is not None and _is_whole(parts)
        if stem in self._by_head and not shared:
            groups = parts[-1].shape[0] // (parts[-1].head_rows or 1)
            return _regroup(stored, [part.shape[0] // groups for part in parts])
        groups = self._groups.get(stem, 1)
        if groups > 1 and not shared:
            return _regroup(stored, [part.shape[0] // groups for part in parts])
        return _cut(stored, parts)

    def has_inputs_first(self, name: str) -> bool:
        """Whether a matrix is stored inputs first, as GPT-2 does."""
        return _NUMBER.sub("*", name.rpartition(".")[0]) in self._turned

    def targets_of(self, name: str) -> tuple[str, ...] | None:
        """The slots that a tensor fills; None if no rule knows it. Tensors of adapters fill slots below those of the weights
        that they are added to."""
        adapted = _ADAPTER.fullmatch(name)
        if adapted is not None:
            targets = self.targets_of(f"{adapted[1]}.weight")
            last = f"lora_{adapted[2].lower()}.{adapted[3]}.weight"
            return None if targets is None else tuple(target.removesuffix("weight") + last for target in targets)
        whole = self._exact.get(_NUMBER.sub("*", name))
        if whole is not None:
            return (_fill(whole, _NUMBER.findall(name)),)
        stem, _, last = name.rpartition(".")
        numbers = _NUMBER.findall(stem)
        targets = self._targets.get(_NUMBER.sub("*", stem))
        if targets is None:
            return None
        return tuple(f"{_fill(target, numbers)}.{last}" for target in targets)

    def source_of(self, slot: str) -> str:
        """The name of the tensor that fills a slot; the slot's own if no rule leads there."""
        adapted = re.fullmatch(r"(.+\.)lora_([ab])\.([^.]+)\.weight", slot)
        if adapted is not None:
            stored = self.source_of(f"{adapted[1]}weight").removesuffix("weight").removesuffix("base_layer.")
            return f"{stored}lora_{adapted[2].upper()}.{adapted[3]}.weight"
        for rule in self._stacked.values():
            made = {f"{rule.target}.*.{part}.{rule.last}" for part in rule.parts}
            if _NUMBER.sub("*", slot) in made:
                return _fill(rule.source, _NUMBER.findall(slot))
        for whole, target in self._exact.items():
            if target == _NUMBER.sub("*", slot):
                return _fill(whole, _NUMBER.findall(slot))
        stem, _, last = slot.rpartition(".")
        source = self._sources.get(_NUMBER.sub("*", stem))
        return slot if source is None else f"{_fill(source, _NUMBER.findall(stem))}.{last}"


def renamed(rule: Rule, name: Callable[[str], str]) -> Rule:
    """The rule for tensors that are called otherwise."""
    if isinstance(rule, Fuse):
        return Fuse(rule.target, **{part: name(source) for part, source in rule.parts.items()})
    return replace(rule, source=name(rule.source))


def retargeted(rule: Rule, name: Callable[[str], str]) -> Rule:
    """The rule for layers that are called otherwise."""
    match rule:
        case Ignore() | Beyond() | Outside():
            return rule
        case Fuse():
            return Fuse(name(rule.target), **rule.parts)
        case _:
            return replace(rule, target=name(rule.target))


def _fill(pattern: str, numbers: list[str]) -> str:
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern


def _is_whole(parts: list[Slot]) -> bool:
    """Whether every slot gets the whole tensor."""
    return len(parts) == 1 or parts[0].outputs is None


def _whole_shape(parts: list[Slot]) -> tuple[int, ...]:
    """Of the tensor that fills the slots, one after the other along their outputs."""
    first = parts[0]
    along = first.outputs
    if _is_whole(parts) or along is None:
        return first.shape
    return (*first.shape[:along], sum(part.shape[along] for part in parts), *first.shape[along + 1 :])


def _rows_of_an_expert(rule: Stacked, slot: Slot | None) -> int:
    """How many rows of a stack are one expert's."""
    if not rule.flat or slot is None:
        return 1
    return slot.shape[1] if rule.inputs_first else slot.shape[0]


def _item(stored: Stored, index: int, rows: int | None, *, turned: bool) -> Stored:
    """An expert of a stack; `rows`: of its own, where they lie below the ones before."""
    from bough.weights.stored import Item, RowRange

    item: Stored = Item(stored, index) if rows is None else RowRange(stored, index * rows, (index + 1) * rows)
    return _turn(item) if turned and len(item.shape) == 2 else item


def _flat(stored: Stored) -> Stored:
    from bough.weights.stored import Flat

    return Flat(stored)


def _dequantised(blocks: Stored, scales: Stored) -> Stored:
    from bough.weights.stored import Mxfp4

    return Mxfp4(blocks, scales)


def _turn(stored: Stored) -> Stored:
    from bough.weights.stored import Turned

    return Turned(stored)


def _regroup(stored: Stored, counts: list[int]) -> list[Stored]:
    """The parts of rows that come in groups, `counts` of each part in turn."""
    from bough.weights.stored import GroupedRows

    firsts = [sum(counts[:at]) for at in range(len(counts))]
    return [GroupedRows(stored, sum(counts), first, count) for first, count in zip(firsts, counts, strict=True)]


def _cut(stored: Stored, parts: list[Slot]) -> Iterable[Stored]:
    from bough.weights.stored import ColumnRange, RowRange

    if _is_whole(parts):
        return [stored] * len(parts)
    view: type[RowRange] | type[ColumnRange] = RowRange if parts[0].outputs == 0 else ColumnRange
    cuts, start = [], 0
    for part in parts:
        stop = start + part.shape[part.outputs or 0]
        cuts.append(view(stored, start, stop))
        start = stop
    return cuts
