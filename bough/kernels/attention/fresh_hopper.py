"""Causal attention of fresh rows on Hopper, ragged, in one launch: the kernel is `fresh_hopper.cu`, this is its door.

A step's rows are cut into tiles once; every layer then works the same tiles off. With the log-sum-exps, the result can be
merged with that of a part of the context that lies in pages.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bough.kernels.attention.inputs import Spec
from bough.kernels.choices import facts_of
from bough.kernels.cuda_source import CudaKernel, TensorMap, cached_cubin, can_map, tensor_map

SOURCE = Path(__file__).with_suffix(".cu")
TILE = 128
"""Query tokens of a tile."""
KV_BLOCK = 128
"""Tokens of K, and of V, that lie in a stage of the ring."""
_THREADS = 384
_ARGS = struct.Struct("PPPPiiiiif")


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the kernel is built."""

    pair: bool = False
    """Two blocks take two heads of a KV head, and fetch K and V together."""
    stages: int = 5
    """Blocks of K or V in shared memory."""
    queries_in_registers: bool = False
    """Read from shared memory once a tile, not once a block."""

    @property
    def blocks(self) -> int:
        """That work together."""
        return 1 + self.pair

    def defines(self, dtype: torch.dtype, head_dim: int) -> Mapping[str, int]:
        return {
            "D": head_dim,
            "FP16": int(dtype == torch.float16),
            "CTAS": self.blocks,
            "STAGES": self.stages,
            "Q_REGISTERS": int(self.queries_in_registers),
        }

    def shared_bytes(self, head_dim: int) -> int:
        """Two tiles of queries, the ring, barriers and tiles' names, and room to align them all to 1024."""
        return (2 * TILE + self.stages * KV_BLOCK) * head_dim * 2 + 16 * self.stages + 112 + 1024


DEFAULT = Tiling()


@dataclass(frozen=True, slots=True)
class Tiles:
    """Where the tiles of a step's rows begin. The same for all layers and heads."""

    at_X4: Tensor
    """int32: first token and tokens of the row, number of the tile in it, 0; the most work first."""
    tokens: int
    """The last row ends there."""
    tiling: Tiling


def cut(rows: Sequence[tuple[int, int]], device: torch.device, tiling: Tiling = DEFAULT) -> Tiles:
    """The tiles of rows given as (first token, tokens)."""
    lengths = np.array([length for _, length in rows], dtype=np.int32)
    counts = -(-lengths // TILE)
    row = np.repeat(np.arange(len(rows)), counts)
    number = np.arange(len(row), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts).astype(np.int32)
    first = np.array([first for first, _ in rows], dtype=np.int32)
    table = np.stack([first[row], lengths[row], number, np.zeros_like(number)], axis=1)
    order = np.argsort(-number, kind="stable")
    return Tiles(torch.from_numpy(table[order]).to(device), max(first + length for first, length in rows), tiling)


def suits(spec: Spec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> bool:
    """Whether the kernel computes this layer on this device."""
    return (
        facts_of(q_TNH.device.type, q_TNH.device.index).capability == (9, 0)
        and q_TNH.shape[2] in (64, 128)
        and q_TNH.shape[2] == v_TKH.shape[2]
        and spec.causal
        and spec.window is None
        and spec.softcap is None
        and all(x.stride(1) == x.shape[2] and can_map(x.flatten(1)) for x in (q_TNH, k_TKH, v_TKH))
    )


def attend(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    tiles: Tiles,
    scale: float,
    out_TNH: Tensor,
    *,
    lse_TN: Tensor | None = None,
    section: int | None = None,
) -> None:
    """Fills `out_TNH`, contiguous but for its tokens' stride, for the rows that were cut into `tiles`; other rows stay.

    `lse_TN`, float32, gets the logarithm to base 2 of the sum of each query's weights. `section`: heads that are worked off
    before the next ones begin.
    """
    device, tiling = q_TNH.device, tiles.tiling
    num_tokens, heads, head_dim = q_TNH.shape
    if tiles.tokens > num_tokens or out_TNH.stride(1) != head_dim or out_TNH.stride(0) % 8 or out_TNH.data_ptr() % 16:
        raise ValueError(f"rows up to token {tiles.tokens} into {tuple(out_TNH.shape)} with strides {out_TNH.stride()}")
    if lse_TN is not None and (not lse_TN.is_contiguous() or lse_TN.dtype != torch.float32):
        raise ValueError("log-sum-exps must be contiguous float32")
    if heads // k_TKH.shape[1] % tiling.blocks or (section or heads) % tiling.blocks or heads % (section or heads):
        raise ValueError(
            f"{heads} heads over {k_TKH.shape[1]}, {section} at a time, can't be worked off {tiling.blocks} at once"
        )
    loaded = _loaded(tiling, q_TNH.dtype, head_dim, device)
    num_tiles = tiles.at_X4.shape[0]
    packed = ctypes.create_string_buffer(
        _ARGS.pack(
            out_TNH.data_ptr(), 0 if lse_TN is None else lse_TN.data_ptr(), tiles.at_X4.data_ptr(),
            loaded.counter.data_ptr(), num_tiles, heads, heads // k_TKH.shape[1], section or heads, out_TNH.stride(0),
            scale * math.log2(math.e),
        )
    )  # fmt: skip
    share = KV_BLOCK // tiling.blocks
    maps = [tensor_map(x.flatten(1), rows) for x, rows in ((q_TNH, TILE), (k_TKH, share), (v_TKH, share))]
    blocks = min(loaded.most_blocks, num_tiles * heads)
    stream = torch.cuda.current_stream(device).cuda_stream
    loaded.kernel.launch(blocks, [*maps, TensorMap(packed, ctypes.addressof(packed))], stream)


@dataclass(frozen=True, slots=True)
class _Loaded:
    kernel: CudaKernel
    counter: Tensor
    """Tiles taken so far; each launch leaves it at zero for the next one of the stream."""
    most_blocks: int
    """That run at once."""


@cache
def _loaded(tiling: Tiling, dtype: torch.dtype, head_dim: int, device: torch.device) -> _Loaded:
    cubin = cached_cubin(SOURCE, "sm_90a", tiling.defines(dtype, head_dim))
    kernel = CudaKernel(cubin, "fresh_attention", device, _THREADS, tiling.shared_bytes(head_dim))
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return _Loaded(kernel, counter, 2 * kernel.most_clusters(2) if tiling.pair else multiprocessors)
