"""Attention of one layer, from the normed stream to what is added to it. The batch brings the backend that knows the pages.

T tokens, D width, N heads, K key-value heads, H width of a head, L tokens that are read at the end.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.model_facts import Gqa, OutputGate, Temperature
from bough.kernels.rows import take_rows
from bough.layers.batch import AttentionSpec, Batch, rotates
from bough.layers.build import Build
from bough.layers.head_norm import HeadNorm, HeadRows, PlainHeadNorm, make_head_norm
from bough.layers.linear import HeadsLinear, QKVLinear, RowLinear
from bough.layers.norm import RMSNorm
from bough.layers.rotary import Rope
from bough.layers.stream import Input, Normed, Product, value_of
from bough.weights.slots import Slot
from bough.weights.stored import Stored, copy_into


class Sinks(nn.Module):
    """A logit for each head that takes part in its softmax and adds nothing."""

    def __init__(self, num_heads: int, mine: slice, build: Build) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.mine = mine
        held = torch.empty(mine.stop - mine.start, dtype=torch.float32, device=build.device)
        self.weight = nn.Parameter(held, requires_grad=False)

    def slots(self) -> dict[str, Slot]:
        return {"weight": Slot((self.num_heads,), partial(_fill, self.weight, self.mine))}


class HeadGate(nn.Module):
    """Multiplies what this rank's heads have read by a product of the layer's input."""

    def __init__(self, attention: Gqa, facts: OutputGate, hidden: int, mine: slice, build: Build) -> None:
        super().__init__()
        width = attention.value_dim if facts.over == "value" else 1
        self.linear = HeadsLinear(hidden, attention.num_heads, width, mine, build)
        self.repeats = attention.value_dim // width
        self.squash = F.softplus if facts.by == "softplus" else torch.sigmoid

    def forward(self, x: Input, read_TF: Tensor, at_L: Tensor | None) -> Tensor:
        """[T, N * V], or [L, N * V] if what was read is that of the tokens `at_L` alone."""
        x_TD = value_of(x)
        if at_L is not None and len(read_TF) != len(x_TD):
            x_TD = x_TD.index_select(0, at_L)
        gate_TG = self.squash(self.linear(x_TD).float()).to(read_TF.dtype)
        if self.repeats == 1:
            return read_TF * gate_TG
        return (read_TF.view(len(read_TF), -1, self.repeats) * gate_TG[:, :, None]).flatten(1)


Heads = tuple[Tensor, Tensor, Tensor]
"""Queries [T, N, H], keys [T, K, H] and values [T, K, V]."""


class Attention(nn.Module):
    """Grouped-query attention over this rank's heads: projections, head norms, rotation, and the KV between them."""

    def __init__(
        self,
        facts: Gqa,
        layer: int,
        hidden: int,
        rope: Rope | None,
        build: Build,
        *,
        in_dim: int | None = None,
        is_shared: bool = False,
    ) -> None:
        """`layer`: its place in the KV cache. `rope`: the tables of `facts.rope`, which layers share. `in_dim`: the width
        of what it reads, if it is not that of the stream. `is_shared`: later layers read its KV, too."""
        super().__init__()
        self.facts = facts
        heads = (facts.num_heads, facts.num_kv_heads, facts.head_dim)
        self.qkv = QKVLinear(
            in_dim or hidden,
            *heads,
            build,
            v_dim=facts.v_dim,
            bias=facts.qkv_bias,
            values_are_keys=facts.values_are_keys,
            k_bias=facts.k_bias,
        )
        axis = build.mesh.heads
        self.share = axis.head_share(facts.num_heads, facts.num_kv_heads)
        mine = self.share.heads
        self.sinks = Sinks(facts.num_heads, mine, build) if facts.sinks else None
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=self.qkv.num_heads,
            num_kv_heads=self.qkv.num_kv_heads,
            head_dim=facts.head_dim,
            v_head_dim=facts.v_dim,
            scale=facts.scale,
            window=facts.window,
            softcap=facts.softcap,
            causal=facts.causal,
            chunk=facts.chunk,
            sinks=None if self.sinks is None else self.sinks.weight,
            slopes=alibi_slopes(facts, build)[mine].contiguous() if facts.alibi is not None else None,
            both_ways=facts.both_ways,
            is_shared=is_shared,
        )
        self.q_norm: HeadNorm | None = None
        self.k_norm: HeadNorm | None = None
        if facts.head_norms is not None:
            norms, width = facts.head_norms, facts.head_dim
            self.q_norm = make_head_norm(norms, HeadRows(facts.num_heads, mine, width), build)
            kv_rows = HeadRows(facts.num_kv_heads, self.share.kv_heads, width, self.share.holders)
            self.k_norm = make_head_norm(norms, kv_rows, build)
        self.v_norm = None if facts.value_norm is None else PlainHeadNorm(facts.value_norm.eps)
        self.norms_after_rope = facts.head_norms is not None and facts.head_norms.after_rope
        self.rope = rope
        self.gate = None if facts.gate is None else HeadGate(facts, facts.gate, hidden, mine, build)
        read = facts.value_dim
        self.out = RowLinear(
            facts.num_heads * read,
            hidden,
            build,
            bias=facts.out_bias,
            axis=axis,
            inputs=slice(mine.start * read, mine.stop * read),
        )
        self.by_token_VO: Tensor | None = None
        """What the projection gives for each token of the vocabulary, where that is known (in the first layer)."""

    @property
    def is_plain(self) -> bool:
        """Whether it does nothing but norm heads by an RMS norm, rotate them in halves, and attend."""
        norms_are_plain = self.q_norm is None or self.kernel_norms is not None
        rope_is_plain = self.rope is None or not self.rope.interleaved
        return (
            norms_are_plain
            and rope_is_plain
            and self.spec.is_plain
            and self.facts.clip is None
            and self.facts.temperature is None
            and self.facts.value_scale is None
            and self.v_norm is None
            and self.gate is None
        )

    def forward(self, x: Input, batch: Batch) -> Product:
        """What is added to the stream. In the model's last layer it may be that of the tokens alone that are read, to which
        the stream is then narrowed."""
        attended_TF = self.attended(x, batch)
        out: Product = self.out(attended_TF)
        return out

    def attended(self, x: Input, batch: Batch) -> Tensor:
        """[T, N * H]: `forward` without its last product."""
        backend = batch.attention
        queries_at_L = backend.queries_at(self.spec) if rotates(backend) else None
        fuses = self.facts.temperature is None and not self.norms_after_rope
        if self.gate is not None and isinstance(x, Normed):
            x.now()
        heads = self._heads(x, batch, queries_at_L if fuses else None)
        attended_TF = self._attend(*heads, batch)
        if self.gate is not None:
            attended_TF = self.gate(x, attended_TF, queries_at_L)
        if queries_at_L is not None and isinstance(x, Normed):
            x.stream.narrow(queries_at_L)
        return attended_TF

    def _heads(self, x: Input, batch: Batch, queries_at_L: Tensor | None) -> Heads:
        """[T, N, H], [T, K, H], [T, K, H], or queries of some tokens only."""
        table_VO = self.by_token_VO
        plain = batch.media is None and batch.adapters is None
        if table_VO is not None and plain and isinstance(x, Normed) and x.stream.fuses:
            known_TO, batch.first_TO = batch.first_TO, None
            return self.qkv.heads(take_rows(batch.ids_T, table_VO)[0] if known_TO is None else known_TO)
        heads: Heads = self.qkv(x, queries_at_L)
        return heads

    def _attend(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, batch: Batch) -> Tensor:
        """[T, N * H]. Backends that can norm, rotate, write and attend in one pass over the fused projection do."""
        backend, rope = batch.attention, self.rope
        if self.facts.temperature is not None:
            q_TNH = q_TNH * growth(self.facts.temperature, batch.positions_T)[:, None, None].to(q_TNH.dtype)
        norms = self.kernel_norms
        if norms is None and not self.norms_after_rope:
            q_TNH, k_TKH = self._normed(q_TNH, k_TKH)
        if self.v_norm is not None:  # before keys are rotated, perhaps in place: values may be the same numbers
            v_TKH = self.v_norm(v_TKH)
        if self.facts.value_scale is not None:
            v_TKH = v_TKH * self.facts.value_scale
        if self.facts.clip is not None:
            q_TNH, k_TKH, v_TKH = (each.clamp(-self.facts.clip, self.facts.clip) for each in (q_TNH, k_TKH, v_TKH))
        if rope is not None and rotates(backend) and not self.norms_after_rope:
            q_norm, k_norm = (None, None) if norms is None else norms
            positions_T, cos_sin_PR = rope.at(batch)
            return backend.forward_rope(
                self.spec,
                q_TNH,
                k_TKH,
                v_TKH,
                positions_T,
                cos_sin_PR,
                q_norm=None if q_norm is None else q_norm.weight,
                k_norm=None if k_norm is None else k_norm.weight,
                eps=1e-6 if q_norm is None else q_norm.eps,
                offset=0.0 if q_norm is None else q_norm.offset,
                interleaved=rope.interleaved,
            )
        if rope is not None and norms is not None:
            q_TNH, k_TKH = rope.after_norms(q_TNH, k_TKH, *norms, batch)
        elif rope is not None:
            q_TNH, k_TKH = rope(q_TNH, k_TKH, batch)
        if self.norms_after_rope:
            q_TNH, k_TKH = self._normed(q_TNH, k_TKH)
        return backend.forward(self.spec, q_TNH, k_TKH, v_TKH)

    @property
    def kernel_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """The norms of heads, if kernels that rotate can apply them."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if self.rope is None or self.norms_after_rope or self.facts.clip is not None:
            return None
        return (q_norm, k_norm) if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm) else None

    def _normed(self, q_TNH: Tensor, k_TKH: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q_TNH, k_TKH
        return self.q_norm(q_TNH), self.k_norm(k_TKH)


def growth(facts: Temperature, positions_T: Tensor) -> Tensor:
    """float32 [T]: what queries at these positions are multiplied by."""
    return 1 + facts.scale * torch.log1p(torch.floor((positions_T + facts.shift) / facts.every))


def alibi_slopes(facts: Gqa, build: Build) -> Tensor:
    """float32 [heads]: by how much a score grows with each position, in each head of the model.

    A geometric sequence over the next power of two of heads; for other counts every second one of the next, as trained.
    """
    count = 1 << (facts.num_heads - 1).bit_length()
    powers = torch.arange(1, count + 1, dtype=torch.float32) * (facts.alibi_bias_max / count)
    slopes = torch.pow(2.0, -powers)
    if count != facts.num_heads:
        slopes = torch.cat((slopes[1::2], slopes[::2]))[: facts.num_heads]
    return slopes.to(build.device) * (facts.alibi or 0.0)


def _fill(target: Tensor, heads: slice, stored: Stored) -> None:
    copy_into(target, stored, heads)
