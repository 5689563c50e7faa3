"""Attention on the CPU by the compiled kernels: no padding, no copies of keys; shared spans are read once a group."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from bough.core.step import SpanCosts
from bough.kernels.attention.inputs import AttentionInputs, IndexQueries, Spec
from bough.kernels.attention.torch_backend import TorchAttention
from bough.kernels.cpu_build import library
from bough.kernels.cpu_build.shared_library import DTYPES
from bough.kernels.kv_codes import bits_of
from bough.kernels.rotary import apply_rope, qk_norm_rope
from bough.kernels.rotary.cpu import RopeStruct
from bough.platform.huge_pages import prefer_huge_pages

_LANES = 16


class _Step(ctypes.Structure):
    """`struct Step` of the C++ code."""

    _fields_ = [
        ("query_start", ctypes.c_void_p),
        ("kv_len", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("loc", ctypes.c_void_p),
        ("group_rows", ctypes.c_void_p),
        ("group_start", ctypes.c_void_p),
        ("group_tokens", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
        ("tail", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("gaps", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("groups", ctypes.c_int32),
    ]


class _Layer(ctypes.Structure):
    """`struct Layer` of the C++ code."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("q_token", ctypes.c_int64),
        ("q_head", ctypes.c_int64),
        ("k_token", ctypes.c_int64),
        ("k_head", ctypes.c_int64),
        ("v_token", ctypes.c_int64),
        ("v_head", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("slopes", ctypes.c_void_p),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("v_dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("cache_dtype", ctypes.c_int32),
        ("chunk", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("k_ranges", ctypes.c_void_p),
        ("v_ranges", ctypes.c_void_p),
    ]


CODE_TYPES = {8: 3, 4: 4}
"""By bits of codes: `cache_dtype` of the C++ code."""


def cache_type(inputs: AttentionInputs, spec: Spec) -> int | None:
    """Of a layer's caches, as the C++ code numbers them; None: it does not know them."""
    cache = inputs.k_caches[spec.layer]
    if inputs.ranges_of(spec.layer) is None:
        return DTYPES.get(cache.dtype)
    bits = bits_of(cache, spec.head_dim)
    fits = spec.head_dim % (_LANES * 8 // bits) == spec.v_width % (_LANES * 8 // bits) == 0
    return CODE_TYPES[bits] if fits else None


def available() -> bool:
    return library() is not None


def head_is_covered(head_dim: int) -> bool:
    """Whether the kernels take heads of this width."""
    return head_dim % _LANES == 0


_advised: set[int] = set()
"""Caches whose memory was asked to lie in huge pages."""


def _advise(inputs: AttentionInputs) -> None:
    if not inputs.k_caches or inputs.k_caches[0].data_ptr() in _advised:
        return
    _advised.add(inputs.k_caches[0].data_ptr())
    for cache in (*inputs.k_caches, *inputs.v_caches):
        prefer_huge_pages(cache.data_ptr(), cache.numel() * cache.element_size())


SPANS = SpanCosts(span_ns=512.0, levels=1, most_queries=1)
"""In reads of one KV token: a span is shared if it saves more than 512 of them."""


class CpuAttention:
    """Layers that the kernels don't cover (odd head widths, caches of 8-bit floats) are computed by torch. Shared spans must
    be those of rows with one query token, and of the first level."""

    def __init__(self, inputs: AttentionInputs) -> None:
        self.inputs = inputs
        self._torch: TorchAttention | None = None
        _advise(inputs)
        self._keep = [
            inputs.query_start_R1.to(torch.int32).contiguous(),
            inputs.kv_len_R.to(torch.int32).contiguous(),
            inputs.slots_R.to(torch.int32).contiguous(),
        ]
        lines = inputs.lines
        if lines is None:
            self._steps = [self._line(inputs.page_table, inputs.loc_T, inputs.page_size)]
        else:
            of_lines = zip(lines.tables, lines.locs, lines.page_sizes, strict=True)
            self._steps = [self._line(*each) for each in of_lines]
        self.step_addresses = [ctypes.addressof(step) for step in self._steps]
        """By line."""
        self._reading: dict[int, _Step] = {}
        """By line: the step, without places for its tokens' KV."""

    def _line(self, page_table: Tensor, loc_T: Tensor, page_size: int) -> _Step:
        query_start, kv_len, slots = self._keep[:3]
        loc, shared = loc_T.to(torch.int64).contiguous(), self.inputs.shared
        tree, gaps = self.inputs.tree, self.inputs.gaps_T2
        self._keep.append(loc)
        return _Step(
            query_start.data_ptr(), kv_len.data_ptr(), slots.data_ptr(), page_table.data_ptr(), loc.data_ptr(),
            None if shared is None else shared.rows_M.data_ptr(),
            None if shared is None else shared.start_S1.data_ptr(),
            None if shared is None else shared.last_S.data_ptr(),
            None if tree is None else tree.seen_T.data_ptr(),
            None if tree is None else tree.tail_T.data_ptr(),
            None if tree is None else tree.positions_T.data_ptr(),
            None if gaps is None else gaps.data_ptr(),
            page_table.stride(0), kv_len.shape[0], loc.shape[0], page_size,
            0 if shared is None else shared.last_S.shape[0],
        )  # fmt: skip

    def step_address(self, layer: int) -> int:
        """Of what the kernels know of the step, for a layer."""
        lines = self.inputs.lines
        return self.step_addresses[0 if lines is None else lines.of_layer[layer]]

    def forward(self, spec: Spec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """Writes k and v to their pages, then attends: [T, N * V]."""
        loaded = library()
        if loaded is None or not self._covers(spec, q_TNH, k_TKH, v_TKH):
            return self._by_torch().forward(spec, q_TNH, k_TKH, v_TKH)
        layer, out = self._layer(spec, q_TNH, k_TKH, v_TKH)
        loaded.bough_attention(self.step_address(spec.layer), ctypes.addressof(layer))
        return out

    def attend(self, spec: Spec, q_TNH: Tensor) -> Tensor:
        """Attends to KV that is in the pages: [T, N * V]."""
        loaded, inputs = library(), self.inputs
        kv_TKH = [
            cache[0, :1].expand(len(q_TNH), -1, -1)
            for cache in (inputs.k_caches[spec.layer], inputs.v_caches[spec.layer])
        ]
        if loaded is None or not self._covers(spec, q_TNH, *kv_TKH):
            return self._by_torch().attend(spec, q_TNH)
        of_layer = inputs.of_layer(spec.layer)
        line = 0 if inputs.lines is None else inputs.lines.of_layer[spec.layer]
        if line not in self._reading:
            nowhere_T = torch.full_like(of_layer.loc_T, -1)
            self._reading[line] = self._line(of_layer.page_table, nowhere_T, of_layer.page_size)
        layer, out = self._layer(spec, q_TNH, *kv_TKH)
        loaded.bough_attention(ctypes.addressof(self._reading[line]), ctypes.addressof(layer))
        return out

    def choose(self, spec: Spec, index: IndexQueries) -> None:
        """Chooses what this layer and those after it read, whose attention is torch's."""
        self._by_torch().choose(spec, index)

    def queries_at(self, spec: Spec) -> Tensor | None:
        """None: every layer attends for all tokens."""
        return None

    def forward_rope(
        self,
        spec: Spec,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        positions_T: Tensor,
        cos_sin_PR: Tensor,
        *,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        offset: float,
        interleaved: bool = False,
    ) -> Tensor:
        """Norms each head (where norms are given), rotates, then `forward`."""
        loaded = library()
        if loaded is None or not self._covers(spec, q_TNH, k_TKH, v_TKH) or cos_sin_PR.dtype != torch.float32:
            if q_norm is None or k_norm is None:
                q_TNH, k_TKH = apply_rope(q_TNH, k_TKH, positions_T, cos_sin_PR, interleaved=interleaved)
            else:
                q_TNH, k_TKH = qk_norm_rope(
                    q_TNH, k_TKH, q_norm, k_norm, eps, positions_T, cos_sin_PR, offset=offset, interleaved=interleaved
                )
            return self._by_torch().forward(spec, q_TNH, k_TKH, v_TKH)
        layer, out = self._layer(spec, q_TNH, k_TKH, v_TKH)
        rope = RopeStruct(
            layer.q, layer.k, None, None, positions_T.data_ptr(), cos_sin_PR.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(), None if k_norm is None else k_norm.data_ptr(),
            q_TNH.shape[0], layer.q_token, layer.q_head, layer.k_token, layer.k_head, spec.num_heads,
            spec.num_kv_heads, spec.head_dim, cos_sin_PR.shape[1], interleaved, layer.dtype,
            0 if q_norm is None else DTYPES[q_norm.dtype], eps, offset,
        )  # fmt: skip
        loaded.bough_attention_rope(self.step_address(spec.layer), ctypes.addressof(layer), ctypes.addressof(rope))
        return out

    def _covers(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor) -> bool:
        inputs = self.inputs
        return (
            not spec.latent
            and spec.head_dim % _LANES == 0
            and v.shape[2] % _LANES == 0
            and q.dtype in DTYPES
            and q.dtype == k.dtype == v.dtype
            and q.stride(2) == k.stride(2) == v.stride(2) == 1
            and cache_type(inputs, spec) is not None
            and not inputs.k_scales
        )

    def _by_torch(self) -> TorchAttention:
        if self._torch is None:
            self._torch = TorchAttention(self.inputs)
        return self._torch

    def _layer(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor) -> tuple[_Layer, Tensor]:
        k_cache, v_cache = self.inputs.k_caches[spec.layer], self.inputs.v_caches[spec.layer]
        v_dim, ranges = v.shape[2], self.inputs.ranges_of(spec.layer)
        out = q.new_empty((q.shape[0], spec.num_heads * v_dim))
        q_token, q_head, _ = q.stride()
        k_token, k_head, _ = k.stride()
        v_token, v_head, _ = v.stride()
        layer = _Layer(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(),
            q_token, q_head, k_token, k_head, v_token, v_head, _address(spec.sinks), _address(spec.slopes),
            spec.num_heads, spec.num_kv_heads, spec.head_dim, v_dim, spec.window or 0, spec.causal, DTYPES[q.dtype],
            cache_type(self.inputs, spec), spec.chunk or 0, 0, spec.scale, spec.softcap or 0.0,
            None if ranges is None else ranges.keys.data_ptr(), None if ranges is None else ranges.values.data_ptr(),
        )  # fmt: skip
        return layer, out


def _address(values_N: Tensor | None) -> int | None:
    """Of float32 values by head."""
    return None if values_N is None else values_N.data_ptr()
