"""A gated delta net, in the place of attention. T tokens of all rows, H value heads of a rank, K and V widths of a head."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.state_facts import GatedDelta
from bough.kernels.delta_rule import scan_row, step_rows
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.linear import GroupedLinear, HeadsLinear, RowLinear
from bough.layers.norm import RMSNorm
from bough.layers.states import CausalConv, Held, PerHead, StateLayer, times
from bough.layers.stream import Input, Product, value_of


class GatedDeltaNet(StateLayer):
    """Projections, a short convolution, the delta rule, and a norm with a gate. Ranks split the value heads, and hold the
    key heads that these read."""

    def __init__(self, facts: GatedDelta, place: int, hidden: int, build: Build) -> None:
        """`place`: among the layers that keep a state."""
        axis = build.mesh.heads
        share = axis.head_share(facts.num_value_heads, facts.num_key_heads)
        mine, key_heads = share.heads, share.kv_heads
        held = replace(facts, num_value_heads=mine.stop - mine.start, num_key_heads=key_heads.stop - key_heads.start)
        super().__init__(place, held.state_shapes, (held.num_value_heads, held.value_dim), held.input_values)
        self.facts = held
        """Of this rank's heads."""
        keys = (facts.keys, times(key_heads, facts.key_dim))
        values = (facts.values, times(mine, facts.value_dim))
        heads = (facts.num_value_heads, mine)
        mixed = {"q": keys, "k": keys, "v": values}
        self.conv = CausalConv(mixed, facts.conv_width, build)
        self.low: ByChannel | None = None
        if facts.channel_rank is None:
            self.mix = GroupedLinear(hidden, {**mixed, "z": values}, facts.num_key_heads, build)
            self.rates = GroupedLinear(hidden, {"b": heads, "a": heads}, facts.num_key_heads, build)
            self.dt_bias = PerHead(facts.num_value_heads, build, mine)
        else:
            self.mix = GroupedLinear(hidden, mixed, facts.num_key_heads, build)
            self.rates = GroupedLinear(hidden, {"b": heads}, facts.num_key_heads, build)
            self.low = ByChannel(facts, facts.channel_rank, mine, hidden, build)
            self.dt_bias = PerHead(facts.decays, build, times(mine, facts.key_dim))
        self.a_log = PerHead(facts.num_value_heads, build, mine)
        self.norm = RMSNorm(facts.value_dim, facts.norm_eps, build)
        self.out = RowLinear(facts.values, hidden, build, axis=axis, inputs=values[1])

    def forward(self, x: Input, batch: Batch) -> Product:
        x_TD = value_of(x)
        qkv, rates = self.mix(x_TD), self.rates(x_TD)
        if self.low is None:
            z_TF, a_TF = qkv.pop(), rates.pop()
            gate_TF = F.silu(z_TF.float())
        else:
            a_TF, z_TF = self.low(x_TD)
            gate_TF = z_TF.float().sigmoid()
        b_TH = rates[0].float().sigmoid()
        g_THK = F.softplus(a_TF.float() + self.dt_bias.weight).view(*b_TH.shape, -1) * -self.a_log.weight.exp()[:, None]
        read_THV = self.over_rows((torch.cat(qkv, 1), g_THK, b_TH), batch)
        gated_THV = self.norm(read_THV.to(x_TD.dtype)).float() * gate_TF.view(read_THV.shape)
        out: Product = self.out(gated_THV.to(x_TD.dtype).flatten(1))
        return out

    def scan(self, inputs: tuple[Tensor, ...], state: Held) -> Tensor:
        mixed_LC, g_LHK, b_LH = inputs
        return scan_row(*self._heads(self.conv.row(mixed_LC, state[0])), g_LHK, b_LH, state[1])

    def step(self, inputs: tuple[Tensor, ...], states: Held, at_N: Tensor) -> Tensor:
        mixed_NC, g_NHK, b_NH = inputs
        return step_rows(*self._heads(self.conv.ones(mixed_NC, states[0], at_N)), g_NHK, b_NH, states[1], at_N)

    def _heads(self, mixed_LC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[L, G, K] queries and keys, [L, H, V] values: views."""
        facts = self.facts
        q, k, v = mixed_LC.split_with_sizes((facts.keys, facts.keys, facts.values), 1)
        return (
            q.view(len(q), facts.num_key_heads, facts.key_dim),
            k.view(len(k), facts.num_key_heads, facts.key_dim),
            v.view(len(v), facts.num_value_heads, facts.value_dim),
        )


class ByChannel(nn.Module):
    """Rates at which single numbers of a state decay, and gates: each made from few values that all ranks have."""

    def __init__(self, facts: GatedDelta, rank: int, mine: slice, hidden: int, build: Build) -> None:
        """`mine`: heads of this rank."""
        super().__init__()
        every = (rank, slice(0, rank))
        self.down = GroupedLinear(hidden, {"a": every, "z": every}, 1, build)
        self.a = HeadsLinear(rank, facts.num_value_heads, facts.key_dim, mine, build)
        self.z = HeadsLinear(rank, facts.num_value_heads, facts.value_dim, mine, build)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H x K], [T, H x V]"""
        a_TR, z_TR = self.down(x_TD)
        return self.a(a_TR), self.z(z_TR)
