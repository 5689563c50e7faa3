"""Attention over latents (MLA). What is kept of a token is one vector, from which each head would make its key and value.

A head's product that would make keys is applied to its query instead, and the one that would make values to what it has
read ("absorbed"): heads then read the latents as they are, as one shared key whose first numbers are the value too. Backends
that know latents may make keys and values of them where that is faster. Sparse layers read the latents of tokens alone that
an indexer has chosen.

T tokens, D width, N heads, R width of a latent, E width of the rotated part, C width of the rest of a head's query, V width
of a head's value.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.model_facts import Mla
from bough.core.errors import ConfigError
from bough.layers.attention import growth
from bough.layers.batch import AttentionSpec, Batch, RawLatents, chooses, rotates, takes_latents
from bough.layers.build import Build
from bough.layers.indexer import TokenIndexer
from bough.layers.linear import HeadsLinear, JoinedLinear, RowLinear
from bough.layers.norm import RMSNorm, make_norm
from bough.layers.rotary import Rope
from bough.layers.stream import Input, Normed, Product, value_of
from bough.quantization.scheme import Matrix, Part
from bough.quantization.unquantized import Unquantized
from bough.weights.slots import FinishesLoading, Slot


class LatentAttention(nn.Module):
    """Every rank keeps all latents, and reads them with its own heads."""

    def __init__(self, facts: Mla, layer: int, hidden: int, rope: Rope | None, build: Build) -> None:
        """`layer`: its place in the KV cache. `rope`: the tables of `facts.rope`."""
        super().__init__()
        self.facts = facts
        self.rope = rope
        axis = build.mesh.heads
        mine = axis.slice(facts.num_heads, "attention heads")
        self.num_heads: int = mine.stop - mine.start
        self.indexer: TokenIndexer | None = None
        if facts.indexer is not None:
            if facts.q_rank is None or rope is None:
                raise ConfigError(
                    what="the model's config describes an indexer that has nothing to read",
                    why="it reads what queries are made from (q_lora_rank), and positions",
                    fix="check config.json",
                )
            self.indexer = TokenIndexer(facts.indexer, hidden, facts.q_rank, rope, build)
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=facts.kv_values,
            v_head_dim=facts.kv_rank,
            scale=facts.scale,
            latent=True,
            topk=0 if facts.sparse is None else facts.sparse.topk,
            index=None if self.indexer is None else self.indexer.kept,
        )
        down = {"kv": facts.kv_values} if facts.q_rank is None else {"q": facts.q_rank, "kv": facts.kv_values}
        self.q_up: HeadsLinear | QueriesBeside
        if _joins_queries(facts, build):
            widths = {"q": facts.num_heads * facts.head_dim, **down}
            rows = slice(mine.start * facts.head_dim, mine.stop * facts.head_dim)
            self.down = JoinedLinear(hidden, widths, build, mine={"q": rows})
            self.q_up = QueriesBeside(self.down, facts.head_dim)
        else:
            self.down = JoinedLinear(hidden, down, build, bias=facts.bias)
            self.q_up = HeadsLinear(facts.q_rank or hidden, facts.num_heads, facts.head_dim, mine, build)
        if facts.q_rank is not None:
            self.q_norm = make_norm(facts.norm, facts.q_rank, build)
        self.kv_norm = make_norm(facts.norm, facts.kv_rank, build)
        self.kv_up = Expansion(facts, mine, build)
        inputs = slice(mine.start * facts.v_dim, mine.stop * facts.v_dim)
        self.out = RowLinear(
            facts.num_heads * facts.v_dim, hidden, build, bias=facts.bias, axis=axis, inputs=inputs
        )  # fmt: skip

    def forward(self, x: Input, batch: Batch) -> Product:
        """What is added to the stream. In the model's last layer it may be that of the tokens alone that are read."""
        backend = batch.attention
        queries_at_L = backend.queries_at(self.spec) if rotates(backend) else None
        q_TO, query_TP, kv_TX = self._products(x)
        q_TNH = q_TO.view(len(q_TO), self.num_heads, self.facts.head_dim)
        if self.facts.temperature is not None:
            q_TNH = q_TNH * growth(self.facts.temperature, batch.positions_T)[:, None, None].to(q_TNH.dtype)
        if self.indexer is not None:
            assert chooses(backend), "who serves such models has a backend that does"
            backend.choose(self.spec, self.indexer(value_of(x), query_TP, batch))
        norm = self.kv_norm
        if self.rope is not None and isinstance(norm, RMSNorm) and takes_latents(backend):
            raw = RawLatents(
                q_TNH, kv_TX, norm.weight, norm.eps, norm.offset, *self.rope.at(batch), self.rope.interleaved
            )  # fmt: skip
            read_TF = backend.forward_latent(self.spec, raw, self.kv_up)
        else:
            read_TF = self._absorbed(q_TNH, kv_TX, batch)
        if queries_at_L is not None and isinstance(x, Normed):
            x.stream.narrow(queries_at_L)
        out: Product = self.out(read_TF)
        return out

    def _products(self, x: Input) -> tuple[Tensor, Tensor, Tensor]:
        """(queries [T, N * H], what they were made from, and what latents and rotated keys are made from, [T, R + E]). A
        product that alone reads the inputs may have their norm in it."""
        if isinstance(self.q_up, QueriesBeside):
            q_TO, kv_TX = self.down(x)
            return q_TO, q_TO, kv_TX
        if self.facts.q_rank is None:
            x_TD = value_of(x)
            (kv_TX,) = self.down(x_TD)
            return self.q_up(x_TD), x_TD, kv_TX
        q_TP, kv_TX = self.down(x if self.indexer is None else value_of(x))
        query_TP = self.q_norm(q_TP)
        return self.q_up(query_TP), query_TP, kv_TX

    def _absorbed(self, q_TNH: Tensor, kv_TX: Tensor, batch: Batch) -> Tensor:
        """[T, N * V], or [L, N * V]: heads read latents as they are."""
        q_TNC, q_TNE = q_TNH.split_with_sizes((self.facts.nope_dim, self.facts.rope_dim), 2)
        latent_TR, k_TE = kv_TX.split_with_sizes((self.facts.kv_rank, self.facts.rope_dim), 1)
        k_T1E = k_TE.unsqueeze(1)
        if self.rope is not None:
            q_TNE, k_T1E = self.rope(q_TNE.contiguous(), k_T1E.contiguous(), batch)
        q_TNR = q_TNC.new_empty((*q_TNC.shape[:2], self.facts.kv_rank))
        self.kv_up.absorb(q_TNC, q_TNR)
        q = torch.cat((q_TNR, q_TNE), 2)
        k = torch.cat((self.kv_norm(latent_TR.contiguous()).unsqueeze(1), k_T1E), 2)
        read_TF = batch.attention.forward(self.spec, q, k, k[..., : self.facts.kv_rank])
        out_TNV = read_TF.new_empty((len(read_TF), self.num_heads, self.facts.v_dim))
        self.kv_up.values(read_TF.view(len(read_TF), self.num_heads, -1), out_TNV)
        return out_TNV.flatten(1)


def _joins_queries(facts: Mla, build: Build) -> bool:
    """Whether queries are made from the layer's inputs, in one product with latents: both must be stored alike."""
    return facts.q_rank is None and not facts.bias and isinstance(build.scheme, Unquantized)


class QueriesBeside(nn.Module):
    """The part "q" of a joined product, which a checkpoint has by itself."""

    def __init__(self, joined: JoinedLinear, head_dim: int) -> None:
        super().__init__()
        joined.lend("q")
        self.head_dim = head_dim
        self._joined = [joined]
        """In a list: it is no part of this."""

    def slots(self) -> dict[str, Slot]:
        slots = self._joined[0].slots_of("q")
        return {name: replace(slot, head_rows=self.head_dim) for name, slot in slots.items()}


class Expansion(nn.Module):
    """The matrices that would make each head's key and value from a latent. Both are applied from the other side, so they
    are kept as floats: what a scheme stores is multiplied out once it is loaded."""

    def __init__(self, facts: Mla, heads: slice, build: Build) -> None:
        super().__init__()
        self.nope_dim, self.v_dim = facts.nope_dim, facts.v_dim
        self.build = build
        each = facts.nope_dim + facts.v_dim
        rows = slice(heads.start * each, heads.stop * each)
        self.part = Part("", (facts.num_heads * each, facts.kv_rank), rows, slice(None))
        held = torch.empty(heads.stop - heads.start, each, facts.kv_rank, dtype=build.dtype, device=build.device)
        self.weight = nn.Parameter(held, requires_grad=False)
        self._stored: list[Matrix] = []
        """As the scheme stores it, until it is loaded. In a list: it is no part of the model."""

    def place(self, name: str) -> None:
        self._stored = [self.build.matrix(name, (self.part,))]

    def slots(self) -> dict[str, Slot]:
        return self._stored[0].weight_slots()

    def finish_loading(self) -> None:
        stored = self._stored.pop()
        if isinstance(stored, FinishesLoading):
            stored.finish_loading()
        ones_RR = torch.eye(self.part.shape[1], dtype=self.weight.dtype, device=self.weight.device)
        self.weight.copy_(stored.forward(ones_RR).T.view(self.weight.shape))

    def absorb(self, q_TNC: Tensor, out_TNR: Tensor) -> None:
        """As `LatentMaps` says, and so below."""
        torch.bmm(q_TNC.transpose(0, 1), self.weight[:, : self.nope_dim], out=out_TNR.transpose(0, 1))

    def values(self, read_TNR: Tensor, out_TNV: Tensor) -> None:
        up_NRV = self.weight[:, self.nope_dim :].transpose(1, 2)
        torch.bmm(read_TNR.transpose(0, 1), up_NRV, out=out_TNV.transpose(0, 1))

    def expand(self, latents_SR: Tensor) -> tuple[Tensor, Tensor]:
        both = F.linear(latents_SR, self.weight.flatten(0, 1)).view(-1, *self.weight.shape[:2])
        return both[..., : self.nope_dim], both[..., self.nope_dim :]
