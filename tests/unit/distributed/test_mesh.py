"""Axes and the ranks on them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from calls import check

from bough.config.layout import AXES, Layout
from bough.core.errors import ConfigError
from bough.distributed.collectives import RankLost
from bough.distributed.mesh import LONE, SINGLE, Mesh
from bough.distributed.threads import run_ranks


def test_ranks_are_numbered_by_stage_replica_context_and_head() -> None:
    layout = Layout(pp=2, tp=8, dp=2, cp=2, ep=4)
    assert (layout.size, layout.heads, layout.units) == (16, 2, 2)
    assert layout.place(13) == {
        "world": 13, "pp": 1, "tp": 5, "dp": 1, "cp": 0, "heads": 1, "tokens": 2, "replica": 1, "ep": 2, "units": 1
    }  # fmt: skip
    assert layout.groups("pp")[5] == [5, 13]
    assert layout.groups("tp") == [list(range(8)), list(range(8, 16))]
    assert layout.groups("heads")[:2] == [[0, 1], [2, 3]]
    assert layout.groups("cp")[:2] == [[0, 2], [1, 3]]
    assert layout.groups("dp")[:2] == [[0, 4], [1, 5]]
    assert layout.groups("ep")[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize("sizes", [
    dict(zip(("pp", "dp", "cp", "ep"), each, strict=True)) for each in itertools.product((1, 2), (1, 2), (1, 2), (1, 2, 4))
])  # fmt: skip
def test_the_groups_of_an_axis_are_all_ranks_once(sizes: dict[str, int]) -> None:
    layout = Layout(tp=8, **sizes)
    for axis in AXES:
        groups = layout.groups(axis)
        assert sorted(itertools.chain(*groups)) == list(range(layout.size))
        assert len({len(group) for group in groups}) == 1
        for group in groups:
            assert [layout.place(rank)[axis] for rank in group] == list(range(len(group)))


@pytest.mark.parametrize("sizes", [{"tp": 4, "dp": 3}, {"tp": 4, "dp": 2, "cp": 4}, {"tp": 4, "ep": 8}])
def test_axes_that_do_not_fit_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="can't be cut"):
        Layout(**sizes)


def test_a_lone_rank_has_no_group_anywhere() -> None:
    assert all(getattr(SINGLE, name) is LONE for name in AXES)
    assert check(LONE) > 40
    SINGLE.close()


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=4), Layout(pp=2, tp=4, dp=2, ep=4), Layout(pp=3, tp=1)])
def test_threads_talk_along_every_axis(layout: Layout) -> None:
    def on_every_axis(mesh: Mesh) -> dict[str, tuple[int, int]]:
        for name in AXES:
            check(getattr(mesh, name))
        mesh.close()
        return {name: (getattr(mesh, name).rank, getattr(mesh, name).size) for name in AXES}

    for rank, seen in enumerate(run_ranks(layout, on_every_axis)):
        place = layout.place(rank)
        assert seen == {name: (place[name], len(layout.groups(name)[0])) for name in AXES}


def test_axes_of_the_same_ranks_share_a_channel() -> None:
    (mesh, _) = run_ranks(Layout(tp=2, ep=2), lambda mesh: mesh)
    assert mesh.tp.talk is mesh.world.talk is mesh.ep.talk
    assert mesh.units is LONE


def test_a_rank_that_fails_ends_the_others() -> None:
    def main(mesh: Mesh) -> None:
        if mesh.tp.rank == 1:
            raise ValueError("broken")
        mesh.tp.talk.barrier()

    with pytest.raises(ValueError, match="broken"):
        run_ranks(Layout(tp=3), main)


def test_a_rank_that_does_not_come_is_named() -> None:
    def main(mesh: Mesh) -> None:
        if mesh.tp.rank != 1:
            mesh.tp.talk.barrier()

    with pytest.raises(RankLost, match=r"ranks \[1\] did not come to barrier"):
        run_ranks(Layout(tp=3), main, timeout_s=0.1)


def test_ranks_that_make_different_calls_are_found_out() -> None:
    def main(mesh: Mesh) -> None:
        import torch

        call = mesh.tp.talk.all_reduce if mesh.tp.rank else mesh.tp.talk.all_gather
        call(torch.zeros(2))

    with pytest.raises(RankLost, match="all_gather, all_reduce"):
        run_ranks(Layout(tp=2), main)
