"""The door of the grouped Hopper kernel, without a device: how products are cut, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from bough.kernels import cuda_source
from bough.kernels.moe import grouped_hopper, reference, triton as portable
from bough.kernels.moe.grouped_hopper import HIGH, LOW, MIDDLE, GroupedTilings, Weights, can_serve, cut_for

SHARED_BYTES_OF_A_BLOCK = 227 * 1024


def test_tiles_of_a_kind_are_equally_high() -> None:
    assert {tiling.tokens for tiling in HIGH} == {256}
    assert {tiling.tokens for tiling in MIDDLE} == {128}
    assert {tiling.tokens for tiling in LOW} == {64}


@pytest.mark.parametrize("tiling", [*HIGH, *MIDDLE, *LOW], ids=str)
def test_a_block_fits_a_multiprocessor(tiling: object) -> None:
    assert isinstance(tiling, grouped_hopper.Tiling)
    assert tiling.shared_bytes() <= SHARED_BYTES_OF_A_BLOCK
    assert not tiling.pair_along_tokens, "a pair shares the rows: an expert may have rows for one tile only"
    assert tiling.lag < tiling.stages <= grouped_hopper.LEAST_STEPS


@given(st.integers(1, 200_000), st.sampled_from([(768, 2048), (1536, 4096), (14336, 4096), (1408, 2048)]))
def test_cuts_waste_few_columns(pairs: int, sizes: tuple[int, int]) -> None:
    inner, width = sizes
    cut = cut_for(pairs, 128, inner, width)
    assert cut.gate_up.tokens == cut.down.tokens == cut.height
    for columns, of_pair in ((inner, 2 * cut.gate_up.features), (width, 4 * cut.down.features)):
        assert columns / (-(-columns // of_pair) * of_pair) > 0.85


def test_more_pairs_have_higher_tiles() -> None:
    heights = [cut_for(pairs, 128, 768, 2048).height for pairs in (4000, 20_000, 130_000, 300_000)]
    assert heights == [128, 128, 128, 256]
    heights = [cut_for(pairs, 128, 768, 2048, fp8=True).height for pairs in (4000, 20_000, 130_000, 300_000)]
    assert heights == [64, 64, 128, 256]


def test_what_is_chosen_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is loaded later might be so in the middle of a graph's capture."""
    for fp8 in (False, True):
        loaded: list[GroupedTilings] = []
        monkeypatch.setattr(grouped_hopper, "load_cuts", lambda cuts, device, *, fp8, to=loaded: to.extend(cuts))
        monkeypatch.setattr(grouped_hopper, "runs_on", lambda device, load, otherwise: load() is None)
        assert grouped_hopper.is_ready.__wrapped__(torch.device("cpu"), 1536, 4096, fp8)
        assert {cut_for(pairs, 8, 1536, 4096, fp8=fp8) for pairs in range(1, 40_000, 7)} <= set(loaded)


def test_many_tokens_are_served_where_it_suits(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[int] = []

    def experts(x: Tensor, weights: Weights, shares: Tensor, ids: Tensor, out: Tensor) -> None:
        served.append(len(x))
        out.copy_(reference.fused_experts(x, weights.gate_up_E2FD, weights.down_EDF, shares, ids))

    monkeypatch.setattr(grouped_hopper, "is_ready", lambda *_: True)
    monkeypatch.setattr(grouped_hopper, "experts", experts)
    monkeypatch.setattr(portable, "portable_experts", lambda x, *_: torch.zeros_like(x))
    stacks = [torch.randn(*shape).bfloat16() * 0.05 for shape in ((4, 640, 320), (4, 320, 320))]
    for tokens in (20, 200):
        x, ids = torch.randn(tokens, 320).bfloat16(), torch.rand(tokens, 4).topk(2).indices.to(torch.int32)
        shares = torch.rand(tokens, 2)
        got = portable.fused_experts(x, *stacks, shares, ids)
        wanted = reference.fused_experts(x, *stacks, shares, ids) if tokens == 200 else torch.zeros_like(x)
        assert torch.equal(got, wanted)
    assert served == [200]


@pytest.mark.parametrize(
    ("tokens", "experts", "rows"), [(1, 66, 1408), (2, 128, 768), (4, 66, 1408), (16, 8, 512), (1, 8, 256)]
)
def test_few_pairs_have_tiles_for_all_multiprocessors(tokens: int, experts: int, rows: int) -> None:
    """The widest that do, and the narrowest where none does."""
    pairs = tokens * min(8, experts)
    wide = portable.shape_for(pairs, experts, rows).block_n
    tiles = {width: pairs * rows // width for width in (16, 32, 64)}
    assert wide == max((width for width, count in tiles.items() if count >= 128), default=16)


def test_tiles_hold_an_experts_tokens() -> None:
    """But for a tenth of the experts, if tokens are routed at random, up to where the grouped kernel takes over."""
    draw = torch.Generator().manual_seed(0)
    for per_expert in range(2, grouped_hopper.LEAST_PAIRS, 3):
        tokens = torch.poisson(torch.full((4096,), float(per_expert)), generator=draw)
        height = portable.shape_for(per_expert * 128, 128, 768).block_t
        assert (tokens > height).float().mean() < 0.15
        assert height <= 16 or per_expert > height / 4


def test_few_pairs_of_an_expert_are_left_to_the_portable_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In e4m3 the grouped kernel takes over earlier."""
    monkeypatch.setattr(grouped_hopper, "is_ready", lambda *_: True)
    stacks = torch.empty(4, 1536, 2048, dtype=torch.bfloat16), torch.empty(4, 2048, 768, dtype=torch.bfloat16)
    gate_up, down = (each.to(torch.float8_e4m3fn) for each in stacks)
    small = Weights(gate_up, down, torch.ones(4, 1536), torch.ones(4, 2048))
    for weights, least in ((Weights(*stacks), grouped_hopper.LEAST_PAIRS), (small, grouped_hopper.LEAST_PAIRS_FP8)):
        for tokens, is_served in ((2 * least, True), (2 * least - 1, False)):
            x, ids = torch.empty(tokens, 2048, dtype=torch.bfloat16), torch.zeros(tokens, 2, dtype=torch.int32)
            assert grouped_hopper.suits(x, weights, ids, "silu") == is_served


def test_every_macro_of_the_source_is_given() -> None:
    source = grouped_hopper.SOURCE.read_text() + "".join(path.read_text() for path in cuda_source._COMMON)
    for name in grouped_hopper._defines(HIGH[0], gated=True, fp8=False):
        assert name in source, name


def test_what_can_be_served() -> None:
    good = torch.empty(4, 1536, 2048, dtype=torch.bfloat16), torch.empty(4, 2048, 768, dtype=torch.bfloat16)
    assert can_serve(Weights(*good))
    assert not can_serve(Weights(good[0].float(), good[1].float()))
    assert not can_serve(Weights(good[0].transpose(1, 2), good[1]))
    shallow = torch.empty(4, 512, 2048, dtype=torch.bfloat16), torch.empty(4, 2048, 256, dtype=torch.bfloat16)
    assert not can_serve(Weights(*shallow)), "the ring would be longer than the depth"
    small = [each.to(torch.float8_e4m3fn) for each in good]
    assert not can_serve(Weights(*small))
    scales = torch.ones(4, 1536), torch.ones(4, 2048)
    assert can_serve(Weights(small[0], small[1], *scales))
    half = [each[..., : each.shape[-1] // 2].contiguous() for each in small]
    assert not can_serve(Weights(half[0], half[1], *scales))
    x, ids = torch.empty(1000, 2048, dtype=torch.bfloat16), torch.zeros(1000, 8, dtype=torch.int32)
    assert not grouped_hopper.suits(x, Weights(*good), ids, "silu"), "not on this device"
