"""The place in a model where attention happens. The batch brings the backend that knows the pages."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import embedding

from bough.config.model_facts import ModelFacts
from bough.layers.batch import AttentionSpec, Batch, rotates
from bough.layers.build import Build
from bough.layers.linear import QKVLinear, kv_heads_per_rank
from bough.layers.norm import RMSNorm
from bough.layers.rotary import Rope


class Attention(nn.Module):
    """One layer's attention over this rank's heads."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        self.by_token_VO: Tensor | None = None
        """What the projection gives for each token of the vocabulary, where that is known (in the first layer)."""

    def project(
        self, norm: RMSNorm, qkv: QKVLinear, x_TD: Tensor, residual_TD: Tensor | None, batch: Batch
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """How a block begins: what `forward` takes, [T, N, H], [T, K, H], [T, K, H], and the residual stream with `x_TD`
        added. In the model's last layer there may be queries of those tokens only that are read."""
        table_VO = self.by_token_VO
        if table_VO is not None and batch.embeds_TD is None and not qkv._forward_hooks:  # who watches sees it made
            return qkv.heads(embedding(batch.ids_T, table_VO)), x_TD
        backend = batch.attention
        queries_at_L = backend.queries_at(self.spec) if rotates(backend) else None
        if queries_at_L is None:
            return qkv.after(norm, x_TD, residual_TD)
        x_TD, residual_TD = norm.add(x_TD, residual_TD)
        return qkv(x_TD, queries_at_L), residual_TD

    def forward(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        batch: Batch,
        rope: Rope | None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> Tensor:
        """Norms each head of queries and keys (where norms are given), rotates them, and attends: [T, N * H].

        Backends that can do all of it in one pass over the fused projection do.
        """
        backend = batch.attention
        if rope is None:
            return backend.forward(self.spec, q_TNH, k_TKH, v_TKH)
        if rotates(backend):
            return backend.forward_rope(
                self.spec,
                q_TNH,
                k_TKH,
                v_TKH,
                batch.positions_T,
                rope.cos_sin_PR,
                q_norm=None if q_norm is None else q_norm.weight,
                k_norm=None if k_norm is None else k_norm.weight,
                eps=1e-6 if q_norm is None else q_norm.eps,
                offset=0.0 if q_norm is None else q_norm.offset,
            )
        if q_norm is not None and k_norm is not None:
            q_TNH, k_TKH = rope.after_norms(q_TNH, k_TKH, q_norm, k_norm, batch.positions_T)
        else:
            q_TNH, k_TKH = rope(q_TNH, k_TKH, batch.positions_T)
        return backend.forward(self.spec, q_TNH, k_TKH, v_TKH)


def attention_of(facts: ModelFacts, layer: int, build: Build) -> Attention:
    """The attention of a layer as the facts describe it: heads, scale, window, soft cap."""
    return Attention(
        AttentionSpec(
            layer=layer,
            num_heads=build.mesh.share(facts.num_heads, "attention heads"),
            num_kv_heads=kv_heads_per_rank(facts.num_kv_heads, build),
            head_dim=facts.head_dim,
            scale=facts.attention_scale,
            window=facts.windows[layer],
            softcap=facts.attention_softcap,
            causal=not facts.bidirectional,
        )
    )
