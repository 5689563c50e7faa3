"""All blocks of a decoder in one call, for small steps where the time between kernels counts.

in: the parts of every block, packed; activations and a step. out: what the last block adds, and the stream it is added to.
never: embeddings, the last norm, logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from bough.kernels.attention import Spec
from bough.kernels.packed_linear import PackedWeight

__all__ = ["BlockParts", "Packed"]


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix: packed pieces on top of one another, and a bias of all their rows."""

    pieces: Sequence[PackedWeight]
    bias: Tensor | None = None
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockParts:
    """A pre-norm block: norm, qkv, (head norms,) rotation, attention, out; norm, gate and up, activation, down.

    The norms "after" are applied to what each half adds to the stream, where a model has them.
    """

    attn_norm: Tensor
    ffn_norm: Tensor
    eps: float
    offset: float = 0.0
    """Added to the weights of the block's norms."""
    after_attn_norm: Tensor | None = None
    after_ffn_norm: Tensor | None = None
    qkv: Packed
    out: Packed
    gate_up: Packed
    down: Packed
    activation: Literal["silu", "gelu_tanh"]
    spec: Spec
    cos_sin_PR: Tensor | None
    """As in `kernels.rotary`; None: no rotation (and no head norms)."""
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    head_eps: float = 1e-6
    head_offset: float = 0.0
