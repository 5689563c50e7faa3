"""The skinny product for Hopper: any tokens, halves and biases, with and without a norm before it, tiles cut anywhere, the
same bits each time."""

import random

import pytest
import torch
import torch.nn.functional as F

from bough.kernels.linear import reference, triton as linear
from bough.kernels.linear.ring import MOST_NORMED, MOST_SHARED_BYTES, is_ready, shared_bytes
from bough.kernels.linear.skinny import SkinnyTiling, skinny, takes_norm
from bough.kernels.norm import inlined

CONFIGS = [
    SkinnyTiling(64, 128, 4, 8, 1, tma=True, ring=True),
    SkinnyTiling(64, 64, 4, 8, 1, tma=True, ring=True),
    SkinnyTiling(64, 128, 4, 3, 2, tma=True, ring=True),
    SkinnyTiling(64, 64, 4, 5, 0, tma=True, ring=True),
    SkinnyTiling(128, 64, 8, 4, 1, tma=True, ring=True),
    SkinnyTiling(64, 128, 4, 2, 0, split=3, tma=True, ring=True),
]


@pytest.fixture(autouse=True)
def _is_used(hopper: None) -> None:
    assert is_ready(torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("what", ["plain", "bias", "silu_mul"])
def test_agrees_with_double_precision(what: str, config: SkinnyTiling, dtype: torch.dtype) -> None:
    draw = random.SystemRandom()
    torch.manual_seed(draw.randrange(2**31))
    for rows, depth in ((256, 128), (1536, 2048), (4096, 3072)):
        for tokens in (1, 7, 8, 9, draw.randrange(10, 33), draw.randrange(33, 65)):
            height = config.block_n * (2 if what == "silu_mul" else 1) + max(8, 1 << (tokens - 1).bit_length())
            if 2 * config.num_stages * config.block_k * height > 230_000:
                continue  # more than a multiprocessor's shared memory
            x = torch.randn(tokens, depth + 64, dtype=dtype, device="cuda")[:, :depth]
            weight = (torch.randn(rows, depth, device="cuda") / depth**0.5).to(dtype)
            bias = torch.randn(rows, dtype=dtype, device="cuda") if what == "bias" else None
            expected = x.double() @ weight.double().t()
            if what == "silu_mul":
                gate, up = expected.to(dtype).double().chunk(2, dim=1)
                expected = F.silu(gate) * up
            if bias is not None:
                expected = expected + bias.double()
            out = [skinny(x, weight, config, bias=bias, silu_mul=what == "silu_mul") for _ in range(3)]
            error = (out[0].double() - expected).norm() / expected.norm()
            assert error < 4e-3, (rows, depth, tokens, float(error))
            assert torch.equal(out[0], out[1])
            assert torch.equal(out[0], out[2])


def test_waits_for_what_it_reads() -> None:
    """Each product reads what the one before wrote, queued without a pause and in a graph."""
    config = CONFIGS[0]
    torch.manual_seed(5)
    weights = [(torch.randn(2048, 2048, device="cuda") / 2048**0.5).bfloat16() for _ in range(8)]
    start = torch.randn(4, 2048, device="cuda").bfloat16()

    def chain() -> torch.Tensor:
        x = start
        for weight in weights * 4:
            x = skinny(x, weight, config)
        return x

    expected = start
    for weight in weights * 4:
        expected = F.linear(expected, weight)
    first = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(20):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, first)
    assert (first.double() - expected.double()).norm() / expected.double().norm() < 3e-2


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("what", ["plain", "bias", "silu_mul"])
def test_a_norm_before_it_agrees_with_double_precision(what: str, config: SkinnyTiling) -> None:
    """Of up to 8 tokens, although more than two are normed by a launch of their own."""
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    for rows, depth in ((256, 128), (1536, 2048), (5120, 2048), (2048, 4096)):
        block = (8, config.block_n, config.block_k)
        if shared_bytes(block, config.num_stages, silu_mul=what == "silu_mul", normed=depth) > MOST_SHARED_BYTES:
            continue
        for tokens in (1, 2, 5, 8):
            x, residual = torch.randn(2, tokens, depth + 64, dtype=torch.bfloat16, device="cuda")[..., :depth]
            scale = torch.randn(depth, dtype=torch.bfloat16, device="cuda")
            weight = (torch.randn(rows, depth, device="cuda") / depth**0.5).bfloat16()
            bias = torch.randn(rows, dtype=torch.bfloat16, device="cuda") if what == "bias" else None
            sums = (x.double() + residual.double()).bfloat16()
            inverse = sums.double().square().mean(-1, keepdim=True).add(1e-6).rsqrt()
            expected = (sums.double() * inverse * (scale.double() + 1)).bfloat16().double() @ weight.double().t()
            if what == "silu_mul":
                gate, up = expected.bfloat16().double().chunk(2, dim=1)
                expected = F.silu(gate) * up
            if bias is not None:
                expected = expected + bias.double()
            out = []
            for _ in range(3):
                room = torch.full((tokens + 8, depth), float("nan"), dtype=torch.bfloat16, device="cuda")
                normed = inlined.normed(x, residual, scale, 1e-6, 1.0, room[:tokens])
                out.append(skinny(x, weight, config, bias=bias, silu_mul=what == "silu_mul", normed=normed))
                assert torch.equal(room[:tokens], sums)
                assert room[tokens:].isnan().all()
            error = (out[0].double() - expected).norm() / expected.norm()
            assert error < 4e-3, (rows, depth, tokens, float(error))
            assert torch.equal(out[0], out[1])
            assert torch.equal(out[0], out[2])


def test_a_norm_before_it_waits_for_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each norm reads both that the launch before wrote, queued without a pause and in a graph."""
    config = CONFIGS[0]
    monkeypatch.setattr(linear, "_config", lambda *_: config)
    torch.manual_seed(6)
    weights = [(torch.randn(2048, 2048, device="cuda") / 2048**0.5).bfloat16() for _ in range(8)]
    scale = torch.randn(2048, dtype=torch.bfloat16, device="cuda")
    start = torch.randn(2, MOST_NORMED, 2048, dtype=torch.bfloat16, device="cuda")
    assert takes_norm(start[0], weights[0], config, None)

    def chain(pause: bool = False) -> torch.Tensor:
        x, residual = start
        for weight in weights * 4:
            x, residual = linear.linear_after_norm(x, residual, scale, 1e-6, weight)
            if pause:
                torch.cuda.synchronize()
        return torch.stack([x, residual])

    first = chain(pause=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(20):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, first)
    x, residual = start
    for weight in weights * 4:
        x, residual = reference.linear_after_norm(x, residual, scale, 1e-6, weight)
    assert (first[1].double() - residual.double()).norm() / residual.double().norm() < 3e-2
