"""Parts of a model: together they are the whole, and no rank has much more than another."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from bough.config.layout import Layout
from bough.config.server_args import build_config
from bough.config.shares import cut, head_share, stage_layers, width
from bough.core.errors import ConfigError


@given(st.integers(1, 5000), st.integers(1, 16))
def test_parts_are_the_whole(total: int, size: int) -> None:
    if total < size:
        with pytest.raises(ConfigError):
            cut(total, size, 0, "units")
        return
    parts = [cut(total, size, rank, "units") for rank in range(size)]
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == total
    widths = [width(part) for part in parts]
    assert min(widths) >= 1
    if total % size == 0:
        assert set(widths) == {total // size}
    assert max(widths) - min(widths) <= max(1, total / size / 4 + 1)


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 32))
def test_every_query_head_is_somewhere_once_beside_its_keys(num_kv_heads: int, group: int, size: int) -> None:
    num_heads = num_kv_heads * group
    try:
        shares = [head_share(num_heads, num_kv_heads, size, rank) for rank in range(size)]
    except ConfigError:
        assert size > num_kv_heads
        assert -(-size // num_kv_heads) > group
        return
    held = [head for share in shares for head in range(share.heads.start, share.heads.stop)]
    assert held == list(range(num_heads))
    for share in shares:
        assert width(share.heads) >= 1
        assert width(share.heads) % width(share.kv_heads) == 0, "kernels want as many queries for each key"
        per_key = width(share.heads) // width(share.kv_heads)
        for at, head in enumerate(range(share.heads.start, share.heads.stop)):
            assert head // group == share.kv_heads.start + at // per_key


def test_models_that_do_not_divide() -> None:
    assert [width(head_share(14, 2, 4, rank).heads) for rank in range(4)] == [3, 4, 3, 4]  # Qwen2.5-0.5B
    assert [width(head_share(25, 5, 2, rank).heads) for rank in range(2)] == [10, 15]  # Hymba's shape
    assert [head_share(32, 8, 4, rank).kv_heads for rank in range(4)] == [slice(2 * r, 2 * r + 2) for r in range(4)]
    assert [head_share(32, 2, 4, rank) for rank in range(2)] == [
        (slice(0, 8), slice(0, 1), 2), (slice(8, 16), slice(0, 1), 2)
    ]  # fmt: skip


def test_stages_as_they_are_given() -> None:
    layout = Layout.of(build_config(pp_size=3, pp_layer_partition="3,5,2").parallel)
    stages = [stage_layers(10, 3, stage, layout.stage_sizes) for stage in range(3)]
    assert stages == [range(3), range(3, 8), range(8, 10)]
    with pytest.raises(ConfigError, match="10 layers in all"):
        stage_layers(12, 3, 0, layout.stage_sizes)


@pytest.mark.parametrize(("given", "stages"), [("3,5", 3), ("3,0,2", 3), ("3,x", 2), ("3", 1)])
def test_stages_that_can_not_be(given: str, stages: int) -> None:
    with pytest.raises(ConfigError):
        Layout.of(build_config(pp_size=stages, pp_layer_partition=given).parallel)
