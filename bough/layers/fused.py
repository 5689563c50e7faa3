"""Blocks described by their parts, so that a kernel can run a whole stack of them in one call."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from bough.kernels.attention.cpu import CpuAttention
from bough.kernels.decoder_stack import BlockParts, Packed
from bough.kernels.decoder_stack.cpu import DecoderStack, covers
from bough.kernels.packed_linear import PackedWeight
from bough.layers.attention import Attention
from bough.layers.linear import GateUpLinear, QKVLinear, RowLinear
from bough.layers.norm import RMSNorm
from bough.layers.rotary import Rope
from bough.quantization.gguf_packed import PackedMatrix


@runtime_checkable
class Fusable(Protocol):
    """A block that can say what it is made of."""

    def parts(self) -> BlockParts | None:
        """None where the weights are not packed, or spread over ranks."""
        ...


class PreNormBlock(Protocol):
    """What every pre-norm block is made of; some have more norms."""

    @property
    def attn_norm(self) -> RMSNorm: ...
    @property
    def qkv(self) -> QKVLinear: ...
    @property
    def rope(self) -> Rope | None: ...
    @property
    def attn(self) -> Attention: ...
    @property
    def out(self) -> RowLinear: ...
    @property
    def ffn_norm(self) -> RMSNorm: ...
    @property
    def gate_up(self) -> GateUpLinear: ...
    @property
    def down(self) -> RowLinear: ...


def parts_of(
    block: PreNormBlock,
    *,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
    after_attn_norm: RMSNorm | None = None,
    after_ffn_norm: RMSNorm | None = None,
) -> BlockParts | None:
    """The parts of a pre-norm block."""
    matrices = [_packed(linear) for linear in (block.qkv, block.out, block.gate_up, block.down)]
    if block.out.mesh.size > 1 or any(matrix is None for matrix in matrices):
        return None
    packed = [matrix for matrix in matrices if matrix is not None]
    return BlockParts(
        attn_norm=block.attn_norm.weight,
        ffn_norm=block.ffn_norm.weight,
        eps=block.attn_norm.eps,
        offset=block.attn_norm.offset,
        after_attn_norm=None if after_attn_norm is None else after_attn_norm.weight,
        after_ffn_norm=None if after_ffn_norm is None else after_ffn_norm.weight,
        qkv=packed[0],
        out=packed[1],
        gate_up=packed[2],
        down=packed[3],
        activation=block.gate_up.activation,
        spec=block.attn.spec,
        cos_sin_PR=None if block.rope is None else block.rope.cos_sin_PR,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        head_eps=1e-6 if q_norm is None else q_norm.eps,
        head_offset=0.0 if q_norm is None else q_norm.offset,
    )


def _packed(linear: QKVLinear | RowLinear | GateUpLinear) -> Packed | None:
    matrix = linear.matrix
    if not isinstance(matrix, PackedMatrix):
        return None
    pieces = [piece for piece in matrix.pieces if isinstance(piece, PackedWeight)]
    return Packed(pieces, linear.bias, matrix.exact) if len(pieces) == len(matrix.pieces) else None


class FusedBlocks:
    """A stack that is put together at its first use, when the weights are there."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        self._blocks = blocks
        self._stack: DecoderStack | None = None
        self._tried = False
        self.apart = False
        """Run the blocks one by one all the same, for whoever wants to see each of them."""

    @property
    def is_used(self) -> bool:
        """Whether the blocks turned out to be ones that a kernel runs at once."""
        return self._stack is not None

    def forward(self, x_TD: Tensor, positions_T: Tensor, attention: object) -> tuple[Tensor, Tensor] | None:
        """(what the last block adds, the stream without it), or None where the blocks must run one by one."""
        if self.apart or not isinstance(attention, CpuAttention):
            return None
        if not self._tried:
            self._tried = True
            parts = [block.parts() for block in self._blocks if isinstance(block, Fusable)]
            known = [each for each in parts if each is not None]
            if len(known) == len(self._blocks) and covers(known):
                self._stack = DecoderStack(known)
        return None if self._stack is None else self._stack(x_TD, positions_T, attention)
