"""Products with packed weights: codes, blocks of GGUF files, experts of either."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
from random_codes import random_codes
from torch import Tensor

from bough.config.model_facts import ClampedGate
from bough.kernels.moe import Biases, reference as moe_reference
from bough.kernels.moe.grouping import group_tokens
from bough.kernels.packed_linear import reference as packed_reference, triton as packed
from bough.kernels.packed_linear.codes import Codes
from bough.kernels.packed_linear.groups import rounded_tokens
from bough.kernels.packed_linear.weight import FORMATS
from bough.kernels.packed_moe import reference as packed_moe_reference, triton as packed_moe
from bough.kernels.packed_moe.blocks_hopper import HEIGHT, RoundedRows, round_groups
from triton_cases.bed import FLOAT8, Bed, Cases, close, each_member, same_twice

A = TypeVar("A")
CODES: dict[str, dict[str, Any]] = {
    "int4": {"kind": "int4", "group": 128},
    "int4 zeros": {"kind": "int4", "group": 64, "zeros": True, "dtype": torch.bfloat16},
    "int4 small groups": {"kind": "int4", "group": 32, "zeros": True, "dtype": torch.float32},
    "int4 ordered": {"kind": "int4", "group": 128, "ordered": True},
    "int4 rows": {"kind": "int4", "group": 1 << 20, "zeros": True},
    "int8": {"kind": "int8", "group": 1 << 20, "dtype": torch.float32},
    "int8 zeros": {"kind": "int8", "group": 128, "zeros": True},
    "float4": {"kind": "float4", "group": 32, "dtype": torch.bfloat16},
    "float4 two levels": {"kind": "float4", "group": 16, "dtype": torch.bfloat16, "row_scales": True},
    "nf4": {"kind": "nf4", "group": 64, "dtype": torch.float32},
    "float8": {"kind": "float8", "group": 1 << 20, "dtype": torch.float32},
    "float8 small groups": {"kind": "float8", "group": 32, "dtype": torch.float32},
    "float8 blocks": {"kind": "float8", "group": 128, "rows": 128, "dtype": torch.float32},
}


def _codes(bed: Bed, name: str, shape: tuple[int, int]) -> Codes:
    given = {**CODES[name]}
    given["group"] = min(given["group"], shape[1])
    return random_codes(**given, shape=shape, seed=bed.rng.randrange(1 << 30), device=bed.device)


def packed_cases(bed: Bed) -> Cases:
    shapes = [(1, 4096, 4096), (7, 6144, 4096), (33, 1111, 640), (64, 4096, 2048), (200, 1040, 1024)]
    if not bed.large:
        shapes = [(1, 40, 256), (3, 64, 160), (17, 70, 128), (16, 17, 288), (66, 24, 96)]
    for dtype, shape, name in _covered(bed, shapes, list(CODES)):
        yield f"packed {shape} {name} {dtype}", partial(_packed, bed, shape, name, dtype)


def _covered(bed: Bed, shapes: Sequence[A], names: Sequence[str]) -> list[tuple[torch.dtype, A, str]]:
    """By the interpreter, which is slow, one dtype."""
    return bed.cover(bed.dtypes, shapes, names) if bed.large else each_member(bed.dtypes[:1], shapes, names)


def _packed(bed: Bed, shape: tuple[int, int, int], name: str, dtype: torch.dtype) -> None:
    tokens, rows, depth = shape
    codes = _codes(bed, name, (rows, depth))
    weight = packed.pack_codes(codes)
    assert weight.functions is packed
    dense = packed_reference.dequantise(packed_reference.pack_codes(codes.sorted()))
    torch.testing.assert_close(packed.dequantise(weight), dense, rtol=2e-7, atol=0)
    ids = torch.randint(0, rows, (tokens,), device=bed.device)
    assert torch.equal(packed.packed_rows(ids, weight, dtype), packed.dequantise(weight)[ids].to(dtype))
    x, bias = bed.normal(tokens, 2 * depth, dtype=dtype)[:, :depth], bed.normal(rows)
    want = torch.nn.functional.linear(x.float(), dense, bias)
    close(same_twice(partial(packed.packed_linear, x, weight, bias)), want.to(dtype), dtype)
    wide = torch.full((tokens, rows + 3), 7.0, dtype=dtype, device=bed.device)
    packed.packed_linear(x, weight, out=wide[:, 1 : rows + 1])
    close(wide[:, 1 : rows + 1], torch.nn.functional.linear(x.float(), dense).to(dtype), dtype)
    assert bool((wide[:, [0, -2, -1]] == 7).all())


def _blocks(bed: Bed, kind: str, shape: tuple[int, int]) -> Tensor:
    """Random blocks of a GGUF file, uint8 [rows, bytes of a row]; all floats in them are small."""
    form, (rows, cols) = FORMATS[kind], shape
    blocks = torch.randint(0, 256, (rows * cols // form.block, form.block_bytes), device=bed.device).to(torch.uint8)
    for at in FLOATS_AT[kind]:
        blocks[:, at : at + 2] = (torch.rand(len(blocks), 1, device=bed.device) * 0.01).half().view(torch.uint8)
    return blocks.view(rows, -1)


def gguf_cases(bed: Bed) -> Cases:
    shapes = [(1, 4096, 4096), (7, 6144, 4096), (33, 1111, 768), (64, 4096, 2048), (200, 1040, 1024)]
    if not bed.large:
        shapes = [(1, 40, 256), (3, 70, 512), (17, 33, 256), (66, 16, 256)]
    for dtype, shape, kind in _covered(bed, shapes, list(FLOATS_AT)):
        yield f"gguf {shape} {kind} {dtype}", partial(_gguf, bed, shape, kind, dtype)
    yield "gguf columns that end within a step", partial(_gguf, bed, (5, 24, 96), "Q5_1", bed.dtypes[0])
    for shape in (
        [(1, 64, 8, 2048, 768), (300, 32, 4, 512, 256)] if bed.large else [(1, 3, 2, 256, 32), (5, 3, 2, 256, 64)]
    ):
        yield f"gguf experts {shape}", partial(_gguf_experts, bed, shape, bed.dtypes[0])


def _gguf(bed: Bed, shape: tuple[int, int, int], kind: str, dtype: torch.dtype) -> None:
    tokens, rows, depth = shape
    raw = _blocks(bed, kind, (rows, depth))
    weight, dense = packed.pack(kind, raw, depth), packed_reference.unpack(kind, raw, depth)
    assert weight.functions is packed
    assert weight.num_bytes <= 1.05 * raw.numel() or depth % 64
    torch.testing.assert_close(packed.dequantise(weight), dense, rtol=1e-6, atol=1e-7)
    ids = torch.randint(0, rows, (tokens,), device=bed.device)
    assert torch.equal(packed.packed_rows(ids, weight, dtype), packed.dequantise(weight)[ids].to(dtype))
    x, bias = bed.normal(tokens, 2 * depth, dtype=dtype)[:, :depth], bed.normal(rows)
    want = torch.nn.functional.linear(x.float(), dense, bias)
    close(same_twice(partial(packed.packed_linear, x, weight, bias)), want.to(dtype), dtype)
    wide = torch.full((tokens, rows + 3), 7.0, dtype=dtype, device=bed.device)
    packed.packed_linear(x, weight, out=wide[:, 1 : rows + 1])
    close(wide[:, 1 : rows + 1], torch.nn.functional.linear(x.float(), dense).to(dtype), dtype)
    assert bool((wide[:, [0, -2, -1]] == 7).all())


def _gguf_experts(bed: Bed, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    tokens, experts, per_token, width, inner = shape
    first, second = bed.rng.choice(("Q4_K", "Q5_K", "Q6_K", "Q4_0")), bed.rng.choice(("Q4_1", "Q5_0", "Q8_0"))
    gate_up = [_blocks(bed, first, (2 * inner, width)) for _ in range(experts)]
    down = [_blocks(bed, second, (width, inner)) for _ in range(experts)]
    held = packed_moe.group_experts(
        [packed.pack(first, each, width) for each in gate_up], [packed.pack(second, each, inner) for each in down]
    )
    assert held is not None
    assert held.functions is packed_moe
    dense = [
        torch.stack([packed_reference.unpack(kind, each, cols) for each in stack])
        for kind, stack, cols in ((first, gate_up, width), (second, down, inner))
    ]
    x = bed.normal(tokens, width, dtype=dtype, scale=0.3)
    ids = torch.stack([torch.randperm(experts + 1, device=bed.device)[:per_token] for _ in range(tokens)]).int()
    shares = torch.rand(tokens, per_token, device=bed.device)
    want = moe_reference.fused_experts(x.float(), *dense, shares, ids)
    close(same_twice(partial(packed_moe.packed_experts, x, held, shares, ids)), want.to(dtype), dtype)


FLOATS_AT = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Where blocks have floats."""


def packed_moe_cases(bed: Bed) -> Cases:
    shapes = [(1, 64, 8, 2048, 768), (5, 16, 2, 256, 352), (300, 32, 4, 512, 256)]
    if not bed.large:
        shapes = [(1, 3, 2, 96, 32), (5, 3, 2, 64, 32)]
    names = [name for name in CODES if "ordered" not in name]
    if not bed.large:
        names = ["int4 zeros", "int4 rows", "float4 two levels", "float8 blocks"]
    for dtype, shape, name in _covered(bed, shapes, names):
        yield f"packed experts {shape} {name} {dtype}", partial(_packed_moe, bed, shape, name, dtype)
    clamped = [(40, 16, 4, 512, 352), (1400, 8, 2, 512, 352)] if bed.large else [(3, 3, 2, 64, 32)]
    for shape, name in product(clamped, ("float4", "int4 ordered")):
        yield f"packed experts {shape} {name} clamped", partial(_clamped_experts, bed, shape, name, bed.dtypes[0])
    for rows, width, powers in ((7, 384, False), (5, 1280, False), (150, 128, True)):
        yield f"rows rounded in groups {rows} x {width}", partial(_rounded_groups, bed, rows, width, powers)
    if bed.large:
        for name in ("float8 blocks", "int4 zeros", "float4"):
            shape = (1400, 8, 2, 512, 384)
            yield f"packed experts {shape} {name}", partial(_packed_moe, bed, shape, name, bed.dtypes[0])


def _rounded_groups(bed: Bed, rows: int, width: int, powers: bool) -> None:
    """Codes and scales are those of each 128 columns, and go with their rows where these are laid out by expert."""
    exact = bed.normal(rows, width // 128, 128).to(FLOAT8).float()  # in e4m3, whose largest value is in every group
    exact[..., 5] = -448
    scales = torch.exp2(torch.randint(-6, 6, (rows, width // 128), device=bed.device).float())
    x = bed.normal(rows, width + 8, dtype=torch.bfloat16)[:, :width]
    x.copy_((exact * scales[..., None]).view(rows, width))
    made = round_groups(x, power_of_two_scales=powers)
    assert torch.equal(made.scales, scales)
    assert torch.equal(made.codes.float().view_as(exact), exact)
    codes, by_group = rounded_tokens(x, rows + 3, powers=powers)
    assert torch.equal(codes.float().view_as(exact), exact)
    assert torch.equal(by_group[:, :rows].t(), scales)
    ids = torch.randint(0, 3, (rows, 1), dtype=torch.int32, device=bed.device)
    grouping, copied, _ = group_tokens(made.memory.view(torch.bfloat16), ids, 3, HEIGHT)
    laid_out = RoundedRows(copied.view(torch.uint8), width)
    places = grouping.places_Tk[:, 0].long()
    assert torch.equal(laid_out.codes.view(torch.uint8)[places], made.codes.view(torch.uint8))
    assert torch.equal(laid_out.scales[places], made.scales)


def _clamped_experts(bed: Bed, shape: tuple[int, int, int, int, int], name: str, dtype: torch.dtype) -> None:
    """With biases, and with columns of each expert in an order of its own."""
    tokens, experts, per_token, width, inner = shape
    gate_up = [_codes(bed, name, (2 * inner, width)).sorted() for _ in range(experts)]
    down = [_codes(bed, name, (width, inner)).sorted() for _ in range(experts)]
    biases = Biases(bed.normal(experts, 2 * inner, dtype=dtype), bed.normal(experts, width, dtype=dtype))
    clamp = ClampedGate(alpha=1.7, limit=0.9)
    x = bed.normal(tokens, width, dtype=dtype, scale=0.3)
    ids = torch.stack([torch.randperm(experts + 1, device=bed.device)[:per_token] for _ in range(tokens)]).int()
    shares = torch.rand(tokens, per_token, device=bed.device)
    dense = [
        torch.stack([packed_reference.dequantise(packed_reference.pack_codes(each)) for each in stack])
        for stack in (gate_up, down)
    ]
    held, plain = packed_moe.pack_experts(gate_up, down, biases), packed_moe.pack_experts(gate_up, down)
    assert held is not None
    assert plain is not None
    want = moe_reference.biased_experts(x.float(), *dense, biases, shares, ids, clamp.alpha, clamp.limit)
    got = same_twice(partial(packed_moe.packed_experts, x, held, shares, ids, "silu", clamp))
    close(got, want.to(dtype), dtype)
    want = moe_reference.fused_experts(x.float(), *dense, shares, ids)
    close(same_twice(partial(packed_moe.packed_experts, x, plain, shares, ids)), want.to(dtype), dtype)


def _packed_moe(bed: Bed, shape: tuple[int, int, int, int, int], name: str, dtype: torch.dtype) -> None:
    tokens, experts, per_token, width, inner = shape
    gate_up = [_codes(bed, name, (2 * inner, width)) for _ in range(experts)]
    down = [_codes(bed, name, (width, inner)) for _ in range(experts)]
    held = packed_moe.pack_experts(gate_up, down)
    assert held is not None
    dense = [
        torch.stack([packed_reference.dequantise(packed_reference.pack_codes(each)) for each in stack])
        for stack in (gate_up, down)
    ]
    x = bed.normal(tokens, width, dtype=dtype, scale=0.3)
    ids = torch.stack([torch.randperm(experts + 1, device=bed.device)[:per_token] for _ in range(tokens)]).int()
    shares = torch.rand(tokens, per_token, device=bed.device)
    activation = bed.rng.choice(("silu", "gelu_tanh"))
    want = moe_reference.fused_experts(x.float(), *dense, shares, ids, activation)
    got = same_twice(partial(packed_moe.packed_experts, x, held, shares, ids, activation))
    close(got, want.to(dtype), dtype)
    plain = packed_moe_reference.pack_experts(gate_up, down)
    assert plain is not None
    want = moe_reference.fused_experts(x.float(), *dense, shares, ids)
    got = packed_moe_reference.packed_experts(x.float(), plain, shares, ids)
    assert float((got - want).norm()) < 0.03 * float(want.norm())  # a CPU may round activations to 8 bits
