"""How experts are spread over ranks: which slots there are, and which expert each of them holds at the start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bough.config.concerns import CopyChoice, MoeDispatch, ParallelConfig
from bough.core.errors import ConfigError

TRIVIAL: Final = "trivial"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """Placement of the experts of every mixture layer of a model. Slots are numbered over all ranks; each holds one
    expert."""

    dispatch: MoeDispatch = "none"
    copies: CopyChoice = "dynamic"
    redundant: int = 0
    """Slots beyond one per expert."""
    moves: bool = False
    """Whether experts may be moved between slots later on."""
    records: bool = False
    """Whether the tokens of each expert are counted."""
    slots: tuple[tuple[int, ...], ...] | None = None
    """Expert of each slot, by mixture layer; None: slot i holds expert i, and further slots begin again at 0."""

    @classmethod
    def of(cls, parallel: ParallelConfig) -> ExpertPlan:
        """Raises `ConfigError` for a location that can't be read. One that counts tokens is not resolved yet: its slots
        are made from them (`bough.distributed.balance`) once the number of experts is known."""
        return cls(
            dispatch=parallel.moe_a2a_backend,
            copies=parallel.ep_dispatch_algorithm,
            redundant=parallel.ep_num_redundant_experts,
            moves=parallel.eplb,
            records=parallel.eplb or parallel.expert_distribution_recorder_mode != "none",
        )

    def slots_of(self, layer: int, num_experts: int) -> list[int]:
        """The expert of each slot at the start; `layer`: its number among the mixture layers of the model."""
        num_slots = num_experts + self.redundant
        if self.slots is None:
            return [slot % num_experts for slot in range(num_slots)]
        if layer >= len(self.slots) or len(self.slots[layer]) != num_slots:
            found = f"{len(self.slots)} layers of {len(self.slots[0]) if self.slots else 0} slots"
            raise _bad_location(
                f"it has {found}", f"layer {layer} of the mixtures has {num_experts} experts and {num_slots} slots"
            )
        slots = list(self.slots[layer])
        if sorted(set(slots)) != list(range(num_experts)):
            raise _bad_location(
                f"layer {layer} holds {len(set(slots))} different experts", f"each of {num_experts} needs a slot"
            )
        return slots


PLAIN_EXPERTS: Final = ExpertPlan()
"""Expert i is in slot i."""


@dataclass(frozen=True, slots=True)
class Location:
    """The content of `--init-expert-location`: per mixture layer, the expert of each slot, or the tokens per expert."""

    slots: tuple[tuple[int, ...], ...] | None = None
    counts: tuple[tuple[float, ...], ...] | None = None


def read_location(given: str) -> Location | None:
    """Reads a JSON file, or a JSON object itself: `physical_to_logical_map` (the expert of each slot, by layer) or
    `logical_count` (tokens by expert, by layer; of several passes they are summed). None: trivial. Raises `ConfigError`."""
    if given in ("", TRIVIAL):
        return None
    try:
        text = given if given.lstrip().startswith("{") else Path(given).expanduser().read_text()
        data = json.loads(text)
    except (OSError, ValueError) as error:
        why = "a .pt file is a pickle, which is not read" if given.endswith((".pt", ".pth")) else str(error)
        raise _bad_location(f"{given[:80]} can't be read", why) from error
    if not isinstance(data, dict) or not ({"physical_to_logical_map", "logical_count"} & set(data)):
        raise _bad_location(
            f"{given[:80]} has neither physical_to_logical_map nor logical_count", "it needs one of them"
        )
    if "physical_to_logical_map" in data:
        slots = _table(data["physical_to_logical_map"], "physical_to_logical_map")
        return Location(slots=tuple(tuple(int(expert) for expert in layer) for layer in slots))
    counts = data["logical_count"]
    passes = counts if _depth(counts) == 3 else [counts]
    tables = [_table(each, "logical_count") for each in passes]
    summed = tuple(
        tuple(float(sum(values)) for values in zip(*layers, strict=True)) for layers in zip(*tables, strict=True)
    )
    return Location(counts=summed)


def _depth(value: Any) -> int:
    depth = 0
    while isinstance(value, list):
        depth += 1
        value = value[0] if value else None
    return depth


def _table(value: Any, name: str) -> Sequence[Sequence[float]]:
    """Returns the rows, after checking that they have equal lengths and no negative numbers."""
    good = (
        isinstance(value, list)
        and value
        and all(isinstance(row, list) and row and len(row) == len(value[0]) for row in value)
        and all(type(each) in (int, float) and each >= 0 for row in value for each in row)
    )
    if not good:
        raise _bad_location(f"{name} is no table", "it must be a list of layers, each a list of numbers")
    return value  # type: ignore[no-any-return]


def _bad_location(what: str, why: str) -> ConfigError:
    return ConfigError(
        what=f"init_expert_location: {what}",
        why=why,
        fix="for example --init-expert-location '{\"physical_to_logical_map\": [[0, 1, 2, 3]]}', or trivial",
        param="init_expert_location",
    )
