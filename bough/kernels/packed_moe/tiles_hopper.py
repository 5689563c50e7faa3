"""Experts in codes for more than a few tokens of each, on Hopper: two launches of `tiles_hopper.cu`, a product each, with
biases and gates. Weights become bf16 on the way to the tensor cores, once for each tile of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from bough.config.model_facts import ClampedGate
from bough.kernels.ahead import forget_after_rehearsals, rehearsed
from bough.kernels.codes_source import BOX_COLUMNS, CodeForm
from bough.kernels.cuda_source import CudaKernel, cached_cubin, can_map, current_stream, runs_on, tensor_map
from bough.kernels.launching import cdiv, num_sms
from bough.kernels.linear.skinny import SCRATCH
from bough.kernels.moe.triton import Sorted
from bough.kernels.packed_linear.decode import DeviceCodes
from bough.kernels.packed_linear.hopper import besides_codes, form_of
from bough.kernels.packed_moe.hopper import GATES, work_of

_SOURCE = Path(__file__).with_suffix(".cu")
_SHARED_BYTES: Final = 225 << 10
"""Of a multiprocessor, which has one block."""
_MOST_STAGES: Final = 8
_LEAST_STAGES: Final = 3
_CUT_BOXES: Final = 3
"""Boxes of 128 columns that a multiprocessor multiplies while the sums of a tile that two of them have go through memory:
tiles are not cut for less."""


class Tile(NamedTuple):
    """What a block multiplies at a time."""

    tokens: int
    """16, 32, 64 or 128."""
    groups: int
    """Of 64 weight rows: a warpgroup each, 2 to 4 (4 with at most 32 tokens)."""
    evenly: bool = False
    """Whether the last tiles are cut into equal shares of columns for all multiprocessors."""
    preloaded: bool = False
    """Whether codes of a stage leave shared memory while those of the stage before become bf16. At most 32 tokens."""
    matrices: bool = False
    """Whether codes and scales leave shared memory by `ldmatrix`, for which tokens are gathered two columns at a time. At
    most 32 tokens."""


@dataclass(frozen=True, slots=True)
class TiledProduct:
    """How one of the two products is cut."""

    tile: Tile
    halves: int
    form: CodeForm

    @property
    def half_rows(self) -> int:
        """Weight rows of a tile, of each half."""
        return 64 * self.tile.groups // self.halves

    @property
    def has_staged_scales(self) -> bool:
        """Whether scales come with the codes."""
        return self.form.group == 32

    @property
    def stage_bytes(self) -> int:
        scales = 8 if self.has_staged_scales else 0
        weights = 64 * self.tile.groups * (self.form.box_bytes + scales)
        return cdiv(2 * BOX_COLUMNS * self.tile.tokens + weights, 1024) * 1024

    @property
    def result_bytes(self) -> int:
        """Of tokens' results on their way to memory."""
        return self.tile.groups * min(32, self.tile.tokens) * (128 // self.halves + 16)

    @property
    def stages(self) -> int:
        return min(_MOST_STAGES, (_SHARED_BYTES - 6144 - self.result_bytes) // self.stage_bytes)

    @property
    def lag(self) -> int:
        """Stages of tokens that are asked for before the first is waited for."""
        return self.stages // 2

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + self.result_bytes + 1024

    @property
    def sums(self) -> int:
        """Of a block, for another one to add."""
        return 64 * self.tile.groups * self.tile.tokens

    def defines(self, gate: int, has_bias: bool) -> Mapping[str, int]:
        return {
            "BLOCK_T": self.tile.tokens,
            "GROUPS_OF_WARPS": self.tile.groups,
            "STAGES": self.stages,
            "LAG": self.lag,
            "HALVES": self.halves,
            "GATE": gate,
            "BIAS": int(has_bias),
            "EARLY": int(self.halves == 1),
            "EVENLY": int(self.tile.evenly),
            "PRELOADED": int(self.tile.preloaded),
            "MATRICES": int(self.tile.matrices),
            "CUT_BOXES": _CUT_BOXES,
            **self.form.defines(),
        }


_MANY: Final = float("inf")
_BY_PAIRS: Final[dict[str, tuple[tuple[float, Tile | None], ...]]] = {
    "float4": (
        (0.7, None),
        (10.0, Tile(32, 4, evenly=True, matrices=True)),
        (28.0, Tile(32, 3, evenly=True, matrices=True)),
        (70.0, Tile(64, 3)),
        (_MANY, Tile(128, 3)),
    ),
    "float8": (
        (5.0, None),
        (28.0, Tile(32, 3, preloaded=True, matrices=True)),
        (230.0, Tile(64, 3)),
        (_MANY, Tile(128, 2)),
    ),
    "int4": ((5.0, None), (28.0, Tile(32, 2)), (230.0, Tile(64, 2)), (_MANY, Tile(128, 2))),
}
"""By kind of codes: up to this mean number of pairs of an expert, this tile; None: `hopper` is faster. INT4 was not timed.

Microseconds of a layer on an H200. MXFP4 with `matrices`: 3 pairs 165.5 in (32, 4) and 166.5 in (32, 3), 12 pairs 181.5 and
175.2, 25 pairs 208 and 200. Before there were `matrices`: MXFP4, 32 experts of 2880 x 2880, the tile beside (32, 3)
and beside `hopper`: 0.5 pairs 87.5, 87.8 (evenly) and 87.7; 1 pair 114, 116 and 118; 3 pairs 169, 178 and 181; 8 pairs 171
and 178; 12 pairs 180, 181 and 220; 25 pairs 199 and 200. Cut evenly, larger tiles gain nothing: 38 pairs 254 in (64, 3), 262
so; 125 pairs 525 in (128, 3), 522 so; 2,000 pairs 5,896 and 6,141. Preloaded, those of MXFP4 lose 6 to 8 %. Blocks of FP8,
128 experts of 2048 x 768: 6 pairs 191 preloaded, 234 not, `hopper` 220; 62 pairs 323; 250 pairs 919."""


def tile_for(kind: str, num_pairs: int, num_experts: int) -> Tile | None:
    """The fastest tile for `num_pairs` (token, expert) pairs; None: another kernel is faster."""
    per_expert = num_pairs / num_experts
    return next((tile for most, tile in _BY_PAIRS.get(kind, ()) if per_expert <= most), None)


def _products(tile: Tile, gate_up: DeviceCodes, down: DeviceCodes) -> tuple[TiledProduct, TiledProduct] | None:
    forms = form_of(gate_up), form_of(down)
    if forms[0] is None or forms[1] is None:
        return None
    return TiledProduct(tile, 2, forms[0]), TiledProduct(tile, 1, forms[1])


@rehearsed
@cache
def _kernel(device: torch.device, cut: TiledProduct, gate: int, has_bias: bool) -> CudaKernel:
    cubin = cached_cubin(_SOURCE, "sm_90a", cut.defines(gate, has_bias))
    threads = 128 * (cut.tile.groups + 1)
    return CudaKernel(cubin, "coded_tiles", device, threads=threads, shared_bytes=cut.shared_bytes)


def load_all(
    device: torch.device, tiles: Sequence[Tile], gate_up: DeviceCodes, down: DeviceCodes, gate: str, has_bias: bool
) -> None:
    """Compiles what experts need for these tiles, all at once, and loads it. Raises CudaSourceError."""
    wanted = []
    for tile in tiles:
        cuts = _products(tile, gate_up, down)
        if cuts is not None:
            wanted += [(cuts[0], GATES[gate]), (cuts[1], 0)]
    with ThreadPoolExecutor(max(1, len(wanted))) as pool:
        list(pool.map(lambda each: cached_cubin(_SOURCE, "sm_90a", each[0].defines(each[1], has_bias)), wanted))
    for cut, gate_number in wanted:
        _kernel(device, cut, gate_number, has_bias)
        _sums(device, cut)


def _sums(device: torch.device, cut: TiledProduct) -> tuple[Tensor | None, Tensor | None]:
    """Where multiprocessors leave sums for each other, and flags, which are zero between launches."""
    if not cut.tile.evenly:
        return None, None
    blocks = num_sms(device)
    return SCRATCH.get(device, blocks * cut.sums, blocks * 4 * cut.tile.groups)


_ready: dict[tuple[object, ...], bool] = {}
forget_after_rehearsals(_ready.clear)


def _is_ready(gate_up: DeviceCodes, down: DeviceCodes, gate: str, has_bias: bool) -> bool:
    """Whether the kernels can be had on a device; says why not where it could be expected. All that experts may ask for is
    loaded at once: later it might be in the middle of a graph's capture."""
    device = gate_up.codes.device
    key = (device, form_of(gate_up), form_of(down), gate, has_bias)
    if key not in _ready:
        tiles = [tile for _, tile in _BY_PAIRS[gate_up.kind] if tile is not None]
        _ready[key] = runs_on(
            device,
            lambda: load_all(device, tiles, gate_up, down, gate, has_bias),
            "quantised experts of more than a few tokens are multiplied by the portable kernel",
        )
    return _ready[key]


def suits(
    x_TD: Tensor,
    gate_up: object,
    down: object,
    num_experts: int,
    num_pairs: int,
    activation: str,
    clamp: ClampedGate | None,
    *,
    has_bias: bool,
) -> bool:
    """Whether `product` serves these experts, faster than other kernels do."""
    if not isinstance(gate_up, DeviceCodes) or not isinstance(down, DeviceCodes) or activation != "silu":
        return False
    if x_TD.dtype != torch.bfloat16 or not can_map(x_TD) or gate_up.kind != down.kind:
        return False
    tile = tile_for(gate_up.kind, num_pairs, num_experts)
    if tile is None or not can_serve(gate_up, down, num_experts, x_TD.shape[1], tile):
        return False
    return _is_ready(gate_up, down, "silu" if clamp is None else "clamped", has_bias)


def can_serve(gate_up: DeviceCodes, down: DeviceCodes, num_experts: int, width: int, tile: Tile) -> bool:
    """Whether the kernel takes these weights."""
    cuts = _products(tile, gate_up, down)
    if cuts is None:
        return False
    inner = gate_up.num_rows // num_experts // 2
    for cut, weight, depth in zip(cuts, (gate_up, down), (width, inner), strict=True):
        if depth % 8 or depth > weight.cols or not can_map(weight.codes) or cut.stages < _LEAST_STAGES:
            return False
        if cut.has_staged_scales and not can_map(weight.scales):
            return False
    return True


def product(
    x: Tensor,
    weight: DeviceCodes,
    out: Tensor,
    order: Sorted,
    *,
    tile: Tile,
    per_token: int,
    halves: int,
    bias: Tensor | None = None,
    clamp: ClampedGate | None = None,
) -> None:
    """Fills out [pairs, rows], with two `halves` gated by silu or `clamp`. `bias` [E, halves * rows] in bf16. `order`:
    sorted, in batches of the tile's tokens. Needs `can_serve`.

    With one half, the kernel before must be the product of two, with the same `order`: the choice of experts is read before
    that has ended.
    """
    form = form_of(weight)
    assert form is not None
    assert order.is_sorted
    rows, device = out.shape[1], x.device
    cut = TiledProduct(tile, halves, form)
    gate = 0 if halves == 1 else GATES["silu" if clamp is None else "clamped"]
    kernel = _kernel(device, cut, gate, bias is not None)
    work = work_of(x, out, order, per_token, cdiv(weight.cols, BOX_COLUMNS), bias, clamp)
    codes = tensor_map(weight.codes, cut.half_rows, form.box_bytes, swizzled=True)
    scales = codes
    if cut.has_staged_scales:
        scales = tensor_map(weight.scales, BOX_COLUMNS // form.group, cut.half_rows)
    blocks = min(order.num_blocks * cdiv(rows, cut.half_rows), num_sms(device))
    given = (codes, scales, besides_codes(weight), work, *_sums(device, cut))
    kernel.launch(blocks, given, current_stream(device))
