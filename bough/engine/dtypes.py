"""The configuration's names of types, as torch has them."""

from __future__ import annotations

from typing import Final

import torch

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.uint8,
    "int4": torch.uint8,
}
