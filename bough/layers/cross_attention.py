"""Attention over the media of a request: queries are tokens', keys and values are made of a tower's embeddings, once.

T tokens, M positions of media, D width, N heads, K key-value heads, H width of a head.
"""

from __future__ import annotations

from torch import Tensor, nn

from bough.config.model_facts import Cross
from bough.layers.batch import AttentionSpec, Batch
from bough.layers.build import Build
from bough.layers.head_norm import HeadNorm, HeadRows, make_head_norm
from bough.layers.linear import QKVLinear, RowLinear
from bough.layers.stream import Input, Product


class CrossAttention(nn.Module):
    """Over this rank's heads. Keys and values of media that are new to the KV cache are written before they are read."""

    def __init__(self, facts: Cross, layer: int, hidden: int, build: Build) -> None:
        """`layer`: its place in the KV cache."""
        super().__init__()
        heads = (facts.num_heads, facts.num_kv_heads, facts.head_dim)
        self.qkv = QKVLinear(hidden, *heads, build, bias=facts.bias, k_bias=False)
        axis = build.mesh.heads
        share = axis.head_share(facts.num_heads, facts.num_kv_heads)
        mine, width = share.heads, facts.head_dim
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=self.qkv.num_heads,
            num_kv_heads=self.qkv.num_kv_heads,
            head_dim=width,
            scale=facts.scale,
            media=facts.positions,
        )
        self.q_norm: HeadNorm | None = None
        self.k_norm: HeadNorm | None = None
        if facts.head_norms is not None:
            self.q_norm = make_head_norm(facts.head_norms, HeadRows(facts.num_heads, mine, width), build)
            kv_rows = HeadRows(facts.num_kv_heads, share.kv_heads, width, share.holders)
            self.k_norm = make_head_norm(facts.head_norms, kv_rows, build)
        self.out = RowLinear(
            facts.num_heads * width,
            hidden,
            build,
            bias=facts.bias,
            axis=axis,
            inputs=slice(mine.start * width, mine.stop * width),
        )

    def forward(self, x: Input, batch: Batch) -> Product:
        """What is added to the stream."""
        out: Product = self.out(self.attended(x, batch))
        return out

    def attended(self, x: Input, batch: Batch) -> Tensor:
        """[T, N * H]: `forward` without its last product."""
        assert batch.cross is not None, "a runner of such a model brings it"
        fresh_MD = batch.cross.fresh_MW
        if fresh_MD is not None:
            k_MKH, v_MKH = self.qkv.keys_and_values(fresh_MD)
            batch.cross.write(self.spec, k_MKH if self.k_norm is None else self.k_norm(k_MKH), v_MKH)
        q_TNH = self.qkv.queries(x)
        return batch.cross.attend(self.spec, q_TNH if self.q_norm is None else self.q_norm(q_TNH))
