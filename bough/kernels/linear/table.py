"""Which configuration of the skinny kernel serves a shape: measured ones first, a rule of thumb where nothing was measured.

Measurements live in a JSON file of the user's cache directory, one a device and Triton version; `tune` makes them. A lookup
never measures, so it is safe while a graph is captured.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
import triton

from bough.kernels.choices import facts_of
from bough.kernels.linear.skinny import Config

TOKEN_BUCKETS = (4, 16, 32, 64, 128, 256)
_SMALLEST_WEIGHT = 1 << 20
"""Elements below which the vendor's library is left alone."""

Entries = dict[str, Config | None]
"""None: the vendor's library won."""


def entry_name(operation: str, tokens: int, rows: int, depth: int, dtype: torch.dtype) -> str:
    bucket = next(b for b in TOKEN_BUCKETS if tokens <= b)
    return f"{operation}/{bucket}/{rows}x{depth}/{str(dtype).removeprefix('torch.')}"


def table_path(device: torch.device) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    return root / "bough" / f"linear-{name}-triton-{triton.__version__}.json"


@cache
def entries(device: torch.device) -> Entries:
    """The measured entries of a device; shared and mutable, so that tuning takes effect at once."""
    path = table_path(device)
    if not path.exists():
        return {}
    return {key: None if value is None else Config(**value) for key, value in json.loads(path.read_text()).items()}


def save(device: torch.device) -> Path:
    """Writes the device's entries, replacing the file in one move."""
    path = table_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {key: None if config is None else asdict(config) for key, config in sorted(entries(device).items())}
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(table, indent=1))
    draft.replace(path)
    return path


def choose(
    operation: str, tokens: int, rows: int, depth: int, dtype: torch.dtype, device: torch.device
) -> Config | None:
    """`operation` is "linear" or "silu_mul"; `rows` and `depth` are the weight's. None: the vendor's library."""
    measured = entries(device)
    key = entry_name(operation, tokens, rows, depth, dtype)
    return measured[key] if key in measured else rule_of_thumb(operation, tokens, rows, depth, device)


@cache
def rule_of_thumb(operation: str, tokens: int, rows: int, depth: int, device: torch.device) -> Config | None:
    """Below 65 tokens a weight of some size is read faster by the skinny kernel than by the library."""
    if tokens > 64 or rows * depth < _SMALLEST_WEIGHT or depth % 16:
        return None
    hopper = facts_of(device.type, device.index).capability >= (9, 0)
    halves = 2 if operation == "silu_mul" else 1
    if tokens <= 32:
        return Config(64 // halves if not hopper else 64, 128, 4, 4 // halves + 1, 2, prefetch_bytes=4096, tma=hopper)
    return Config(128 // halves, 64, 4, 4, 2, prefetch_bytes=2048, tma=hopper)
