"""Experts in one call of the CPU's kernels, against a loop over experts in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_codes import random_codes
from torch import Tensor

from bough.config.model_facts import ClampedGate
from bough.kernels import moe, packed_moe
from bough.kernels.moe import Biases, cpu, reference
from bough.kernels.packed_linear import Codes, pack
from bough.kernels.packed_linear.codes import dequantise_codes
from bough.kernels.packed_linear.reference import unpack
from bough.kernels.packed_linear.weight import FORMATS
from bough.kernels.packed_moe import cpu as packed_cpu, reference as one_by_one

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no compiler")

EXPERTS, WIDTH, INNER, PER_TOKEN = 5, 96, 64, 2
CLAMP = ClampedGate(alpha=1.7, limit=0.8)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def choice(tokens: int, *, outside: bool = False) -> tuple[Tensor, Tensor]:
    """Weights and ids; `outside`: some ids are of experts that are not here."""
    drawn = torch.rand(tokens, EXPERTS, generator=seeded(tokens))
    weights, ids = drawn.topk(PER_TOKEN, -1)
    ids = ids.int()
    if outside:
        ids[::3, 0], ids[1::4, 1] = -1, EXPERTS + 3
    return weights, ids


def biases() -> Biases:
    return Biases(
        torch.randn(EXPERTS, 2 * INNER, generator=seeded(1)), torch.randn(EXPERTS, WIDTH, generator=seeded(2))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 17, 70])
def test_plain_weights(dtype: torch.dtype, tokens: int) -> None:
    gate_up = (torch.randn(EXPERTS, 2 * INNER, WIDTH, generator=seeded(3)) / 10).to(dtype)
    down = (torch.randn(EXPERTS, WIDTH, INNER, generator=seeded(4)) / 8).to(dtype)
    x = torch.randn(tokens, WIDTH, generator=seeded(5)).to(dtype)
    given = (gate_up.float(), down.float())
    weights, ids = choice(tokens, outside=tokens > 1)
    near: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 4e-3}
    for activation in ("silu", "gelu_tanh"):
        expected = reference.fused_experts(x.float(), *given, weights, ids, activation)
        assert cpu._stack(x, gate_up, down) is not None
        torch.testing.assert_close(
            cpu.fused_experts(x, gate_up, down, weights, ids, activation).float(), expected, **near
        )
    expected = reference.biased_experts(x.float(), *given, biases(), weights, ids, CLAMP.alpha, CLAMP.limit)
    actual = moe.biased_experts(x, gate_up, down, biases(), weights, ids, CLAMP.alpha, CLAMP.limit)
    torch.testing.assert_close(actual.float(), expected, **near)


def test_sizes_the_kernels_lack_are_left_to_the_reference() -> None:
    gate_up, down = torch.randn(2, 80, 48), torch.randn(2, 48, 40)
    x, (weights, ids) = torch.randn(3, 48), choice(3)
    actual = moe.fused_experts(x, gate_up, down, weights, ids % 2)
    torch.testing.assert_close(actual, reference.fused_experts(x, gate_up, down, weights, ids % 2))


KINDS: dict[str, dict[str, Any]] = {
    "int4": {"kind": "int4", "group": 32, "zeros": True},
    "int8": {"kind": "int8", "group": 32},
    "mxfp4": {"kind": "float4", "group": 32, "dtype": torch.bfloat16},
    "fp8": {"kind": "float8", "group": 32, "rows": 32, "dtype": torch.float32},
    "ordered": {"kind": "int4", "group": 32, "ordered": True},
}


def expert_codes(name: str) -> tuple[list[Codes], list[Codes]]:
    gate_up = [random_codes(**KINDS[name], shape=(2 * INNER, WIDTH), seed=e).sorted() for e in range(EXPERTS)]
    down = [random_codes(**KINDS[name], shape=(WIDTH, INNER), seed=90 + e).sorted() for e in range(EXPERTS)]
    return gate_up, down


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("clamped", [False, True])
def test_packed_weights(name: str, clamped: bool) -> None:
    gate_up, down = expert_codes(name)
    clamp = CLAMP if clamped else None
    grouped = packed_cpu.pack_experts(gate_up, down, biases() if clamped else None)
    lone = one_by_one.pack_experts(gate_up, down, biases() if clamped else None)
    assert grouped is not None
    assert lone is not None
    assert grouped.functions is packed_cpu
    for tokens in (1, 4, 23):
        x, (weights, ids) = torch.randn(tokens, WIDTH, generator=seeded(tokens)), choice(tokens, outside=True)
        expected = packed_moe.packed_experts(x, lone, weights, ids, "silu", clamp)
        actual = packed_moe.packed_experts(x, grouped, weights, ids, "silu", clamp)
        assert torch.equal(actual, expected) or (actual - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_what_packed_weights_are_worth() -> None:
    """The loop over experts is not the only witness: FP8 is multiplied without rounding."""
    gate_up, down = expert_codes("fp8")
    packed = packed_moe.pack_experts(gate_up, down)
    assert packed is not None
    stacks = torch.stack([dequantise_codes(e) for e in gate_up]), torch.stack([dequantise_codes(e) for e in down])
    x, (weights, ids) = torch.randn(9, WIDTH), choice(9)
    expected = reference.fused_experts(x, *stacks, weights, ids)
    torch.testing.assert_close(packed_moe.packed_experts(x, packed, weights, ids), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "BF16"])
def test_gguf_blocks(kind: str) -> None:
    form = FORMATS[kind]

    def raw(rows: int, cols: int, seed: int) -> Tensor:
        if kind == "BF16":
            return torch.randn(rows, cols, generator=seeded(seed)).bfloat16().view(torch.uint8)
        blocks = torch.randint(0, 256, (rows * cols // form.block, form.block_bytes), generator=seeded(seed))
        blocks[:, :2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8).long()
        return blocks.to(torch.uint8).view(rows, -1)

    bytes_up, bytes_down = (
        [raw(2 * INNER, WIDTH, e) for e in range(EXPERTS)],
        [raw(WIDTH, INNER, 50 + e) for e in range(EXPERTS)],
    )
    packed = packed_moe.group_experts(
        [pack(kind, each, WIDTH) for each in bytes_up], [pack(kind, each, INNER) for each in bytes_down], exact=True
    )
    assert packed is not None
    assert packed.functions is packed_cpu
    stacks = (
        torch.stack([unpack(kind, e, WIDTH) for e in bytes_up]),
        torch.stack([unpack(kind, e, INNER) for e in bytes_down]),
    )
    x, (weights, ids) = torch.randn(6, WIDTH), choice(6)
    expected = reference.fused_experts(x, *stacks, weights, ids)
    actual = packed_moe.packed_experts(x, packed, weights, ids)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_token_gets_the_same_bits_in_any_company() -> None:
    gate_up, down = expert_codes("int4")
    packed = packed_moe.pack_experts(gate_up, down)
    assert packed is not None
    x, (weights, ids) = torch.randn(70, WIDTH), choice(70)
    together = packed_moe.packed_experts(x, packed, weights, ids)
    for some in (slice(0, 1), slice(3, 20), slice(40, 70)):
        assert torch.equal(packed_moe.packed_experts(x[some], packed, weights[some], ids[some]), together[some])


def test_no_tokens_and_nothing_chosen() -> None:
    gate_up, down = expert_codes("int4")
    packed = packed_moe.pack_experts(gate_up, down)
    assert packed is not None
    nothing = torch.full((3, PER_TOKEN), -1, dtype=torch.int32)
    assert (packed_moe.packed_experts(torch.randn(3, WIDTH), packed, torch.rand(3, PER_TOKEN), nothing) == 0).all()
    empty = torch.empty(0, WIDTH), torch.empty(0, PER_TOKEN), torch.empty(0, PER_TOKEN, dtype=torch.int32)
    assert packed_moe.packed_experts(empty[0], packed, *empty[1:]).shape == (0, WIDTH)
