"""The mesh: one rank's place among those that share a model. It is an argument, never ambient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bough.config.layout import AXES, AxisName, Layout
from bough.config.shares import HeadShare, cut, head_share
from bough.distributed.collectives import ALONE, Collectives


@dataclass(frozen=True, slots=True)
class Axis:
    """Ranks that split the same tensors, or exchange what they have computed."""

    rank: int = 0
    size: int = 1
    talk: Collectives = ALONE

    def slice(self, total: int, what: str, flag: str = "--tp-size") -> slice:
        """This rank's part of `range(total)`; see `config.shares.cut`."""
        return cut(total, self.size, self.rank, what, flag)

    def head_share(self, num_heads: int, num_kv_heads: int) -> HeadShare:
        """This rank's heads of an attention layer; see `config.shares.head_share`."""
        return head_share(num_heads, num_kv_heads, self.size, self.rank)


LONE: Final = Axis()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """One rank's place among those that share a model. See `Layout` for the axes."""

    world: Axis = LONE
    pp: Axis = LONE
    tp: Axis = LONE
    dp: Axis = LONE
    cp: Axis = LONE
    heads: Axis = LONE
    tokens: Axis = LONE
    replica: Axis = LONE
    ep: Axis = LONE
    units: Axis = LONE
    stage_sizes: tuple[int, ...] = ()
    """As in `Layout`."""

    @staticmethod
    def tensor(rank: int, size: int, talk: Collectives = ALONE) -> Mesh:
        """The mesh of a rank where tensor parallelism is all there is."""
        axis = Axis(rank, size, talk)
        return Mesh(world=axis, tp=axis, heads=axis, replica=axis, units=axis)

    def close(self) -> None:
        """Ends all communication; the last call a rank makes."""
        channels: list[Collectives] = []
        for name in AXES:
            talk: Collectives = getattr(self, name).talk
            if all(talk is not other for other in channels):
                channels.append(talk)
        for talk in reversed(channels):  # that of all ranks is the first, and others may live on it
            talk.close()


SINGLE: Final = Mesh()
"""The mesh of one rank."""


def make_mesh(layout: Layout, rank: int, connect: Callable[[AxisName, list[int], int], Collectives]) -> Mesh:
    """The mesh of a rank. `connect(axis, ranks, place)` opens the channel between `ranks`, of which this is number `place`;
    axes that consist of the same ranks share one. All ranks connect the axes in the same order."""
    place = layout.place(rank)
    opened: dict[tuple[int, ...], Collectives] = {}
    axes: dict[str, Axis] = {}
    for name in AXES:
        ranks = next(group for group in layout.groups(name) if rank in group)
        if len(ranks) > 1:
            if tuple(ranks) not in opened:
                opened[tuple(ranks)] = connect(name, ranks, place[name])
            axes[name] = Axis(place[name], len(ranks), opened[tuple(ranks)])
    return Mesh(**axes, stage_sizes=layout.stage_sizes)
