"""A decoder's blocks in one call of the CPU's kernels, where all of them are of kinds those know."""

from __future__ import annotations

from torch import nn

from bough.kernels.attention.cpu import CpuAttention
from bough.kernels.decoder_stack import BlockParts, Packed
from bough.kernels.decoder_stack.cpu import DecoderStack, covers
from bough.kernels.packed_linear import PackedWeight
from bough.layers.adapters import AdaptedMatrix
from bough.layers.attention import Attention
from bough.layers.batch import Batch
from bough.layers.blocks import PreNormBlock, SandwichBlock
from bough.layers.decoder import Decoder, one_by_one
from bough.layers.linear import GateUpLinear, QKVLinear, RowLinear
from bough.layers.mlp import GatedMlp
from bough.layers.norm import RMSNorm
from bough.layers.stream import Stream
from bough.quantization.packed_matrix import PackedMatrix


def use_cpu_stack(model: Decoder) -> bool:
    """From now on the model runs its blocks at once in steps whose attention is the CPU's own. False where the kernels
    don't know its blocks: it stays as it is. To be called once the weights are there."""
    parts = [parts_of(block) for block in model.layers]
    known = [each for each in parts if each is not None]
    if len(known) != len(parts) or not covers(known):
        return False
    model.run_blocks = StackedBlocks(DecoderStack(known))
    return True


class StackedBlocks:
    """Runs all blocks in one call; one by one in steps that can't be run so."""

    def __init__(self, stack: DecoderStack) -> None:
        self._stack = stack

    def __call__(self, model: Decoder, stream: Stream, batch: Batch) -> None:
        at_once = None
        if isinstance(batch.attention, CpuAttention) and batch.media is None and batch.adapters is None:
            cuts = () if batch.taps is None else batch.taps.layers
            at_once = self._stack.tapped(stream.x_TD, batch.positions_T, batch.attention, cuts)
        if at_once is None:
            one_by_one(model, stream, batch)
            return
        (stream.x_TD, stream.residual_TD), states = at_once
        if batch.taps is not None:
            batch.taps.states += states


def parts_of(block: nn.Module) -> BlockParts | None:
    """What the kernels need of a block; None: they don't know it, or its weights are not packed or spread over ranks."""
    if not isinstance(block, PreNormBlock | SandwichBlock) or not isinstance(block.mlp, GatedMlp):
        return None
    attn, mlp = block.attn, block.mlp
    if not isinstance(attn, Attention):
        return None
    matrices = [_packed(linear) for linear in (attn.qkv, attn.out, mlp.gate_up, mlp.down)]
    packed = [matrix for matrix in matrices if matrix is not None]
    split = attn.out.axis.size > 1 or mlp.down.axis.size > 1
    if len(packed) != len(matrices) or split or not _plain(block, attn, mlp):
        return None
    before, after_attn, norms = block.attn_norm, block.mlp_norm, attn.kernel_norms
    assert isinstance(before, RMSNorm) and isinstance(after_attn, RMSNorm), "a plain block has no others"  # noqa: PT018
    after = (block.after_attn_norm, block.after_mlp_norm) if isinstance(block, SandwichBlock) else None
    return BlockParts(
        attn_norm=before.weight,
        ffn_norm=after_attn.weight,
        eps=before.eps,
        offset=before.offset,
        after_attn_norm=None if after is None else after[0].weight,
        after_ffn_norm=None if after is None else after[1].weight,
        qkv=packed[0],
        out=packed[1],
        gate_up=packed[2],
        down=packed[3],
        activation="silu" if mlp.gate_up.activation == "silu" else "gelu_tanh",
        spec=attn.spec,
        cos_sin_PR=None if attn.rope is None else attn.rope.cos_sin_PR,
        q_norm=None if norms is None else norms[0].weight,
        k_norm=None if norms is None else norms[1].weight,
        head_eps=1e-6 if norms is None else norms[0].eps,
        head_offset=0.0 if norms is None else norms[0].offset,
    )


def _plain(block: PreNormBlock | SandwichBlock, attn: Attention, mlp: GatedMlp) -> bool:
    """Whether the block does nothing that `BlockParts` can't say."""
    norms = (block.attn_norm, block.mlp_norm, *((attn.q_norm,) if attn.q_norm is not None else ()))
    known = mlp.gate_up.activation in ("silu", "gelu_tanh") and all(isinstance(norm, RMSNorm) for norm in norms)
    return known and attn.is_plain and block.scale is None


def _packed(linear: QKVLinear | RowLinear | GateUpLinear) -> Packed | None:
    matrix = linear.matrix
    if isinstance(matrix, AdaptedMatrix):
        matrix = matrix.base
    if not isinstance(matrix, PackedMatrix):
        return None
    pieces = [
        piece for piece in matrix.pieces if isinstance(piece, PackedWeight) and piece.address and piece.order is None
    ]
    return Packed(pieces, linear.bias, matrix.exact) if len(pieces) == len(matrix.pieces) else None
