"""Attention that rotates by itself and narrows the last layer, as that of GPUs does; over plain tensors."""

from __future__ import annotations

from dense_attention import DenseAttention
from torch import Tensor

from bough.kernels.rotary import apply_rope, qk_norm_rope
from bough.layers.batch import AttentionSpec, Batch


class NarrowingAttention(DenseAttention):
    """Takes and gives nothing of the last layer but the tokens whose logits are wanted."""

    def __init__(self, num_rows: int, num_layers: int) -> None:
        super().__init__(num_rows)
        self.num_layers = num_layers
        self.wanted: Tensor | None = None
        self.narrowed = 0

    def step(self, queries: list[tuple[int, list[int]]], *, all_logits: bool = False, device: str = "cpu") -> Batch:
        batch = super().step(queries, all_logits=all_logits, device=device)
        self.wanted = batch.logits_at
        return batch

    def queries_at(self, spec: AttentionSpec) -> Tensor | None:
        return self.wanted if spec.layer == self.num_layers - 1 else None

    def forward(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        at_L = self.queries_at(spec)
        if at_L is None:
            return super().forward(spec, q_TNH, k_TKH, v_TKH)
        q_TNH = q_TNH if len(q_TNH) == len(at_L) else q_TNH[at_L]  # who can't project these alone gives all
        self.narrowed += 1
        return super().forward(spec, self._among_all(q_TNH, at_L), k_TKH, v_TKH)[at_L]

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        """Of layers behind the one that was narrowed, too."""
        at_L = self.wanted
        if at_L is None or len(q_TNH) == sum(count for _, count in self.queries):
            return super().attend(spec, q_TNH)
        return super().attend(spec, self._among_all(q_TNH, at_L))[at_L]

    def _among_all(self, q_LNH: Tensor, at_L: Tensor) -> Tensor:
        """The queries `at_L`, beside others that must not matter."""
        whole_TNH = q_LNH.new_full((sum(count for _, count in self.queries), *q_LNH.shape[1:]), 1e3)
        whole_TNH[at_L] = q_LNH
        return whole_TNH

    def forward_rope(
        self,
        spec: AttentionSpec,
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
        def turned(x: Tensor, norm: Tensor | None, positions: Tensor) -> Tensor:
            if norm is None:
                return apply_rope(x, x, positions, cos_sin_PR, interleaved=interleaved)[0]
            return qk_norm_rope(x, x, norm, norm, eps, positions, cos_sin_PR, offset=offset, interleaved=interleaved)[0]

        at_L = self.queries_at(spec)
        q_TNH = turned(q_TNH, q_norm, positions_T if at_L is None else positions_T[at_L])
        return self.forward(spec, q_TNH, turned(k_TKH, k_norm, positions_T), v_TKH)
