"""The order in which ranks get GPUs."""

from __future__ import annotations

import pytest

from bough.platform.topology import order_devices

NVLINK, SWITCH, NODE, FAR = 0, 10, 40, 50


def machine(count: int, near: list[tuple[int, int]], distance: int, otherwise: int) -> list[list[int]]:
    pairs = {frozenset(pair) for pair in near}
    return [
        [0 if a == b else distance if frozenset((a, b)) in pairs else otherwise for b in range(count)]
        for a in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_where_all_are_alike_numbers_stay(count: int) -> None:
    assert order_devices(machine(count, [], NVLINK, NVLINK)).devices == tuple(range(count))


def test_bridges_join_pairs() -> None:
    found = order_devices(machine(4, [(0, 2), (1, 3)], NVLINK, FAR))
    assert found.devices == (0, 2, 1, 3)
    assert found.because == "GPUs 0 and 2 are joined by NVLink"


def test_switches_of_two_nodes() -> None:
    inner = [(a, b) for group in ((0, 3, 4, 7), (1, 2, 5, 6)) for a in group for b in group if a < b]
    found = order_devices(machine(8, inner, SWITCH, FAR))
    assert found.devices == (0, 3, 4, 7, 1, 2, 5, 6)
    assert "one PCIe switch" in found.because


def test_nodes_in_order_stay() -> None:
    inner = [(a, b) for group in (range(4), range(4, 8)) for a in group for b in group if a < b]
    assert order_devices(machine(8, inner, NODE, FAR)).devices == tuple(range(8))
