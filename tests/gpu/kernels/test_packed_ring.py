"""Weights in codes through Hopper's kernels: every cut, any tokens, scales and zero points, the same bits each time."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from bough.config.model_facts import ClampedGate
from bough.kernels.linear.ring import is_ready
from bough.kernels.moe import Biases
from bough.kernels.moe.grouping import round_rows
from bough.kernels.packed_linear import PackedWeight, hopper, rounded, terms, triton as packed
from bough.kernels.packed_linear.codes import Codes, Inputs
from bough.kernels.packed_linear.groups import rounded_tokens
from bough.kernels.packed_moe import PackedExperts, hopper as few_hopper, tiles_hopper, triton as experts

FORMS = ["float8 rows", "float8 blocks", "int4 groups", "int4 zeros", "int4 rows", "int4 two levels"]


@pytest.fixture(autouse=True)
def _is_used(hopper: None) -> None:
    assert is_ready(torch.device("cuda", torch.cuda.current_device()))


def codes_of(form: str, rows: int, depth: int) -> Codes:
    def scales(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.rand(shape, device="cuda") * 0.01 + 0.001).to(dtype)

    if form.startswith("float8"):
        values = (torch.randn(rows, depth, device="cuda") * 30).to(torch.float8_e4m3fn)
        if form == "float8 rows":
            return Codes("float8", values, scales(rows, 1), depth)
        return Codes("float8", values, scales(-(-rows // 128), depth // 128), 128, rows=128)
    values = torch.randint(0, 16, (rows, depth), dtype=torch.uint8, device="cuda")
    if form == "float4 groups":
        exponents = torch.randint(-9, -4, (rows, depth // 32), device="cuda")
        return Codes("float4", values, torch.exp2(exponents.float()).bfloat16(), 32)
    zeros = (
        torch.randint(0, 16, (rows, depth // 128), dtype=torch.uint8, device="cuda") if form == "int4 zeros" else None
    )
    if form == "int4 rows":
        return Codes("int4", values, scales(rows, 1), depth)
    row_scale = scales(rows) if form == "int4 two levels" else None
    dtype = random.SystemRandom().choice((torch.bfloat16, torch.float16))
    return Codes("int4", values, scales(rows, depth // 128, dtype=dtype), 128, zero_OG=zeros, row_scale_O=row_scale)


def ways_of(weight: PackedWeight, tokens: int) -> Iterator[Callable[..., None]]:
    """Products with the weight, of up to `tokens` tokens: by the ring and in terms, in every cut."""
    block = max(8, 1 << (tokens - 1).bit_length())
    for ring in hopper._CUTS[weight.handle.kind].get(block, ()):
        yield partial(hopper.multiply_codes, cut=ring)
    form = hopper.form_of(weight.handle)
    assert form is not None
    for cut in terms.cuts_of(tokens, weight.handle, form):
        yield partial(terms.multiply_terms, cut=cut)


@pytest.mark.parametrize("form", FORMS)
def test_agrees_with_double_precision(form: str) -> None:
    draw = random.SystemRandom()
    torch.manual_seed(draw.randrange(2**31))
    for rows, depth in ((256, 512), (1536, 2048), (4096, 3072)):
        weight = packed.pack_codes(codes_of(form, rows, depth))
        dense = packed.dequantise(weight).double()
        for tokens in (1, 7, 8, 9, 16, draw.randrange(17, 33), 32, draw.randrange(33, 65), 64):
            x = torch.randn(tokens, depth + 64, dtype=torch.bfloat16, device="cuda")[:, :depth]
            bias = torch.randn(rows, dtype=torch.bfloat16, device="cuda") if draw.random() < 0.5 else None
            expected = x.double() @ dense.t() + (0 if bias is None else bias.double())
            for way in ways_of(weight, tokens):
                wide = torch.full((tokens, rows + 3), 7.0, dtype=torch.bfloat16, device="cuda")
                outs = []
                for _ in range(3):
                    way(x, weight.handle, bias, wide[:, 1 : rows + 1])
                    outs.append(wide[:, 1 : rows + 1].clone())
                error = (outs[0].double() - expected).norm() / expected.norm()
                assert error < 4e-3, (rows, depth, tokens, way, float(error))
                assert torch.equal(outs[0], outs[1])
                assert torch.equal(outs[0], outs[2])
                assert bool((wide[:, [0, -2, -1]] == 7).all())


@pytest.mark.parametrize("how", ["outlier", "mean", "tiny", "huge"])
@pytest.mark.parametrize("form", ["float8 rows", "int4 zeros"])
def test_terms_keep_tokens_of_any_size(form: str, how: str) -> None:
    """Tokens are split with a power of two for 256 columns; zero points are taken off products with codes of 4 bits."""
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    weight = packed.pack_codes(codes_of(form, 1024, 2048))
    dense = packed.dequantise(weight).double()
    values = torch.randn(11, 2048, device="cuda")
    if how == "outlier":
        values[:, 77] = 300.0
    values = {"mean": values + 1.0, "tiny": values * 1e-30, "huge": values * 1e30}.get(how, values)
    x = values.bfloat16()
    x[4] = 0
    expected = x.double() @ dense.t()
    found = packed.packed_linear(x, weight, exact=True)
    assert float((found.double() - expected).norm() / expected.norm()) < (8e-3 if form == "int4 zeros" else 3e-3)
    assert not found[4].any()
    x[2, 5] = torch.inf
    assert packed.packed_linear(x, weight, exact=True).isfinite().all(1).tolist() == [row != 2 for row in range(11)]


def test_rounded_tokens_agree_with_the_library() -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    for rows, depth in ((192, 512), (1024, 14336), (4096, 6144)):
        codes = codes_of("float8 rows", rows, depth)
        exact, weight = packed.pack_codes(codes), packed.pack_codes(replace(codes, inputs=Inputs("float8")))
        for tokens in (33, 64, 65, 100, 128, 200):
            x = torch.randn(tokens, depth, dtype=torch.bfloat16, device="cuda")
            bias = torch.randn(rows, dtype=torch.bfloat16, device="cuda")
            values, scales = round_rows(x)
            expected = (
                values.double() * scales.double()[:, None] @ packed.dequantise(exact).double().t() + bias.double()
            )
            found = [packed.packed_linear(x, weight, bias) for _ in range(2)]
            assert torch.equal(*found)
            assert float((found[0].double() - expected).norm() / expected.norm()) < 1e-2, (rows, depth, tokens)


@pytest.mark.parametrize("tokens", [33, 64, 77, 100, 128])
def test_blocks_are_multiplied_with_tokens_in_groups(tokens: int) -> None:
    """Every cut that takes a weight, scales that differ widely, more steps than lanes."""
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    for rows, depth in ((768, 1152), (1152, 2048), (512, 14336)):
        codes = codes_of("float8 blocks", rows, depth)
        wide = torch.exp(torch.randn_like(codes.scale_OG))
        codes = replace(codes, scale_OG=codes.scale_OG * wide, inputs=Inputs("float8", 128))
        weight = packed.pack_codes(codes)
        dense = packed.dequantise(weight).double()
        x = torch.randn(tokens, depth, dtype=torch.bfloat16, device="cuda")
        x *= torch.exp(torch.randn(tokens, depth // 128, device="cuda")).bfloat16().repeat_interleave(128, 1)
        bias = torch.randn(rows, dtype=torch.bfloat16, device="cuda")
        values, scales = rounded_tokens(x, rounded.block_of(tokens), powers=False)
        real = values.double() * scales[:, :tokens].t().double().repeat_interleave(128, 1)
        assert float((real - x.double()).norm() / x.double().norm()) < 4e-2
        expected = real @ dense.t() + bias.double()
        cuts = {rule.cut for rule in rounded.BLOCK_RULES if rule.cut.takes(rows, depth)}
        assert cuts
        for cut in cuts:
            outs = []
            for _ in range(2):
                room = torch.full((tokens, rows + 3), 7.0, dtype=torch.bfloat16, device="cuda")
                rounded.multiply_rounded(values, scales, weight.handle, bias, room[:, 1 : rows + 1], cut)
                assert bool((room[:, [0, -2, -1]] == 7).all()), cut
                outs.append(room[:, 1 : rows + 1].clone())
            assert torch.equal(*outs), cut
            assert float((outs[0].double() - expected).norm() / expected.norm()) < 4e-3, (rows, depth, cut)
        assert torch.equal(packed.packed_linear(x, weight, bias), packed._multiply_grouped(x, weight, bias, None))


@pytest.mark.parametrize("tokens", [33, 64, 77, 100, 128, 160, 200])
def test_clusters_agree_with_double_precision(tokens: int) -> None:
    """Every way to share a tile's columns and tokens, also where columns are no multiple of the blocks."""
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    for rows, depth in ((768, 1152), (1536, 4096)):
        weight = packed.pack_codes(codes_of("float8 rows", rows, depth))
        dense = packed.dequantise(weight).double()
        values, scales = round_rows(torch.randn(tokens, depth, dtype=torch.bfloat16, device="cuda"))
        bias = torch.randn(rows, dtype=torch.bfloat16, device="cuda")
        expected = values.double() * scales.double()[:, None] @ dense.t() + bias.double()
        for cut in {rule.cut for rule in rounded.RULES if tokens <= rule.tokens and rule.cut.takes(rows, depth)}:
            outs = []
            for _ in range(2):
                wide = torch.full((tokens, rows + 3), 7.0, dtype=torch.bfloat16, device="cuda")
                rounded.multiply_rounded(values, scales, weight.handle, bias, wide[:, 1 : rows + 1], cut)
                assert bool((wide[:, [0, -2, -1]] == 7).all()), cut
                outs.append(wide[:, 1 : rows + 1].clone())
            assert torch.equal(*outs), cut
            assert float((outs[0].double() - expected).norm() / expected.norm()) < 1e-2, cut


SHAPES = [("float8 blocks", 8, 2, 512, 256), ("float8 rows", 8, 2, 512, 128), ("int4 groups", 8, 3, 512, 256),
          ("float4 groups", 8, 2, 576, 320), ("float4 groups", 8, 4, 1152, 480),
          ("float8 blocks", 8, 2, 512, 768)]  # fmt: skip


def experts_of(
    form: str, num_experts: int, width: int, inner: int, biased: bool
) -> tuple[PackedExperts, ClampedGate | None]:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    biases = clamp = None
    if biased:
        up, down = (torch.randn(num_experts, rows, device="cuda").bfloat16() * 0.1 for rows in (2 * inner, width))
        biases, clamp = Biases(up, down), ClampedGate(alpha=1.702, limit=7.0)
    stacks = experts.pack_experts(
        [codes_of(form, 2 * inner, width) for _ in range(num_experts)],
        [codes_of(form, width, inner) for _ in range(num_experts)],
        biases,
    )
    assert stacks is not None
    return stacks, clamp


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("form", "num_experts", "per_token", "width", "inner"), SHAPES)
def test_experts_agree_with_the_portable_kernels(
    form: str, num_experts: int, per_token: int, width: int, inner: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of few and of many experts, some of which are elsewhere."""
    stacks, clamp = experts_of(form, num_experts, width, inner, biased)
    monkeypatch.setattr(tiles_hopper, "tile_for", lambda *_: None)
    for tokens in (1, 2, 9, 24, 30):
        x = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
        ids = torch.stack([torch.randperm(num_experts + 2, device="cuda")[:per_token] for _ in range(tokens)]).int()
        weights = torch.rand(tokens, per_token, device="cuda")
        assert experts._takes_hopper(x, stacks.handle, ids.numel(), "silu", clamp) or not form.startswith("float8")
        found = [experts.packed_experts(x, stacks, weights, ids, "silu", clamp) for _ in range(2)]
        with monkeypatch.context() as without:
            without.setattr(few_hopper, "suits", lambda *_: False)
            expected = experts.packed_experts(x, stacks, weights, ids, "silu", clamp)
        torch.testing.assert_close(found[0], expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
        assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("form", "num_experts", "per_token", "width", "inner"), SHAPES)
def test_experts_in_tiles_agree_with_the_portable_kernels(
    form: str, num_experts: int, per_token: int, width: int, inner: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and columns in no whole tiles, experts elsewhere, and one that most tokens choose; on all multiprocessors,
    and on few, between which tiles are cut."""
    stacks, clamp = experts_of(form, num_experts, width, inner, biased)
    draw = random.SystemRandom()
    tile = tiles_hopper.Tile(draw.choice((16, 32, 64, 128)), 2 if form.startswith("int4") else draw.choice((2, 3)))
    if form != "float4 groups" and tile.tokens == 128:
        tile = tile._replace(groups=2)
    elif form == "float4 groups" and tile.tokens <= 32:
        tile = tile._replace(groups=draw.choice((2, 3, 4)))
    tile = tile._replace(evenly=draw.choice((False, True)))
    if tile.tokens <= 32:
        tile = tile._replace(preloaded=draw.choice((False, True)), matrices=draw.choice((False, True)))
    if draw.choice((False, True)):
        monkeypatch.setattr(tiles_hopper, "num_sms", lambda _: 7)
    for tokens in (1, 9, 40, 300):
        x = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
        ids = torch.stack([torch.randperm(num_experts + 2, device="cuda")[:per_token] for _ in range(tokens)]).int()
        ids[tokens // 3 :, 0] = 1
        weights = torch.rand(tokens, per_token, device="cuda")
        with monkeypatch.context() as only:
            only.setattr(tiles_hopper, "tile_for", lambda *_: tile)
            assert experts._takes_tiles(x, stacks.handle, ids.numel(), "silu", clamp)
            found = [experts.packed_experts(x, stacks, weights, ids, "silu", clamp) for _ in range(2)]
        with monkeypatch.context() as without:
            without.setattr(tiles_hopper, "tile_for", lambda *_: None)
            without.setattr(few_hopper, "suits", lambda *_: False)
            expected = experts.packed_experts(x, stacks, weights, ids, "silu", clamp)
        assert (found[0] - expected).double().norm() < 1e-2 * expected.double().norm(), (tile, tokens)
        assert torch.equal(found[0], found[1])


def test_few_tokens_take_it() -> None:
    x = torch.randn(4, 2048, dtype=torch.bfloat16, device="cuda")
    weight = packed.pack_codes(codes_of("float8 rows", 1024, 2048))
    out = torch.empty(4, 1024, dtype=torch.bfloat16, device="cuda")
    assert hopper.cut_for(x, weight.handle, None, out) is not None
    assert hopper.cut_for(x.float(), weight.handle, None, out) is None
    odd = packed.pack_codes(codes_of("float8 rows", 1000, 2048))
    assert hopper.cut_for(x, odd.handle, None, out) is None
