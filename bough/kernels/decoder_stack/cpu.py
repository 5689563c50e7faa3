"""The stack of decoder blocks on the CPU, by the compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from bough.kernels.attention.cpu import CpuAttention, cache_type, head_is_covered
from bough.kernels.attention.inputs import AttentionInputs
from bough.kernels.cpu_build import library
from bough.kernels.decoder_stack import BlockParts, Packed

_MOST_PIECES = 3


class _Matrix(ctypes.Structure):
    """`struct Matrix` of the C++ code."""

    _fields_ = [
        ("pieces", ctypes.c_void_p * _MOST_PIECES),
        ("bias", ctypes.c_void_p),
        ("count", ctypes.c_int32),
        ("exact", ctypes.c_int32),
    ]


class _Block(ctypes.Structure):
    """`struct Block` of the C++ code."""

    _fields_ = [
        ("qkv", _Matrix),
        ("out", _Matrix),
        ("gate_up", _Matrix),
        ("down", _Matrix),
        ("attn_norm", ctypes.c_void_p),
        ("after_attn_norm", ctypes.c_void_p),
        ("ffn_norm", ctypes.c_void_p),
        ("after_ffn_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("k_ranges", ctypes.c_void_p),
        ("v_ranges", ctypes.c_void_p),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("rotated", ctypes.c_int32),
        ("silu", ctypes.c_int32),
        ("cache_dtype", ctypes.c_int32),
        ("line", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("offset", ctypes.c_float),
        ("head_eps", ctypes.c_float),
        ("head_offset", ctypes.c_float),
    ]


def covers(blocks: Sequence[BlockParts]) -> bool:
    """Whether the kernels can run these blocks."""
    return library() is not None and all(_covers(block) for block in blocks)


def _covers(block: BlockParts) -> bool:
    spec = block.spec
    matrices = (block.qkv, block.out, block.gate_up, block.down)
    packed = all(
        0 < len(matrix.pieces) <= _MOST_PIECES and all(piece.address for piece in matrix.pieces) for matrix in matrices
    )
    plain_values = spec.v_head_dim is None or spec.v_head_dim == spec.head_dim
    rotated = block.cos_sin_PR is not None or block.q_norm is None
    return packed and plain_values and rotated and spec.causal and head_is_covered(spec.head_dim)


class DecoderStack:
    """Blocks that `covers` accepts. Activations are float32 inside, whatever the model's dtype."""

    def __init__(self, blocks: Sequence[BlockParts]) -> None:
        self._parts = tuple(blocks)
        self._keep: list[Tensor] = []
        self._blocks = (_Block * len(self._parts))(*map(self._describe, self._parts))
        self._address = ctypes.addressof(self._blocks)
        self._caches: object = None
        self._knows_caches = False

    def __call__(self, x_TD: Tensor, positions_T: Tensor, attention: CpuAttention) -> tuple[Tensor, Tensor] | None:
        """(what the last block adds, the stream without it) in the dtype of x; None where this step can't be run so."""
        made = self.tapped(x_TD, positions_T, attention, ())
        return None if made is None else made[0]

    def tapped(
        self, x_TD: Tensor, positions_T: Tensor, attention: CpuAttention, cuts: Sequence[int]
    ) -> tuple[tuple[Tensor, Tensor], list[Tensor]] | None:
        """((what the last block adds, the stream without it), the stream as it enters the blocks `cuts`), all in the dtype
        of x; None where this step can't be run so. A cut may stand behind the last block."""
        inputs = attention.inputs
        if library() is None or inputs.k_scales:
            return None
        if inputs.k_caches is not self._caches:
            self._knows_caches = self._point_at(inputs)
        if not self._knows_caches:
            return None
        x = x_TD.to(torch.float32).contiguous()
        states: list[Tensor] = []
        first = 0
        for cut in cuts:
            if cut > first:
                added, stream = self._run(x, positions_T, attention, first, cut)
                if cut == len(self._parts):
                    return (added.to(x_TD.dtype), stream.to(x_TD.dtype)), [*states, (added + stream).to(x_TD.dtype)]
                x, first = added.add_(stream), cut
            states.append(x.to(x_TD.dtype, copy=True))
        added, stream = self._run(x, positions_T, attention, first, len(self._parts))
        return (added.to(x_TD.dtype), stream.to(x_TD.dtype)), states

    def _run(
        self, x: Tensor, positions_T: Tensor, attention: CpuAttention, first: int, last: int
    ) -> tuple[Tensor, Tensor]:
        """Blocks `first` to `last` - 1 of float32 `x`."""
        loaded = library()
        assert loaded is not None, "called where there is one"
        added, stream = torch.empty_like(x), torch.empty_like(x)
        steps = (ctypes.c_void_p * len(attention.step_addresses))(*attention.step_addresses)
        loaded.bough_decoder_stack(
            self._address + first * ctypes.sizeof(_Block),
            last - first,
            ctypes.addressof(steps),
            positions_T.data_ptr(),
            x.data_ptr(),
            added.data_ptr(),
            stream.data_ptr(),
            x.shape[0],
            x.shape[1],
        )
        return added, stream

    def _point_at(self, inputs: AttentionInputs) -> bool:
        """Whether the kernels know what the caches hold."""
        self._caches = inputs.k_caches
        for block, parts in zip(self._blocks, self._parts, strict=True):
            layer = parts.spec.layer
            k_cache, v_cache = inputs.k_caches[layer], inputs.v_caches[layer]
            block.k_cache, block.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
            kind = cache_type(inputs, parts.spec)
            if kind is None:
                return False
            block.cache_dtype = kind
            ranges = inputs.ranges_of(layer)
            if ranges is not None:
                block.k_ranges, block.v_ranges = ranges.keys.data_ptr(), ranges.values.data_ptr()
            block.line = 0 if inputs.lines is None else inputs.lines.of_layer[layer]
        return True

    def _describe(self, parts: BlockParts) -> _Block:
        spec = parts.spec
        return _Block(
            qkv=self._matrix(parts.qkv),
            out=self._matrix(parts.out),
            gate_up=self._matrix(parts.gate_up),
            down=self._matrix(parts.down),
            attn_norm=self._floats(parts.attn_norm),
            after_attn_norm=self._floats(parts.after_attn_norm),
            ffn_norm=self._floats(parts.ffn_norm),
            after_ffn_norm=self._floats(parts.after_ffn_norm),
            q_norm=self._floats(parts.q_norm),
            k_norm=self._floats(parts.k_norm),
            cos_sin=self._floats(parts.cos_sin_PR),
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            dim=spec.head_dim,
            window=spec.window or 0,
            rotated=0 if parts.cos_sin_PR is None else parts.cos_sin_PR.shape[1],
            silu=parts.activation == "silu",
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
            eps=parts.eps,
            offset=parts.offset,
            head_eps=parts.head_eps,
            head_offset=parts.head_offset,
        )

    def _matrix(self, matrix: Packed) -> _Matrix:
        made = _Matrix(bias=self._floats(matrix.bias), count=len(matrix.pieces), exact=matrix.exact)
        for place, piece in enumerate(matrix.pieces):
            made.pieces[place] = piece.address
        return made

    def _floats(self, tensor: Tensor | None) -> int | None:
        """Where its values lie as contiguous float32; kept alive with the stack."""
        if tensor is None:
            return None
        held = tensor.detach().to(torch.float32).contiguous()
        self._keep.append(held)
        return held.data_ptr()
