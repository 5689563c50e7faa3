"""The table of kernels' cases: what it leaves out on a GPU, it leaves out by a rule."""

from itertools import combinations, product

import pytest
from triton_cases.bed import each_member, pairwise

AXES = [((1, 2, 3), "abcde", "xyzuvw"), ((1, 2), "ab", "xy", (0, 1)), ((1,), "abc"), ("abcd",) * 2]


@pytest.mark.parametrize("axes", AXES, ids=lambda axes: "x".join(str(len(axis)) for axis in axes))
def test_every_two_members_occur_together(axes: tuple[tuple[object, ...], ...]) -> None:
    chosen = pairwise(*axes)
    for (i, first), (j, second) in combinations(enumerate(axes), 2):
        assert {(each[i], each[j]) for each in chosen} == set(product(first, second))
    assert len(chosen) == len(set(chosen)) <= len(list(product(*axes)))
    assert len(axes) < 3 or len(chosen) < len(list(product(*axes)))


@pytest.mark.parametrize("axes", AXES, ids=lambda axes: "x".join(str(len(axis)) for axis in axes))
def test_every_member_occurs(axes: tuple[tuple[object, ...], ...]) -> None:
    assert [set(column) for column in zip(*each_member(*axes), strict=True)] == [set(axis) for axis in axes]
