"""Attention of a layer that keeps no keys and values: its queries read those of an earlier layer.

T tokens, D width, N heads, H width of a head.
"""

from __future__ import annotations

from torch import Tensor, nn

from bough.config.model_facts import Gqa
from bough.layers.batch import AttentionSpec, Batch
from bough.layers.build import Build
from bough.layers.head_norm import HeadNorm, HeadRows, make_head_norm
from bough.layers.linear import HeadsLinear, RowLinear
from bough.layers.norm import RMSNorm
from bough.layers.rotary import Rope
from bough.layers.stream import Input, Normed, Product, value_of
from bough.weights.slots import Slot, pass_over


class SharedKvAttention(nn.Module):
    """Grouped-query attention over this rank's heads, to the KV of another layer."""

    def __init__(self, facts: Gqa, kv_layer: int, hidden: int, rope: Rope | None, build: Build) -> None:
        """`kv_layer`: the place of the KV that it reads."""
        super().__init__()
        axis = build.mesh.heads
        share = axis.head_share(facts.num_heads, facts.num_kv_heads)
        mine = share.heads
        self.facts, self.hidden = facts, hidden
        self.qkv = HeadsLinear(hidden, facts.num_heads, facts.head_dim, mine, build, part="q", bias=facts.qkv_bias)
        self.reads = AttentionSpec(
            layer=kv_layer,
            num_heads=mine.stop - mine.start,
            num_kv_heads=share.kv_heads.stop - share.kv_heads.start,
            head_dim=facts.head_dim,
            v_head_dim=facts.v_dim,
            scale=facts.scale,
            window=facts.window,
            softcap=facts.softcap,
            causal=facts.causal,
            chunk=facts.chunk,
            both_ways=facts.both_ways,
        )
        self.q_norm: HeadNorm | None = None
        if facts.head_norms is not None:
            self.q_norm = make_head_norm(facts.head_norms, HeadRows(facts.num_heads, mine, facts.head_dim), build)
        self.rope = rope
        read = facts.value_dim
        self.out = RowLinear(
            facts.num_heads * read,
            hidden,
            build,
            bias=facts.out_bias,
            axis=axis,
            inputs=slice(mine.start * read, mine.stop * read),
        )

    def slots(self) -> dict[str, Slot]:
        """Some checkpoints hold keys, values and their norms, which nothing reads."""
        facts = self.facts
        unread = {"qkv.k": facts.num_kv_heads * facts.head_dim, "qkv.v": facts.num_kv_heads * facts.value_dim}
        slots = {f"{name}.weight": Slot((rows, self.hidden), pass_over, optional=True) for name, rows in unread.items()}
        if facts.qkv_bias:
            slots |= {f"{name}.bias": Slot((rows,), pass_over, optional=True) for name, rows in unread.items()}
        return {**slots, "k_norm.weight": Slot((facts.head_dim,), pass_over, optional=True)}

    def forward(self, x: Input, batch: Batch) -> Product:
        """What is added to the stream."""
        x_TD, positions_T = value_of(x), batch.positions_T
        if isinstance(x, Normed):  # which the layer that keeps the KV may have narrowed
            positions_T = x.stream.fit(positions_T)
        q_TNH = self.qkv(x_TD).view(len(x_TD), -1, self.reads.head_dim)
        norm = self.q_norm
        if self.rope is not None and (norm is None or isinstance(norm, RMSNorm)):
            q_TNH = self.rope.queries(q_TNH, norm, positions_T)
        else:
            q_TNH = q_TNH if norm is None else norm(q_TNH)
            q_TNH = q_TNH if self.rope is None else self.rope.queries(q_TNH, None, positions_T)
        out: Product = self.out(self._read(q_TNH, batch))
        return out

    def _read(self, q_TNH: Tensor, batch: Batch) -> Tensor:
        return batch.attention.attend(self.reads, q_TNH)
