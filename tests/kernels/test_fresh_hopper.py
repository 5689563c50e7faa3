"""The door of Hopper's attention over fresh rows, without a device: how rows are cut, and what is refused."""

import re

import pytest
import torch
from hypothesis import given, strategies as st

from bough.kernels.attention import fresh_hopper
from bough.kernels.attention.fresh_hopper import Tiling, attend, cut

CPU = torch.device("cpu")
SHARED_BYTES_OF_A_BLOCK = 227 * 1024


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 900)), min_size=1, max_size=8))
def test_every_token_is_in_one_tile_and_the_longest_come_first(gaps_and_lengths: list[tuple[int, int]]) -> None:
    rows, at = [], 0
    for gap, length in gaps_and_lengths:
        rows.append((at + gap, length))
        at += gap + length
    tiles = cut(rows, CPU)
    seen: list[int] = []
    work = []
    for first, length, number, _ in tiles.at_X4.tolist():
        assert (first, length) in rows
        begin = number * fresh_hopper.TILE
        assert begin < length
        seen += range(first + begin, first + min(length, begin + fresh_hopper.TILE))
        work.append(number)
    assert sorted(seen) == [first + i for first, length in rows for i in range(length)]
    assert work == sorted(work, reverse=True)
    assert tiles.tokens == at


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("pair", [False, True])
def test_a_block_fits_a_multiprocessor(head_dim: int, pair: bool) -> None:
    assert Tiling(pair=pair).shared_bytes(head_dim) <= SHARED_BYTES_OF_A_BLOCK


def test_every_macro_of_the_source_is_given() -> None:
    source = fresh_hopper.SOURCE.read_text()
    for name in Tiling().defines(torch.bfloat16, 128):
        assert re.search(rf"\b{name}\b", source)
    assert f"N = {fresh_hopper.KV_BLOCK}," in source


def test_what_does_not_fit_is_refused() -> None:
    q, kv, out = torch.zeros(8, 4, 64), torch.zeros(8, 2, 64), torch.zeros(8, 4, 64)
    with pytest.raises(ValueError, match="rows up to token 9"):
        attend(q, kv, kv, cut([(0, 9)], CPU), 1.0, out)
    with pytest.raises(ValueError, match="strides"):
        attend(q, kv, kv, cut([(0, 8)], CPU), 1.0, torch.zeros(8, 64, 4).transpose(1, 2))
    with pytest.raises(ValueError, match="float32"):
        attend(q, kv, kv, cut([(0, 8)], CPU), 1.0, out, lse_TN=torch.zeros(8, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match="3 at a time"):
        attend(q, kv, kv, cut([(0, 8)], CPU), 1.0, out, section=3)
