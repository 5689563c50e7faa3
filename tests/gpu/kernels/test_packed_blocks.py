"""Experts in blocks of FP8 for many tokens, on Hopper's tensor cores for 8-bit floats."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bough.kernels.moe.reference import ACTIVATIONS
from bough.kernels.packed_linear.codes import Inputs
from bough.kernels.packed_moe import PackedExperts, blocks_hopper, triton as experts
from bough.quantization.formats import Online
from bough.quantization.quantise import quantise


@pytest.fixture(autouse=True)
def _is_used(hopper: None) -> None:
    assert blocks_hopper.is_ready(torch.device("cuda", torch.cuda.current_device()), 512, 256)


def _rounded(x: Tensor) -> Tensor:
    """As e4m3 with a scale per 128 columns."""
    groups = x.double().view(len(x), -1, 128)
    scale = (groups.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-12).float()
    return ((groups.float() / scale).to(torch.float8_e4m3fn).double() * scale).view_as(x)


def _experts(num_experts: int, width: int, inner: int) -> tuple[PackedExperts, list[Tensor], list[Tensor]]:
    """Packed, and what they are worth."""
    both = []
    for rows, depth in ((2 * inner, width), (width, inner)):
        # Blocks whose scales differ widely.
        weights = [
            torch.randn(rows, depth, device="cuda") * torch.exp(torch.randn(rows // 64, depth // 128, device="cuda"))
            .repeat_interleave(64, 0).repeat_interleave(128, 1) / depth**0.5
            for _ in range(num_experts)
        ]  # fmt: skip
        both.append([quantise(Online("fp8_block"), weight) for weight in weights])
    packed = experts.pack_experts(*both)
    assert packed is not None
    dense = [
        [
            each.values_OD.double()
            * each.scale_OG.double()
            .repeat_interleave(each.rows, 0)
            .repeat_interleave(each.group, 1)[: each.values_OD.shape[0]]
            for each in stack
        ]
        for stack in both
    ]
    return packed, dense[0], dense[1]


def _expected(x: Tensor, gate_up: list[Tensor], down: list[Tensor], weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    x = _rounded(x)
    for expert, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        # Rounded where the kernel rounds: once more before the gate would move the result by 1.4e-2.
        halves = (x[token] @ first.T).bfloat16().float()
        hidden = _rounded(ACTIVATIONS["silu"](halves).bfloat16())
        out.index_add_(0, token, (hidden @ second.T) * weights[token, choice].double()[:, None])
    return out


@pytest.mark.parametrize(
    ("tokens", "num_experts", "per_token", "width", "inner"),
    [(300, 4, 2, 512, 256), (1000, 8, 3, 2048, 768), (2049, 16, 4, 1024, 1408), (700, 3, 1, 640, 640)],
)
def test_products_are_those_of_rounded_tokens(
    tokens: int, num_experts: int, per_token: int, width: int, inner: int
) -> None:
    packed, gate_up, down = _experts(num_experts, width, inner)
    held = packed.handle
    x = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
    ids = torch.rand(tokens, num_experts + 1, device="cuda").topk(per_token, 1).indices.int()  # one is elsewhere
    weights = torch.rand(tokens, per_token, device="cuda")
    assert blocks_hopper.takes(held.gate_up, held.down, num_experts, width, held.inputs)
    found = []
    for _ in range(2):
        out = torch.empty_like(x)
        blocks_hopper.experts(x, held.gate_up, held.down, num_experts, held.inputs, weights, ids, out)
        found.append(out)
    expected = _expected(x, gate_up, down, weights, ids)
    assert (found[0].double() - expected).norm() < 1e-2 * expected.norm()
    assert torch.equal(found[0], found[1])


def test_what_asks_for_other_rounding_is_left_alone() -> None:
    packed, _, _ = _experts(4, 512, 256)
    held = packed.handle
    given = held.gate_up, held.down, 4, 512
    assert held.inputs == Inputs("float8", 128)
    assert blocks_hopper.takes(*given, held.inputs)
    assert not blocks_hopper.takes(*given, None)
    assert not blocks_hopper.takes(*given, Inputs("float8"))
    assert not blocks_hopper.takes(*given, replace(held.inputs, scale=0.5))
    x = torch.zeros(4, 512, dtype=torch.bfloat16, device="cuda")
    assert not blocks_hopper.suits(x, held.gate_up, held.down, 4, 8, "silu", held.inputs), "too few tokens"
