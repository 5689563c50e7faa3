"""Attention of decode rows on Hopper, with the rotation and the KV write in it (`decode_hopper.cu`): a kernel for few rows,
and one for many.

They read pages while the products before them still run: what a step attends to was written by steps before it, but for the
newest token, which comes from the products.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from bough.kernels.ahead import rehearsed
from bough.kernels.attention.inputs import AttentionInputs, Spec
from bough.kernels.attention.plan import Plan, Shape
from bough.kernels.attention.triton import Workspace
from bough.kernels.cuda_source import CudaKernel, cached_cubin, can_map, current_stream, runs_on, tensor_map
from bough.kernels.launching import num_sms

SOURCE = Path(__file__).with_suffix(".cu")
_STAGES = 5
_WIDTHS = (64, 128)
"""Of a head; of 8-bit floats the wider one alone."""
_MOST_GROUP = 8
_FEW_HEADS = 4
FEW = Shape(block_m=16, block_n=64, num_warps=9, num_stages=_STAGES, ctas_per_sm=1, min_tokens=64 * 3)
"""Rows are cut into equal parts for all multiprocessors, also if there are more rows than those: on an H200, 24 rows of
8,000 tokens with 8 KV heads are read at 4.02 TB/s so, and at 3.26 if they stay whole (24 of 1,000: 3.37 and 3.16). A part
is never shorter than three blocks, though five fit into the ring and have been read when the query comes: 2 rows of 700
tokens take 5.7 us so (two blocks: 6.9, five: 6.3), 4 of 2,000 with 4 KV heads 12.6 (12.6, 14.1), and longer rows the same.
"""
MANY = Shape(block_m=16, block_n=64, num_warps=8, num_stages=3, ctas_per_sm=4, may_align=True)
"""Every warp attends to chunks of its own. With half of them at work the memory is busy."""
FEW_SMALL = Shape(block_m=16, block_n=64, num_warps=9, num_stages=6, ctas_per_sm=1, min_tokens=64 * 6, may_align=True)
MANY_SMALL = Shape(block_m=16, block_n=64, num_warps=8, num_stages=3, ctas_per_sm=4, may_align=True)
"""The same for a cache of 8-bit floats. On an H200, a layer of a Llama-8B takes 223 us with 200 rows of 2,000 tokens (bf16:
435), 36 with 100 of 600 (64); with eight stages, few rows take a tenth longer."""
FEW_NARROW = Shape(block_m=16, block_n=64, num_warps=9, num_stages=8, ctas_per_sm=1, min_tokens=64 * 8)
MANY_NARROW = Shape(block_m=16, block_n=64, num_warps=8, num_stages=6, ctas_per_sm=4, may_align=True)
"""The same for heads of 64 numbers: more tokens for the same bytes. On an H200, a layer of a gpt-oss-20b takes 9.4 us with
4 rows of 2,000 tokens (five stages: 9.9, ten: 11.8; the portable kernel: 13.8), and 4.3 with a window of 128."""
_NARROW_PAIRS = (0.5, 2.0)
"""(Row, KV head) pairs of a multiprocessor between which the portable kernel serves heads of 64 numbers: a step of
gpt-oss-20b with 24 rows of 1,000 tokens, which are 1.45, takes an H200 6.05 ms with it and 6.22 with this one. With 4 rows,
100 and 200 steps became shorter with this one; what is between was not measured."""
_LOG2E = 1.4426950408889634


class _Form(NamedTuple):
    """What the source must know of a cache, and how rows over it are planned."""

    kind: int
    few: Shape
    many: Shape
    many_tokens: int
    """KV tokens of a stage in the kernel for many rows, to which a warp attends at once."""
    few_per_sm: int
    """(Row, KV head) pairs of a multiprocessor, up to which its warps should work on one together. Of 8 bits fewer: 24 rows
    of 1,000 tokens with 8 heads take 27 us so, and 23 with a warp for each chunk."""
    few_per_sm_of_few_heads: float
    """The same where a row has at most `_FEW_HEADS` KV heads. More rows have more queries to wait for: 64 rows of 128 tokens
    with 4 heads take 17.6 us together, and 14.2 with a warp for each chunk."""


FORMS: Final[dict[torch.dtype, _Form]] = {
    torch.bfloat16: _Form(0, FEW, MANY, 16, 2, 1.5),
    torch.float8_e4m3fn: _Form(1, FEW_SMALL, MANY_SMALL, 32, 1, 1),
    torch.float8_e5m2: _Form(2, FEW_SMALL, MANY_SMALL, 32, 1, 1),
}
NARROW: Final = _Form(0, FEW_NARROW, MANY_NARROW, 16, 2, 2)
"""For heads of 64 numbers of bfloat16."""


@dataclass(frozen=True, slots=True)
class Raw:
    """Queries, keys and values of decode rows as the products left them, and what they still need."""

    q_TNH: Tensor
    k_TKH: Tensor
    v_TKH: Tensor
    positions_T: Tensor
    cos_sin_PR: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    offset: float
    interleaved: bool


class _Inputs(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "q_norm", "k_norm", "cos_sin", "positions", "locations")),
        *((name, ctypes.c_void_p) for name in ("k_cache", "v_cache", "out", "page_table", "tiles", "header")),
        *((name, ctypes.c_void_p) for name in ("chunk_tile", "counters", "partial", "stats", "queue")),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("q_token", "k_token", "v_token")),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("tile_room", "page_size", "num_tokens", "window")),
        *((name, ctypes.c_float) for name in ("scale_log2", "eps", "offset", "k_inverse", "v_inverse", "v_scale")),
    )


class Layer(NamedTuple):
    """What a kernel is compiled for. `dtype`: that of the cache."""

    dtype: torch.dtype
    width: int
    group: int
    kv_heads: int
    norm: bool = False
    sinks: bool = False
    windowed: bool = False

    @staticmethod
    def of(spec: Spec, inputs: AttentionInputs, norm: bool) -> Layer:
        """That of a layer with or without norms of its heads."""
        dtype, group = inputs.k_caches[spec.layer].dtype, spec.num_heads // spec.num_kv_heads
        has = norm, spec.sinks is not None, spec.window is not None
        return Layer(dtype, spec.head_dim, group, spec.num_kv_heads, *has)

    @property
    def form(self) -> _Form:
        return _form(self.dtype, self.width)


def _form(dtype: torch.dtype, width: int) -> _Form:
    return NARROW if width == _WIDTHS[0] else FORMS[dtype]


def defines(layer: Layer, form: _Form) -> dict[str, int]:
    """What the source is given."""
    few, many = form.few, form.many
    return {
        "GROUP": layer.group, "KV_HEADS": layer.kv_heads, "NORM": int(layer.norm), "KV": form.kind,
        "WIDTH": layer.width, "SINKS": int(layer.sinks), "WINDOWED": int(layer.windowed), "STAGES": few.num_stages,
        "MANY_WARPS": many.num_warps, "MANY_STAGES": many.num_stages, "MANY_TOKENS": form.many_tokens,
    }  # fmt: skip


def shared_bytes(layer: Layer, form: _Form, *, many: bool) -> int:
    """The ring of one of the kernels, and room to align it to 1024."""
    width = layer.width
    token = 2 * width * layer.dtype.itemsize  # bytes of its key and value
    if many:
        return form.many.num_stages * form.many.num_warps * form.many_tokens * token + 1024
    return form.few.num_stages * (form.few.block_n * token + 2 * width * 2 + (4 + 2 * layer.group) * width) + 1024


@rehearsed
@cache
def _kernel(device: torch.device, layer: Layer, form: _Form, *, many: bool) -> CudaKernel:
    cubin = cached_cubin(SOURCE, "sm_90a", defines(layer, form))
    name, shape = ("decode_many", form.many) if many else ("decode", form.few)
    return CudaKernel(cubin, name, device, 32 * shape.num_warps, shared_bytes(layer, form, many=many))


@rehearsed
@cache
def _is_ready(device: torch.device, layer: Layer) -> bool:
    """Whether the kernel can be had on a device; says why not where it could be expected."""
    return all(
        runs_on(
            device,
            partial(_kernel, device, layer, layer.form, many=many),
            "decode rows are attended to by the portable kernel",
        )
        for many in (False, True)
    )


def suits(spec: Spec, inputs: AttentionInputs, raw: Raw) -> bool:
    """Whether the kernel can serve a layer of a step in which no row has more than one token."""
    if inputs.shared is not None or inputs.tail is not None:
        return False
    k_cache, v_cache = inputs.k_caches[spec.layer], inputs.v_caches[spec.layer]
    fresh = (raw.q_TNH, raw.k_TKH, raw.v_TKH)
    plain = spec.causal and all(each is None for each in (spec.softcap, spec.chunk, spec.slopes)) and not spec.latent
    if k_cache.dtype == torch.bfloat16:
        plain = plain and inputs.scales(spec.layer) == (1.0, 1.0)
    typed = all(each.dtype == torch.bfloat16 for each in fresh) and k_cache.dtype == v_cache.dtype in FORMS
    widths = _WIDTHS if k_cache.dtype == torch.bfloat16 else _WIDTHS[1:]
    shaped = spec.head_dim == v_cache.shape[3] in widths and spec.num_heads <= _MOST_GROUP * spec.num_kv_heads
    paged = inputs.page_size % FEW.block_n == 0 and k_cache.is_contiguous() and v_cache.is_contiguous()
    fits = plain and typed and shaped and paged and all(map(can_map, fresh)) and _can_turn(spec, raw)
    fits = fits and not (k_cache.is_cuda and is_slower(spec, inputs.num_tokens, num_sms(k_cache.device)))
    return fits and _is_ready(raw.q_TNH.device, Layer.of(spec, inputs, raw.q_norm is not None))


def is_slower(spec: Spec, num_rows: int, sms: int) -> bool:
    """Whether the portable kernel was faster with about this number of rows, on a device with `sms` multiprocessors."""
    least, most = (each * sms for each in _NARROW_PAIRS)
    return spec.head_dim == _WIDTHS[0] and least < num_rows * spec.num_kv_heads <= most


def _can_turn(spec: Spec, raw: Raw) -> bool:
    """Whether the kernel knows the norms and the rotation."""
    angles = raw.cos_sin_PR
    if raw.interleaved or angles.shape[1] != spec.head_dim or angles.dtype != torch.float32:
        return False
    norms = [norm for norm in (raw.q_norm, raw.k_norm) if norm is not None]
    return angles.is_contiguous() and len(norms) != 1 and all(norm.dtype == torch.bfloat16 for norm in norms)


def shape_for(spec: Spec, inputs: AttentionInputs) -> Shape:
    """How to plan the rows of a step."""
    form = _form(inputs.k_caches[spec.layer].dtype, spec.head_dim)
    per_sm = form.few_per_sm if spec.num_kv_heads > _FEW_HEADS else form.few_per_sm_of_few_heads
    few = inputs.num_tokens * spec.num_kv_heads <= per_sm * num_sms(inputs.kv_len_R.device)
    return form.few if few else form.many


def attend(
    spec: Spec, inputs: AttentionInputs, plan: Plan, workspace: Workspace, raw: Raw, *, after_plan: bool
) -> Tensor:
    """[T, N, V] for a step and layer that the kernel suits, with a plan of `shape_for` it. Writes keys and values to
    their pages.

    `after_plan`: the plan may just have been queued, so this launch must not start before it ends.
    """
    q, k, v = raw.q_TNH, raw.k_TKH, raw.v_TKH
    device = q.device
    k_cache, v_cache = inputs.k_caches[spec.layer], inputs.v_caches[spec.layer]
    k_scale, v_scale = inputs.scales(spec.layer)
    out = torch.empty((inputs.num_tokens, spec.num_heads, spec.head_dim), dtype=q.dtype, device=device)
    given: dict[str, Tensor | None] = {
        "q": q, "k": k, "v": v, "q_norm": raw.q_norm, "k_norm": raw.k_norm, "cos_sin": raw.cos_sin_PR,
        "positions": raw.positions_T, "locations": inputs.loc_T, "k_cache": k_cache, "v_cache": v_cache, "out": out,
        "page_table": inputs.page_table, "tiles": plan.tiles, "header": plan.header, "chunk_tile": plan.chunk_tile,
        "counters": plan.counters, "partial": workspace.partial, "stats": workspace.stats, "queue": workspace.queue,
        "sinks": spec.sinks,
    }  # fmt: skip
    structure = _Inputs(
        **{name: None if each is None else each.data_ptr() for name, each in given.items()},
        table_stride=inputs.page_table.stride(0), q_token=q.stride(0), k_token=k.stride(0), v_token=v.stride(0),
        tile_room=plan.tiles.shape[1], page_size=inputs.page_size, num_tokens=inputs.num_tokens,
        window=spec.window or 0, scale_log2=spec.scale * k_scale * _LOG2E, eps=raw.eps, offset=raw.offset,
        k_inverse=1.0 / k_scale, v_inverse=1.0 / v_scale, v_scale=v_scale,
    )  # fmt: skip
    shape, layer = plan.shape, Layer.of(spec, inputs, raw.q_norm is not None)
    form = layer.form
    many = shape is form.many
    kernel = _kernel(device, layer, form, many=many)
    box_rows = form.many_tokens if many else shape.block_n
    maps = (tensor_map(_flat(k_cache), box_rows), tensor_map(_flat(v_cache), box_rows))
    stream = current_stream(device)
    kernel.launch(min(num_sms(device), plan.num_chunks), (*maps, structure), stream, early=not after_plan)
    return out


def _flat(cache: Tensor) -> Tensor:
    """[tokens, heads * width]; of 8-bit floats their bytes."""
    flat = cache.view(cache.shape[0] * cache.shape[1], -1)
    return flat.view(torch.uint8) if flat.dtype.itemsize == 1 else flat
