"""Packed weights against the gguf package's own dequantisation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from bough.kernels import packed_linear as packed
from bough.kernels.packed_linear import cpu, reference
from bough.kernels.packed_linear.weight import FORMATS

IMPLEMENTATIONS = [reference, pytest.param(cpu, marks=pytest.mark.skipif(not cpu.available(), reason="no compiler"))]
KINDS = list(FORMATS)
PLAIN = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
WITH_MINIMUM = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def random_weight(kind: str, rows: int, cols: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random blocks with sane scales, as bytes and as gguf dequantises them."""
    rng = np.random.default_rng(seed)
    form = FORMATS[kind]
    if kind in PLAIN:
        stored = torch.from_numpy(rng.standard_normal((rows, cols), np.float32)).to(PLAIN[kind])
        return stored.view(torch.uint8), stored.float()
    blocks = rng.integers(0, 256, (rows, cols // form.block, form.block_bytes), np.uint8)
    scales = rng.uniform(0.001, 0.02, (2, rows, cols // form.block, 1)).astype(np.float16).view(np.uint8)
    if kind == "Q6_K":
        blocks[..., -2:] = scales[0]
    else:
        blocks[..., 0:2] = scales[0]
        if kind in WITH_MINIMUM:
            blocks[..., 2:4] = scales[1]
    raw = blocks.reshape(rows, -1)
    return torch.from_numpy(raw), torch.from_numpy(gguf.quants.dequantize(raw, GGMLQuantizationType[kind]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_values_are_ggufs(implementation: object, kind: str) -> None:
    raw, expected = random_weight(kind, 37, 512)
    weight = implementation.pack(kind, raw, 512)
    torch.testing.assert_close(packed.dequantise(weight), expected, rtol=1e-6, atol=1e-7)
    ids = torch.tensor([36, 0, 5, 5, 17])
    torch.testing.assert_close(packed.packed_rows(ids, weight, torch.float32), expected[ids], rtol=1e-6, atol=1e-7)
    assert packed.packed_rows(ids, weight, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 13, 40, 100])
def test_exact_products_are_float32s(implementation: object, kind: str, tokens: int) -> None:
    raw, values = random_weight(kind, 53, 512)
    x = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(tokens))
    expected = (x.double() @ values.double().T).float()
    actual = packed.packed_linear(x, implementation.pack(kind, raw, 512), exact=True)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


FAR = 6
"""Times a token's root mean square: what is further out is not rounded."""


def rounded_activations(x: Tensor) -> Tensor:
    """What eight bits with a scale for each 32 leave of activations, and the outliers as they are."""
    far = x.abs() > FAR * x.square().mean(-1, keepdim=True).sqrt()
    blocks = x.masked_fill(far, 0).reshape(x.shape[0], -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return torch.where(far, x, (torch.round(blocks / scale.clamp(min=1e-30)) * scale).reshape(x.shape))


def with_outliers(x: Tensor) -> Tensor:
    """Some channels large in every token, and some values in one: as models have them."""
    wild = x.clone()
    wild[:, [3, 70, 95, -1]] *= torch.tensor([20.0, -40.0, 15.0, 30.0])
    wild[torch.rand(x.shape, generator=torch.Generator().manual_seed(7)) < 0.005] *= 25
    return wild


@pytest.mark.skipif(not cpu.available(), reason="no compiler")
@pytest.mark.parametrize("kind", KINDS[:8])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 6, 13, 40, 100])
def test_fast_products_are_those_of_rounded_activations(kind: str, tokens: int) -> None:
    raw, values = random_weight(kind, 53, 768)
    x = torch.randn(tokens, 768, generator=torch.Generator().manual_seed(tokens))
    x[0, 64:96] = 0
    weight = cpu.pack(kind, raw, 768)
    for given in (x, with_outliers(x)):
        expected = (rounded_activations(given).double() @ values.double().T).float()
        # a value halfway between two integers may be rounded either way
        torch.testing.assert_close(
            packed.packed_linear(given, weight), expected, rtol=0, atol=1e-3 * float(expected.abs().max())
        )


@pytest.mark.skipif(not cpu.available(), reason="no compiler")
@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_an_outlier_costs_its_neighbours_no_bits(tokens: int) -> None:
    raw, values = random_weight("Q4_1", 64, 576)
    weight = cpu.pack("Q4_1", raw, 576)
    calm = torch.randn(tokens, 576, generator=torch.Generator().manual_seed(tokens))
    wild = calm.clone()
    wild[:, ::32] = 0
    wild[:, 64] = 1000.0  # beside this one, all others of its block would be rounded to a multiple of 8

    def error(x: Tensor) -> float:
        return float((packed.packed_linear(x, weight).double() - x.double() @ values.double().T).square().mean().sqrt())

    assert error(wild) < 1.5 * error(calm)


@pytest.mark.skipif(not cpu.available(), reason="no compiler")
@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_activations_whose_squares_vanish(kind: str, tokens: int) -> None:
    """All of them are further out than a root mean square of zero; no more are taken than there is room for."""
    raw, values = random_weight(kind, 48, 768)
    x = 1e-30 * torch.randn(tokens, 768)
    expected = x.double() @ values.double().T
    actual = packed.packed_linear(x, cpu.pack(kind, raw, 768)).double()
    assert float((actual - expected).abs().max()) < 0.02 * float(expected.abs().max())


@pytest.mark.skipif(not cpu.available(), reason="no compiler")
@pytest.mark.parametrize("tokens", [1, 5, 13, 40])
@pytest.mark.parametrize("rows", [53, 64])
def test_fast_products_of_bfloat16_weights_round_activations_at_most(tokens: int, rows: int) -> None:
    raw, values = random_weight("BF16", rows, 512)
    x = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(tokens))
    rounded = x.bfloat16().double() @ values.double().T
    actual = packed.packed_linear(x, cpu.pack("BF16", raw, 512)).double()
    exact = x.double() @ values.double().T
    nearer = torch.minimum((actual - rounded).abs().max(), (actual - exact).abs().max())
    assert float(nearer) <= 2e-6 * float(exact.abs().max())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [1, 20])
def test_bias_bfloat16_and_slices(implementation: object, tokens: int) -> None:
    raw, values = random_weight("Q4_0", 48, 64)
    weight = implementation.pack("Q4_0", raw, 64)
    wide = torch.randn(tokens, 100)
    x, bias = wide[:, 20:84], torch.randn(48)
    expected = x @ values.T + bias
    out = torch.zeros(tokens, 80)
    packed.packed_linear(x, weight, bias, exact=True, out=out[:, 16:64])
    torch.testing.assert_close(out[:, 16:64], expected, rtol=1e-4, atol=1e-4)
    assert torch.count_nonzero(out[:, :16]) == 0
    assert torch.count_nonzero(out[:, 64:]) == 0
    half = packed.packed_linear(x.bfloat16(), weight, bias, exact=True)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), x.bfloat16().float() @ values.T + bias, rtol=1e-2, atol=1e-2)
    nested = packed.packed_linear(x.reshape(1, tokens, 64), weight, bias, exact=True)
    torch.testing.assert_close(nested[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tokens", "rows"), [(1, 400), (30, 400), (1, 40_007)])
def test_threads_change_nothing(tokens: int, rows: int) -> None:
    raw, _ = random_weight("Q4_K", rows, 1024)
    weight = packed.pack("Q4_K", raw, 1024)
    x = torch.randn(tokens, 1024)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 17):
            torch.set_num_threads(threads)
            results.append((packed.packed_linear(x, weight), packed.packed_linear(x, weight, exact=True)))
    finally:
        torch.set_num_threads(before)
    for fast, exact in results[1:]:
        assert torch.equal(fast, results[0][0])
        torch.testing.assert_close(exact, results[0][1], rtol=1e-5, atol=1e-4)


@pytest.fixture
def threads_that_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("threads_that_switch_often")
def test_threads_that_pack_at_once_get_memory_of_their_own() -> None:
    arena = cpu._Arena()
    with ThreadPoolExecutor(8) as pool:
        taken = [
            part for parts in pool.map(lambda _: [arena.take(4096) for _ in range(50)], range(1000)) for part in parts
        ]
    ranges = sorted((part.data_ptr(), part.data_ptr() + part.numel()) for part in taken)
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))


def test_packed_weights_are_small() -> None:
    for kind, bits in (("Q4_0", 4.5), ("Q4_K", 4.75), ("Q6_K", 7.125), ("Q8_0", 8.5), ("BF16", 16)):
        raw, _ = random_weight(kind, 64, 512)
        assert packed.pack(kind, raw, 512).num_bytes * 8 <= bits * 64 * 512


def test_wrong_shapes_are_refused() -> None:
    raw, _ = random_weight("Q4_0", 16, 64)
    assert packed.supported("Q4_0")
    assert not packed.supported("IQ2_XS")
    assert not packed.supported("F32")
    with pytest.raises(ValueError, match="take 36 bytes"):
        packed.pack("Q4_0", raw[:, 1:], 64)
    with pytest.raises(ValueError, match="multiple of 32"):
        packed.pack("Q4_0", raw, 63)
    if cpu.available():
        with pytest.raises(ValueError, match="width 32"):
            packed.packed_linear(torch.randn(1, 32), cpu.pack("Q4_0", raw, 64))


def test_memory_for_weights_may_be_written_in_any_mode() -> None:
    """Whichever mode the first weight of a piece was packed in."""
    arena = cpu._Arena()
    with torch.inference_mode():
        arena.take(64)
    arena.take(64).fill_(1)
