"""Quantised weights of random codes, for tests of packed kernels."""

from __future__ import annotations

from typing import Any

import torch

from bough.kernels.packed_linear import Codes


def random_codes(
    kind: Any,
    group: int,
    *,
    rows: int = 1,
    zeros: bool = False,
    dtype: torch.dtype = torch.float16,
    row_scales: bool = False,
    ordered: bool = False,
    seed: int = 0,
    shape: tuple[int, int] = (53, 512),
    device: torch.device | str = "cpu",
) -> Codes:
    draws: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    most = 256 if kind in ("int8", "float8") else 16
    values = torch.randint(0, most, shape, dtype=torch.uint8, **draws)
    if kind == "float8":
        values = torch.randn(shape, **draws).to(torch.float8_e4m3fn)
    scales = (-(-shape[0] // rows), -(-shape[1] // group))
    return Codes(
        kind,
        values,
        (torch.rand(scales, **draws) * 0.02 + 0.001).to(dtype),
        group,
        rows=rows,
        zero_OG=torch.randint(0, most, scales, dtype=torch.uint8, **draws) if zeros else None,
        row_scale_O=torch.rand(shape[0], **draws) + 0.5 if row_scales else None,
        group_of_D=torch.randperm(shape[1], **draws) // group if ordered else None,
    )
