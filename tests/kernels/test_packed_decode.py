"""The instructions that make bfloat16 of packed codes, run one by one on integers, against what the codes are worth."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

from bough.kernels.packed_linear import decode
from bough.kernels.packed_linear.codes import TABLES

AND_OR = "0xEA"
"""lop3 of this number is (a & b) | c."""


def bfloat16(bits: int) -> float:
    signed = torch.tensor([bits & 0xFFFF], dtype=torch.int32).to(torch.int16)
    return float(signed.view(torch.bfloat16).double())


def bits_of(value: float) -> int:
    return int(torch.tensor([value]).bfloat16().view(torch.int16)) & 0xFFFF


def execute(code: str, packed: int, more: Sequence[int] = ()) -> list[float]:
    """What the two outputs hold: four numbers."""
    registers = {"$2": packed, **{f"${3 + place}": value for place, value in enumerate(more)}}
    out: dict[str, list[float]] = {}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in code.strip("{}\n ").splitlines():
        if not line.strip() or line.startswith(".reg"):
            continue
        operation, _, rest = line.rstrip(";").partition(" ")
        target, *names = [name.strip() for name in rest.split(",")]
        match operation:
            case "mov.b32":
                registers[target] = value(names[0])
            case "prmt.b32":
                of = [value(name) >> 8 * byte & 255 for name in names[:2] for byte in range(4)]
                registers[target] = sum(of[value(names[2]) >> 4 * byte & 7] << 8 * byte for byte in range(4))
            case "shr.b32":
                registers[target] = value(names[0]) >> value(names[1])
            case "shl.b32":
                registers[target] = value(names[0]) << value(names[1]) & 0xFFFFFFFF
            case "and.b32":
                registers[target] = value(names[0]) & value(names[1])
            case "lop3.b32":
                assert names[3] == AND_OR
                registers[target] = value(names[0]) & value(names[1]) | value(names[2])
            case "fma.rn.bf16x2":
                halves = [[bfloat16(value(name) >> shift) for name in names] for shift in (0, 16)]
                out[target] = [a * b + c for a, b, c in halves]
            case _:
                raise AssertionError(operation)
    return out["$0"] + out["$1"]


def test_every_code_is_worth_what_its_format_says() -> None:
    rng = random.Random(0)
    codes = [*range(256), *(rng.randrange(256) for _ in range(256))]
    for first in range(0, len(codes), 4):
        four = codes[first : first + 4]
        packed = sum(code << 8 * place for place, code in enumerate(four))
        floats = torch.tensor(four, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
        for code, got, want in zip(four, execute(decode.FLOAT8_PAIRS.value, packed), floats, strict=True):
            assert got == want or code & 127 == 127  # not a number: no weight is
        for halves, nibbles in (("LOW", [code & 15 for code in four]), ("HIGH", [code >> 4 for code in four])):
            got = execute(getattr(decode, f"{halves}_FLOAT4").value, packed)
            assert got == [TABLES["float4"][nibble] for nibble in nibbles]
            zeros = [rng.randrange(16) for _ in four]
            less = [bits_of(-128.0 - zero) for zero in zeros]
            got = execute(
                getattr(decode, f"{halves}_INT4").value, packed, [less[0] | less[1] << 16, less[2] | less[3] << 16]
            )
            assert got == [nibble - zero for nibble, zero in zip(nibbles, zeros, strict=True)]
