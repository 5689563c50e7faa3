"""Which configuration of the skinny kernel serves a shape: what was measured, and on Hopper a rule for what was not.

Measurements come with the package for devices that were at hand (`measured/`), and from a JSON file in the user's cache
directory, which `tune` writes and which wins. A lookup never measures, so it is safe while a graph is captured.
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import torch
import triton

from bough.config.cache_directory import cache_directory
from bough.kernels.launching import num_sms
from bough.kernels.linear.ring import is_ready
from bough.kernels.linear.skinny import SkinnyTiling
from bough.platform.whole_file import write_whole

log = logging.getLogger("bough.kernels")

TOKEN_BUCKETS = (4, 16, 32, 64, 128, 256)

Entries = dict[str, SkinnyTiling | None]
"""None: the vendor's library won."""


def entry_name(operation: str, tokens: int, rows: int, depth: int, dtype: torch.dtype) -> str:
    bucket = next(b for b in TOKEN_BUCKETS if tokens <= b)
    return f"{operation}/{bucket}/{rows}x{depth}/{str(dtype).removeprefix('torch.')}"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device).lower().replace(" ", "-") if device.type == "cuda" else device.type


def table_path(device: torch.device) -> Path:
    """Where the user's measurements lie. Raises `OSError` where there is no directory of the user's to keep them in."""
    return cache_directory() / f"linear-{device_name(device)}-triton-{triton.__version__}.json"


@cache
def entries(device: torch.device) -> Entries:
    """The measured entries of a device; shared and mutable, so that tuning takes effect at once."""
    shipped = Path(__file__).parent / "measured" / f"{device_name(device)}.json"
    found: Entries = {}
    paths = [shipped]
    with contextlib.suppress(OSError):
        paths.append(table_path(device))
    for path in paths:
        try:
            rows = json.loads(path.read_text()).items()
            found |= {key: None if value is None else SkinnyTiling(**value) for key, value in rows}
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, AttributeError) as error:  # the user's, of another version or broken
            log.warning("the measurements in %s are left aside: %s", path, error)
    return found


def save(device: torch.device) -> Path:
    """Writes the device's entries, replacing the file in one move."""
    path = table_path(device)
    table = {key: None if config is None else asdict(config) for key, config in sorted(entries(device).items())}
    write_whole(path, json.dumps(table, indent=1).encode())
    return path


def early(operation: str, depth: int = 4096) -> SkinnyTiling:
    """The configuration of `ring` that was best, or nearly, for all of a Llama's products with up to 32 tokens.

    It must be measured between the kernels of a model: what it gains is time in which memory would be idle. Eight stages
    leave room in a multiprocessor for the kernels before and after. A `depth` in no whole steps of 128, as gpt-oss has,
    takes twice as many of half the size.
    """
    if operation == "silu_mul":
        return SkinnyTiling(64, 64, 4, 8, 1, tma=True, ring=True)
    short = depth % 128 != 0
    return SkinnyTiling(64, 64 if short else 128, 4, 16 if short else 8, 1, tma=True, ring=True)


_EARLY_TOKENS = 32
_SHORT_TOKENS = 15
"""The same of a depth in no whole steps of 128, where the weight is smaller than `_LARGE_BYTES`. On an H200 a product with
5120 x 2880 takes 10.9 us for 4 tokens and 13.0 for 24, in the library 10.5 and 10.6; one with 201088 x 2880 276 and 278, in
the library 278 and 284."""
_LARGE_BYTES = 256 << 20
_EARLY_BYTES = 8 << 20
"""A smaller weight comes from the cache, or is read in less time than starting takes."""


def at_once(rows: int, depth: int, multiprocessors: int) -> SkinnyTiling | None:
    """The configuration for a weight that the rings of all multiprocessors hold: each reads a part of a tile's depth, as
    long as its ring, so that all of the weight is asked for at the beginning. None: it is larger.

    On an H200 with a norm before it, us in the library, by `early`, and so: 3648 x 2048 with 1 token 8.7, 7.6 and 6.8, with
    4 tokens 8.7, 7.7 and 7.0, with 24 9.4, 10.0 and 8.7; 2048 x 2048 with 1 token 7.9, 5.6 and 5.3, with 4 7.9, 5.8 and 5.5,
    with 24 8.2, 8.2 and 6.5. Twice as many parts, half as long, took 9.1 and 5.7 with 4 tokens.
    """
    config = early("linear")
    split = -(-depth // (config.block_k * config.num_stages))
    if depth % config.block_k or -(-rows // config.block_n) * split > multiprocessors:
        return None
    return replace(config, programs_per_sm=0, split=split)


def choose(
    operation: str, tokens: int, rows: int, depth: int, dtype: torch.dtype, device: torch.device
) -> SkinnyTiling | None:
    """`operation` is "linear" or "silu_mul"; `rows` and `depth` are the weight's. None: the vendor's library."""
    name = entry_name(operation, tokens, rows, depth, dtype)
    measured = entries(device)
    if name in measured:
        return measured[name]
    config = early(operation, depth)
    if operation == "linear":
        config = at_once(rows, depth, num_sms(device)) or config
    held = 2 * rows * depth
    most = _SHORT_TOKENS if depth % 128 and held < _LARGE_BYTES else _EARLY_TOKENS
    if tokens > most or held < _EARLY_BYTES:
        return None
    halves = 2 if operation == "silu_mul" else 1
    fits = rows % (halves * config.block_n) == 0 and depth % config.block_k == 0
    return config if fits and is_ready(device) else None
