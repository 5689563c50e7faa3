"""A stack of blocks in one call against the same blocks put together from the reference kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bough.kernels.activation import reference as activation
from bough.kernels.attention import AttentionInputs, reference as attention
from bough.kernels.attention.cpu import CpuAttention
from bough.kernels.cpu_build import library
from bough.kernels.decoder_stack import BlockParts, Packed
from bough.kernels.decoder_stack.cpu import DecoderStack, covers
from bough.kernels.kv_codes import Ranges, encode
from bough.kernels.norm import reference as norm
from bough.kernels.packed_linear import dequantise, pack
from bough.kernels.rotary import reference as rotary
from tests.kernels.test_cpu_attention import Case, Spec, make_case
from tests.kernels.test_cpu_packed_linear import random_weight

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler")

WIDTH, INNER = 128, 192
SPEC = Spec(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2)


def matrix(rows: tuple[int, ...], cols: int, kinds: tuple[str, ...], bias: bool) -> Packed:
    pieces = [pack(kind, _small(kind, count, cols), cols) for count, kind in zip(rows, kinds, strict=True)]
    return Packed(pieces, 0.1 * torch.randn(sum(rows)) if bias else None, exact=True)


def _small(kind: str, rows: int, cols: int) -> Tensor:
    """Random blocks; what they mean stays small enough for a deep stack."""
    raw, values = random_weight(kind, rows, cols, seed=rows)
    if kind == "F32":
        return (values / cols**0.5).view(torch.uint8)
    return raw


def dense(packed: Packed, x: Tensor) -> Tensor:
    weight = torch.cat([dequantise(piece) for piece in packed.pieces])
    return torch.nn.functional.linear(x, weight, packed.bias)


def make_block(layer: int, *, plain: bool, bias: bool = False, rotates: bool = True) -> BlockParts:
    heads, dim = SPEC.num_heads, SPEC.head_dim
    kv = SPEC.num_kv_heads * dim
    angles = torch.outer(torch.arange(400.0), 1e3 ** -(torch.arange(0, dim, 2) / dim))
    extra = (
        {} if plain else {"after_attn_norm": torch.randn(WIDTH), "after_ffn_norm": torch.randn(WIDTH), "offset": 1.0}
    )
    if not plain:
        extra |= {"q_norm": torch.randn(dim), "k_norm": torch.randn(dim), "head_offset": 1.0}
    return BlockParts(
        attn_norm=torch.randn(WIDTH),
        ffn_norm=torch.randn(WIDTH),
        eps=1e-5,
        qkv=matrix((heads * dim, kv, kv), WIDTH, ("F32", "F32", "Q8_0"), bias),
        out=matrix((WIDTH,), heads * dim, ("F32",), bias),
        gate_up=matrix((INNER, INNER), WIDTH, ("Q4_1", "F32"), bias),
        down=matrix((WIDTH,), INNER, ("Q4_0",), bias),
        activation="silu" if plain else "gelu_tanh",
        spec=replace(SPEC, layer=layer, window=None if plain else 50, softcap=None if plain else 20.0),
        cos_sin_PR=torch.cat((angles.cos(), angles.sin()), -1) if rotates else None,
        **extra,
    )


def by_reference(blocks: list[BlockParts], x: Tensor, positions: Tensor, inputs: AttentionInputs) -> Tensor:
    for b in blocks:
        h = norm.rms_norm(x, b.attn_norm, b.eps, offset=b.offset)
        heads, kv, dim = b.spec.num_heads, b.spec.num_kv_heads, b.spec.head_dim
        q, k, v = dense(b.qkv, h).split((heads * dim, kv * dim, kv * dim), -1)
        q, k, v = (part.unflatten(1, (-1, dim)) for part in (q, k, v))
        if b.q_norm is not None and b.k_norm is not None:
            q = norm.rms_norm(q, b.q_norm, b.head_eps, offset=b.head_offset)
            k = norm.rms_norm(k, b.k_norm, b.head_eps, offset=b.head_offset)
        if b.cos_sin_PR is not None:
            q, k = rotary.apply_rope(q, k, positions, b.cos_sin_PR)
        h = dense(b.out, attention.forward(b.spec, inputs, q, k, v))
        if b.after_attn_norm is not None:
            h = norm.rms_norm(h, b.after_attn_norm, b.eps, offset=b.offset)
        x = x + h
        h = dense(b.gate_up, norm.rms_norm(x, b.ffn_norm, b.eps, offset=b.offset))
        h = activation.silu_mul(h) if b.activation == "silu" else activation.gelu_tanh_mul(h)
        h = dense(b.down, h)
        if b.after_ffn_norm is not None:
            h = norm.rms_norm(h, b.after_ffn_norm, b.eps, offset=b.offset)
        x = x + h
    return x


def case_of(rows: list[tuple[int, int]], num_layers: int) -> tuple[Case, AttentionInputs, Tensor]:
    """A case with KV of several layers, a copy of its inputs, and the positions of its tokens."""
    case = make_case(rows, SPEC)
    case.inputs.k_caches = [torch.randn_like(case.inputs.k_caches[0]) for _ in range(num_layers)]
    case.inputs.v_caches = [torch.randn_like(case.inputs.v_caches[0]) for _ in range(num_layers)]
    aside = replace(
        case.inputs,
        k_caches=[c.clone() for c in case.inputs.k_caches],
        v_caches=[c.clone() for c in case.inputs.v_caches],
    )
    return case, aside, torch.cat([torch.arange(c, c + q) for q, c in rows])


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [[(1, 30)], [(1, 9), (1, 100), (1, 0)], [(1, 9), (17, 3), (40, 0)]])
def test_stack_is_its_blocks(plain: bool, bias: bool, rows: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    blocks = [make_block(layer, plain=plain, bias=bias) for layer in range(3)]
    case, aside, positions = case_of(rows, 3)
    x = torch.randn(len(positions), WIDTH)
    before = x.clone()
    assert covers(blocks)
    result = DecoderStack(blocks)(x, positions, CpuAttention(case.inputs))
    assert result is not None
    assert torch.equal(x, before)
    expected = by_reference(blocks, x, positions, aside)
    limit = 2e-5 * float(expected.abs().max())
    torch.testing.assert_close(result[0] + result[1], expected, rtol=1e-4, atol=limit)
    for mine, theirs in zip(case.inputs.k_caches, aside.k_caches, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_without_rotation_and_with_other_caches() -> None:
    torch.manual_seed(0)
    blocks = [make_block(layer, plain=True, rotates=layer == 0) for layer in range(2)]
    stack = DecoderStack(blocks)
    for _ in range(2):
        case, aside, positions = case_of([(1, 20), (5, 0)], 2)
        x = torch.randn(6, WIDTH)
        result = stack(x, positions, CpuAttention(case.inputs))
        assert result is not None
        expected = by_reference(blocks, x, positions, aside)
        torch.testing.assert_close(result[0] + result[1], expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("bits", [8, 4])
def test_stack_over_codes(bits: int) -> None:
    """The stack is its blocks one by one, whose attention is tested by itself."""
    torch.manual_seed(0)
    blocks = [make_block(layer, plain=False) for layer in range(2)]
    case, _, positions = case_of([(1, 20), (5, 0), (1, 70)], 2)
    inputs = case.inputs
    inputs.k_caches, k_ranges = zip(*(encode(each, bits) for each in inputs.k_caches), strict=True)
    inputs.v_caches, v_ranges = zip(*(encode(each, bits) for each in inputs.v_caches), strict=True)
    inputs.ranges = [Ranges(*pair) for pair in zip(k_ranges, v_ranges, strict=True)]
    kept = [each.clone() for each in (*inputs.k_caches, *inputs.v_caches, *k_ranges, *v_ranges)]
    x = torch.randn(len(positions), WIDTH)
    result = DecoderStack(blocks)(x, positions, CpuAttention(inputs))
    assert result is not None
    held = (*inputs.k_caches, *inputs.v_caches, *k_ranges, *v_ranges)
    assert all(not torch.equal(a, b) for a, b in zip(kept, held, strict=True)), "the new tokens are kept in every plane"
    for cache, old in zip(held, kept, strict=True):
        cache.copy_(old)
    stepwise = x
    for block in blocks:
        one = DecoderStack([block])(stepwise, positions, CpuAttention(inputs))
        assert one is not None
        stepwise = one[0] + one[1]
    error = (result[0] + result[1] - stepwise).norm() / stepwise.norm()
    assert error < 0.01, "sums of the stream are rounded otherwise, by which single codes may change"


def test_other_dtypes_and_what_is_not_covered() -> None:
    torch.manual_seed(0)
    blocks = [make_block(0, plain=True)]
    case, aside, positions = case_of([(1, 20)], 1)
    x = torch.randn(1, WIDTH).bfloat16()
    result = DecoderStack(blocks)(x, positions, CpuAttention(case.inputs))
    assert result is not None
    assert result[0].dtype == result[1].dtype == torch.bfloat16
    expected = by_reference(blocks, x.float(), positions, aside)
    torch.testing.assert_close(
        (result[0] + result[1]).float(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max())
    )
    assert not covers([replace(blocks[0], spec=replace(SPEC, head_dim=24))])
    assert not covers([replace(blocks[0], spec=replace(SPEC, causal=False))])
    case.inputs.k_scales = [0.5]
    assert DecoderStack(blocks)(x, positions, CpuAttention(case.inputs)) is None


@pytest.mark.parametrize("with_norms", [True, False])
@pytest.mark.parametrize("head_dim", [64, 24])
def test_attention_that_rotates(with_norms: bool, head_dim: int) -> None:
    spec = replace(SPEC, head_dim=head_dim)
    rows = [(1, 12), (20, 5)]
    case = make_case(rows, spec)
    aside = replace(case.inputs, k_caches=[case.inputs.k_caches[0].clone()], v_caches=[case.inputs.v_caches[0].clone()])
    positions = torch.cat([torch.arange(c, c + q) for q, c in rows])
    angles = torch.outer(torch.arange(100.0), 1e3 ** -(torch.arange(0, head_dim, 2) / head_dim))
    table = torch.cat((angles.cos(), angles.sin()), -1)
    q_norm, k_norm = (torch.randn(head_dim), torch.randn(head_dim)) if with_norms else (None, None)
    actual = CpuAttention(case.inputs).forward_rope(
        spec, case.q, case.k, case.v, positions, table, q_norm=q_norm, k_norm=k_norm, eps=1e-6, offset=1.0
    )
    if q_norm is not None and k_norm is not None:
        q, k = rotary.qk_norm_rope(case.q, case.k, q_norm, k_norm, 1e-6, positions, table, offset=1.0)
    else:
        q, k = rotary.apply_rope(case.q, case.k, positions, table)
    expected = attention.forward(spec, aside, q, k, case.v)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(case.inputs.k_caches[0], aside.k_caches[0], rtol=1e-5, atol=1e-5)
