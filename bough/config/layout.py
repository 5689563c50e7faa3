"""How the ranks of one engine are laid out along the axes of parallelism.

Ranks are numbered by stage, and within a stage by their place on the axis `tp`. That axis is cut twice: into
`dp` x `cp` x `heads` for attention, and into `ep` x `units` for experts; the last factor counts fastest. Two more axes join
some of these: `tokens` is `dp` x `cp`, ranks that may hold different tokens; `replica` is `cp` x `heads`, ranks that compute
the same requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Final, Literal, get_args

from bough.config.concerns import ParallelConfig
from bough.core.errors import ConfigError

AxisName = Literal["world", "pp", "tp", "dp", "cp", "heads", "tokens", "replica", "ep", "units"]
AXES: Final[tuple[AxisName, ...]] = get_args(AxisName)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many ranks each axis has. Raises ConfigError if the axes don't fit into one another."""

    pp: int = 1
    tp: int = 1
    dp: int = 1
    """Replicas of attention within `tp`: each computes different requests."""
    cp: int = 1
    """Ranks that share the context of long prompts, within a replica of attention."""
    ep: int = 1
    """Groups of ranks that hold different experts, within `tp`."""
    redundant: int = 0
    """Slots for experts beyond one per expert, in each layer."""
    whole_shared: bool = False
    """Every rank has all shared experts, and computes them for its own part of the tokens."""
    stage_sizes: tuple[int, ...] = ()
    """Layers of each stage; empty: evenly."""

    def __post_init__(self) -> None:
        if self.stage_sizes and (len(self.stage_sizes) != self.pp or min(self.stage_sizes) < 1):
            raise ConfigError(
                what=f"--pp-layer-partition has {len(self.stage_sizes)} stages of {min(self.stage_sizes)} layers or more",
                why=f"there are {self.pp} stages, each of one layer at least",
                fix="give a number of layers for each stage of --pp-size",
                param="pp_layer_partition",
            )
        for names, parts in (("--attn-dp-size x --attn-cp-size", self.dp * self.cp), ("--ep-size", self.ep)):
            if self.tp % parts:
                raise ConfigError(
                    what=f"--tp-size {self.tp} can't be cut into {parts} parts",
                    why=f"{names} must divide --tp-size",
                    fix="choose sizes that do",
                )

    @classmethod
    def of(cls, config: ParallelConfig) -> Layout:
        return cls(
            pp=config.pp_size,
            tp=config.tp_size,
            dp=config.attn_dp_size,
            cp=config.attn_cp_size,
            ep=config.ep_size,
            redundant=config.ep_num_redundant_experts,
            whole_shared=config.moe_a2a_backend != "none",
            stage_sizes=_stage_sizes(config.pp_layer_partition),
        )

    @property
    def size(self) -> int:
        """Ranks of one engine."""
        return self.pp * self.tp

    @property
    def heads(self) -> int:
        """Ranks that split the heads of one attention replica."""
        return self.tp // (self.dp * self.cp)

    @property
    def units(self) -> int:
        """Ranks that split each expert."""
        return self.tp // self.ep

    def place(self, rank: int) -> dict[AxisName, int]:
        """The position of a rank on each axis."""
        stage, in_stage = divmod(rank, self.tp)
        replica, in_replica = divmod(in_stage, self.cp * self.heads)
        context, head = divmod(in_replica, self.heads)
        expert, unit = divmod(in_stage, self.units)
        return {
            "world": rank, "pp": stage, "tp": in_stage, "dp": replica, "cp": context, "heads": head,
            "tokens": replica * self.cp + context, "replica": in_replica, "ep": expert, "units": unit,
        }  # fmt: skip

    def groups(self, axis: AxisName) -> list[list[int]]:
        """The sets of ranks along the axis, each in order. Together they contain all ranks."""
        within: dict[AxisName, tuple[AxisName, ...]] = {
            "world": (), "pp": ("tp",), "tp": ("pp",), "dp": ("pp", "cp", "heads"), "cp": ("pp", "dp", "heads"),
            "heads": ("pp", "dp", "cp"), "tokens": ("pp", "heads"), "replica": ("pp", "dp"), "ep": ("pp", "units"),
            "units": ("pp", "ep"),
        }  # fmt: skip

        def line(rank: int) -> tuple[int, ...]:
            place = self.place(rank)
            return tuple(place[other] for other in within[axis])

        return [list(group) for _, group in groupby(sorted(range(self.size), key=line), key=line)]


def _stage_sizes(given: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in given.split(",")) if given else ()
    except ValueError as error:
        raise ConfigError(
            what=f"--pp-layer-partition {given} is no list of numbers",
            why=str(error),
            fix="separate the layers of each stage by commas, as in 14,16,16,14",
            param="pp_layer_partition",
        ) from None
