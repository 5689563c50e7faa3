"""Causal attention of fresh rows on Hopper, ragged, in one launch: the kernel is `fresh_hopper.cu`, this is its door.

A step's rows are cut into tiles once; every layer then works the same tiles off. The list of tiles is a parameter of the
launch: nothing is uploaded, and nothing waits. In a captured graph, whose rows are known on the device alone, the tiles are
listed there (`plan.list_fresh`), and a launch has room for all that there may be.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bough.kernels.ahead import rehearsed
from bough.kernels.cuda_source import (
    CudaKernel,
    StreamNumbers,
    cached_cubin,
    can_map,
    current_stream,
    runs_on,
    tensor_map,
)

SOURCE = Path(__file__).with_suffix(".cu")
TILE = 128
"""Query tokens of a tile, and tokens of a block of K or V."""
PLACES = 448
"""Tiles of tokens in one launch, so that all its parameters fit into 4 KB; longer lists take several launches."""
_STAGES = 5
_THREADS = 384

Rows = tuple[tuple[int, int], ...]
"""(first token, tokens) of each row."""


class Place(ctypes.Structure):
    """As in the source."""

    _fields_ = (("first", ctypes.c_int), ("number", ctypes.c_uint16), ("tokens", ctypes.c_uint16))


_PLACE = struct.Struct("iHH")


class _Args(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("listed", ctypes.c_void_p),
        ("num_listed", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("stream", "num_places", "heads", "heads_per_kv", "section", "out_token")),
        ("window", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("places", Place * PLACES),
    )
    num_places: int
    listed: int | None
    num_listed: int | None
    places: ctypes.Array[Place]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Where the tiles of a step's rows lie. The same for all layers and heads."""

    launches: tuple[bytes, ...]
    """`Place`s in a row, those with the most work first."""
    tokens: int
    """The last row ends there."""
    longest: int
    """Tokens of the longest row."""


@dataclass(frozen=True, slots=True)
class Listed:
    """The same, found by the device."""

    places: Tensor
    """int32 [most places, 2]: `Place`s, those with the most work first."""
    count: Tensor
    """int32 [1]: how many of them there are."""
    longest: int
    """No row has more tokens."""


@lru_cache(maxsize=64)
def cut(rows: Rows) -> Tiles:
    """The tiles of rows. Kept, since all layers of a step ask for the same."""
    # In plain Python: a lone prompt has few tiles, and the device is idle until its first layer is launched.
    tiles = [
        (number, first, min(length - number * TILE, TILE))
        for first, length in rows
        for number in range(-(-length // TILE))
    ]
    tiles.sort(key=itemgetter(0), reverse=True)
    places = [_PLACE.pack(first, number, tokens) for number, first, tokens in tiles]
    launches = tuple(b"".join(places[at : at + PLACES]) for at in range(0, len(places), PLACES))
    return Tiles(launches, max(first + length for first, length in rows), max(length for _, length in rows))


def suits(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, window: int | None = None, sinks: Tensor | None = None
) -> bool:
    """Whether the kernel computes causal attention of these, on this device."""
    return (
        is_ready(q_TNH, k_TKH, window=window, sinks=sinks)
        and q_TNH.shape[2] == v_TKH.shape[2]
        and q_TNH.dtype == k_TKH.dtype == v_TKH.dtype
        and can_map(q_TNH)
        and can_map(k_TKH)
        and can_map(v_TKH)
    )


def is_ready(q_TNH: Tensor, k_TKH: Tensor, *, window: int | None = None, sinks: Tensor | None = None) -> bool:
    """Whether the kernel is compiled for these numbers of heads and this dtype on this device."""
    form = Form(q_TNH.dtype, q_TNH.shape[2], _in_pairs(q_TNH, k_TKH), sinks is not None, window is not None)
    return _is_ready(q_TNH.device, form)


def can_rotate(cos_sin_PR: Tensor, head_dim: int) -> bool:
    """Whether the kernel rotates queries by this table itself: it turns whole heads, by float32."""
    return cos_sin_PR.shape[1] == head_dim and cos_sin_PR.dtype == torch.float32 and cos_sin_PR.is_contiguous()


def attend(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    rows: Rows | Listed,
    scale: float,
    out_TNH: Tensor,
    cos_sin_PR: Tensor | None = None,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Fills `out_TNH`, contiguous but for its tokens' stride, for the rows; other tokens stay. Needs `suits`.

    `window` and `sinks` are those of `AttentionSpec`. With `cos_sin_PR`, which it `can_rotate` by, the queries are not
    rotated yet: those of a row are at positions 0, 1, ...
    """
    tiles, device = rows if isinstance(rows, Listed) else cut(rows), q_TNH.device
    if cos_sin_PR is not None and tiles.longest > cos_sin_PR.shape[0]:
        raise ValueError(f"a row of {tiles.longest} tokens can't be rotated to {cos_sin_PR.shape[0]} positions")
    num_tokens, heads, head_dim = q_TNH.shape
    end = num_tokens if isinstance(tiles, Listed) else tiles.tokens
    if end > num_tokens or out_TNH.stride(1) != head_dim or out_TNH.stride(0) % 8 or out_TNH.data_ptr() % 16:
        raise ValueError(f"rows up to token {end} into {tuple(out_TNH.shape)} with strides {out_TNH.stride()}")
    kv_heads, pair = k_TKH.shape[1], _in_pairs(q_TNH, k_TKH)
    loaded = _loaded(device, Form(q_TNH.dtype, head_dim, pair, sinks is not None, window is not None))
    share = TILE // (1 + pair)
    maps = (tensor_map(q_TNH, TILE), tensor_map(k_TKH, share), tensor_map(v_TKH, share))
    stream = current_stream(device)
    args = _Args(
        out=out_TNH.data_ptr(), table=None if cos_sin_PR is None else cos_sin_PR.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(), window=window or 0,
        stream=loaded.streams.of(stream), heads=heads, heads_per_kv=heads // kv_heads,
        section=section(tiles.longest, heads, kv_heads, head_dim, loaded.cache_bytes), out_token=out_TNH.stride(0),
        scale=scale * math.log2(math.e),
    )  # fmt: skip
    if isinstance(tiles, Listed):
        args.listed, args.num_listed = tiles.places.data_ptr(), tiles.count.data_ptr()
        loaded.kernel.launch(min(loaded.most_blocks, len(tiles.places) * heads), [*maps, args], stream)
        return
    for places in tiles.launches:
        args.num_places = len(places) // ctypes.sizeof(Place)
        ctypes.memmove(args.places, places, len(places))
        loaded.kernel.launch(min(loaded.most_blocks, args.num_places * heads), [*maps, args], stream)


def section(longest: int, heads: int, kv_heads: int, head_dim: int, cache_bytes: int) -> int:
    """Heads that are worked off before the next begin: all, unless a row's K and V would push each other out of the cache.

    Each half of the cache keeps what its multiprocessors read, so half of it counts. Fewer heads at a time have a price:
    the last tiles to begin are longer, and multiprocessors end less alike.
    """
    kv_head_bytes = 2 * longest * head_dim * 2
    if kv_head_bytes * kv_heads <= cache_bytes // 2:
        return heads
    fitting = [n for n in range(1, kv_heads) if kv_heads % n == 0 and n * kv_head_bytes <= cache_bytes // 4]
    return heads // kv_heads * max(fitting, default=1)


def _in_pairs(q_TNH: Tensor, k_TKH: Tensor) -> bool:
    """Whether two blocks take two heads of a KV head, and fetch K and V together."""
    return q_TNH.shape[1] // k_TKH.shape[1] % 2 == 0


def shared_bytes(head_dim: int) -> int:
    """Two tiles of queries, the ring, barriers and tiles' names, and room to align them all to 1024."""
    return (2 + _STAGES) * TILE * head_dim * 2 + 16 * _STAGES + 112 + 1024


class Form(NamedTuple):
    """What a kernel is compiled for. `pair`: two blocks work on two heads together."""

    dtype: torch.dtype
    head_dim: int
    pair: bool
    sinks: bool = False
    windowed: bool = False


def defines(form: Form) -> Mapping[str, int]:
    """What the source is given."""
    return {
        "D": form.head_dim,
        "FP16": int(form.dtype == torch.float16),
        "CTAS": 1 + form.pair,
        "STAGES": _STAGES,
        "PLACES": PLACES,
        "STREAMS": StreamNumbers.MOST,
        "SINKS": int(form.sinks),
        "WINDOWED": int(form.windowed),
    }


@dataclass(frozen=True, slots=True)
class _Loaded:
    kernel: CudaKernel
    most_blocks: int
    """That run at once."""
    cache_bytes: int
    """Of the device's second level."""
    streams: StreamNumbers = field(default_factory=partial(StreamNumbers, "attention over fresh rows is launched"))


@rehearsed
@cache
def _loaded(device: torch.device, form: Form) -> _Loaded:
    cubin = cached_cubin(SOURCE, "sm_90a", defines(form))
    kernel = CudaKernel(cubin, "fresh_attention", device, _THREADS, shared_bytes(form.head_dim))
    facts = torch.cuda.get_device_properties(device)
    most_blocks = 2 * kernel.most_clusters(2) if form.pair else facts.multi_processor_count
    return _Loaded(kernel, most_blocks, facts.L2_cache_size)


@rehearsed
@cache
def _is_ready(device: torch.device, form: Form) -> bool:
    if form.dtype not in (torch.bfloat16, torch.float16) or form.head_dim not in (64, 128):
        return False
    is_plain = not form.sinks and not form.windowed
    other = "cuDNN" if is_plain else "the portable kernel"
    return runs_on(device, partial(_loaded, device, form), f"rows without context are attended to by {other}")
