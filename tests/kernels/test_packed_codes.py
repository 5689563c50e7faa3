"""Weights given as codes and scales: what they are worth, and products with them, against plain arithmetic on floats."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from random_codes import random_codes
from torch import Tensor

from bough.kernels import packed_linear as packed
from bough.kernels.packed_linear import Codes, cpu, reference
from bough.kernels.packed_linear.codes import can_stack, dequantise_codes, stack

COMPILED = pytest.mark.skipif(not cpu.available(), reason="no compiler")
IMPLEMENTATIONS = [reference, pytest.param(cpu, marks=COMPILED)]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
ROWS, COLS = 53, 512
CASES: dict[str, dict[str, Any]] = {
    "int4": {"kind": "int4", "group": 128},
    "int4 zeros": {"kind": "int4", "group": 64, "zeros": True, "dtype": torch.bfloat16},
    "int4 float32": {"kind": "int4", "group": 32, "zeros": True, "dtype": torch.float32},
    "int4 ordered": {"kind": "int4", "group": 128, "zeros": True, "ordered": True},
    "int8": {"kind": "int8", "group": COLS, "dtype": torch.float32},
    "int8 zeros": {"kind": "int8", "group": 128, "zeros": True},
    "int8 blocks": {"kind": "int8", "group": 128, "rows": 16, "dtype": torch.float32},
    "float4": {"kind": "float4", "group": 32, "dtype": torch.bfloat16},
    "float4 two levels": {"kind": "float4", "group": 16, "dtype": torch.bfloat16, "row_scales": True},
    "nf4": {"kind": "nf4", "group": 64, "dtype": torch.float32},
    "bnb_fp4": {"kind": "bnb_fp4", "group": 64, "dtype": torch.float32},
    "float8": {"kind": "float8", "group": COLS, "dtype": torch.float32},
    "float8 blocks": {"kind": "float8", "group": 128, "rows": 128, "dtype": torch.float32},
}


def worth(codes: Codes) -> Tensor:
    """Weight by weight."""
    out = torch.empty(codes.shape, dtype=torch.float32)
    group_of = codes.group_of_D
    for row in range(codes.shape[0]):
        for col in range(codes.shape[1]):
            at = (row // codes.rows, col // codes.group if group_of is None else int(group_of[col]))
            code = codes.values_OD[row, col]
            if codes.kind == "float8":
                value = code.float()
            elif codes.kind in ("int4", "int8"):
                zero = (8 if codes.kind == "int4" else 128) if codes.zero_OG is None else int(codes.zero_OG[at])
                value = torch.tensor(float(int(code) - zero))
            else:
                table = E2M1 if codes.kind == "float4" else BNB[codes.kind]
                value = torch.tensor(table[int(code)])
            out[row, col] = value * codes.scale_OG[at].float()
    return out if codes.row_scale_O is None else out * codes.row_scale_O[:, None]


# bitsandbytes.functional.get_4bit_type, of 0.50
BNB = {
    "nf4": [
        -1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
        0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0,
    ],
    "bnb_fp4": [
        sign * value for sign in (1, -1) for value in (0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_codes_are_worth(case: str) -> None:
    codes = random_codes(**CASES[case], shape=(3, 256))
    torch.testing.assert_close(dequantise_codes(codes), worth(codes), rtol=2e-7, atol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_packed_codes_keep_every_bit(implementation: Any, case: str) -> None:
    codes = random_codes(**CASES[case])
    weight, expected = implementation.pack_codes(codes), dequantise_codes(codes)
    assert weight.functions is implementation
    assert torch.equal(packed.dequantise(weight), expected)
    ids = torch.tensor([[52, 0], [5, 5]])
    assert torch.equal(packed.packed_rows(ids, weight, torch.float32), expected[ids])
    assert torch.equal(packed.packed_rows(ids, weight, torch.bfloat16), expected[ids].bfloat16())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_products(implementation: Any, case: str) -> None:
    codes = random_codes(**CASES[case])
    weight, values = implementation.pack_codes(codes), dequantise_codes(codes).double()
    bias = torch.randn(ROWS)
    for tokens in (1, 2, 3, 5, 13, 40):
        x = torch.randn(tokens, COLS, generator=torch.Generator().manual_seed(tokens))
        expected = (x.double() @ values.T + bias).float()
        top = float(expected.abs().max())
        torch.testing.assert_close(packed.packed_linear(x, weight, bias, exact=True), expected, rtol=0, atol=3e-6 * top)
        rounds = codes.kind in ("int4", "int8", "float4") and implementation is cpu
        torch.testing.assert_close(
            packed.packed_linear(x, weight, bias), expected, rtol=0, atol=(2e-2 if rounds else 3e-6) * top
        )


@COMPILED
def test_groups_the_compiled_kernels_lack_are_left_to_the_reference() -> None:
    assert cpu.pack_codes(random_codes("int4", 16)).functions is reference
    assert cpu.pack_codes(random_codes("int4", 48, shape=(8, 48))).functions is reference


@pytest.mark.parametrize(
    ("rows", "cols"), [((0, 53), (64, 512)), ((8, 40), (32, 320)), ((3, 7), (0, 512)), ((16, 53), (0, 128))]
)
@pytest.mark.parametrize("case", ["int4 zeros", "float8 blocks", "int8 blocks", "float4 two levels", "int4 ordered"])
def test_a_cut_repeats_scales_where_it_must(case: str, rows: tuple[int, int], cols: tuple[int, int]) -> None:
    codes = random_codes(**CASES[case])
    part = codes.cut(slice(*rows), slice(*cols))
    assert torch.equal(dequantise_codes(part), dequantise_codes(codes)[slice(*rows), slice(*cols)])
    if cpu.available():
        assert torch.equal(packed.dequantise(cpu.pack_codes(part)), dequantise_codes(part))


def test_a_share_of_every_group_is_padded_to_whole_blocks() -> None:
    codes = random_codes("int4", 128, zeros=True, ordered=True)
    for part in (codes.cut(slice(None), slice(0, 256)), codes.cut(slice(None), slice(256, 512))):
        weight = packed.pack_codes(part)
        assert weight.cols == 256
        expected = dequantise_codes(part)
        assert torch.equal(packed.dequantise(weight), expected)
        x = torch.randn(5, 256)
        torch.testing.assert_close(packed.packed_linear(x, weight, exact=True), x @ expected.T, rtol=0, atol=1e-4)


def test_columns_that_are_in_order_after_all_are_not_reordered() -> None:
    codes = dataclasses.replace(random_codes("int4", 128), group_of_D=torch.arange(COLS) // 128)
    assert codes.sorted().order_D is None
    assert torch.equal(dequantise_codes(codes.sorted()), dequantise_codes(codes))


def test_stacked_parts() -> None:
    above = random_codes("int4", 128, zeros=True, shape=(32, COLS))
    below = random_codes("int4", 64, dtype=torch.bfloat16, seed=1, shape=(21, COLS))
    both = stack([above, below])
    assert torch.equal(dequantise_codes(both), torch.cat([dequantise_codes(above), dequantise_codes(below)]))
    blocks = [random_codes("float8", 128, rows=128, dtype=torch.float32, shape=(rows, COLS)) for rows in (128, 60, 128)]
    assert stack(blocks[:2]).rows == 128
    for parts in (blocks[:2], blocks):
        assert torch.equal(dequantise_codes(stack(parts)), torch.cat([dequantise_codes(part) for part in parts]))
    assert can_stack(above, below)
    assert not can_stack(above, blocks[0])
    assert not can_stack(above.sorted(), random_codes("int4", 128, ordered=True, shape=(32, COLS)).sorted())
