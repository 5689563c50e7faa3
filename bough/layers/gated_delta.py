"""A gated delta net, in the place of attention. T tokens of all rows, H value heads of a rank, K and V widths of a head."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.config.state_facts import GatedDelta
from bough.kernels.delta_rule import scan_row, step_rows
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.linear import GroupedLinear, RowLinear
from bough.layers.norm import RMSNorm
from bough.layers.states import CausalConv, Held, PerHead, StateLayer, after, times
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
        keys, values = facts.num_key_heads * facts.key_dim, facts.num_value_heads * facts.value_dim
        my_keys, my_values = times(key_heads, facts.key_dim), times(mine, facts.value_dim)
        widths = {"q": (keys, my_keys), "k": (keys, my_keys), "v": (values, my_values), "z": (values, my_values)}
        heads = (facts.num_value_heads, mine)
        self.mix = GroupedLinear(hidden, widths, facts.num_key_heads, build)
        self.rates = GroupedLinear(hidden, {"b": heads, "a": heads}, facts.num_key_heads, build)
        channels = (my_keys, after(my_keys, keys), after(my_values, 2 * keys))
        self.conv = CausalConv(facts.channels, facts.conv_width, build, mine=channels)
        self.a_log = PerHead(facts.num_value_heads, build, mine)
        self.dt_bias = PerHead(facts.num_value_heads, build, mine)
        self.norm = RMSNorm(facts.value_dim, facts.norm_eps, build)
        self.out = RowLinear(values, hidden, build, axis=axis, inputs=my_values)

    def forward(self, x: Input, batch: Batch) -> Product:
        x_TD = value_of(x)
        *qkv, z_TF = self.mix(x_TD)
        b_TH, a_TH = (each.float() for each in self.rates(x_TD))
        g_TH = -self.a_log.weight.exp() * F.softplus(a_TH + self.dt_bias.weight)
        read_THV = self.over_rows((torch.cat(qkv, 1), g_TH, b_TH.sigmoid()), batch)
        gate_THV = F.silu(z_TF.float().view(read_THV.shape))
        gated_THV = self.norm(read_THV.to(x_TD.dtype)).float() * gate_THV
        out: Product = self.out(gated_THV.to(x_TD.dtype).flatten(1))
        return out

    def scan(self, inputs: tuple[Tensor, ...], state: Held) -> Tensor:
        mixed_LC, g_LH, b_LH = inputs
        return scan_row(*self._heads(self.conv.row(mixed_LC, state[0])), g_LH, b_LH, state[1])

    def step(self, inputs: tuple[Tensor, ...], states: Held, at_N: Tensor) -> Tensor:
        mixed_NC, g_NH, b_NH = inputs
        return step_rows(*self._heads(self.conv.ones(mixed_NC, states[0], at_N)), g_NH, b_NH, states[1], at_N)

    def _heads(self, mixed_LC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[L, G, K] queries and keys, [L, H, V] values: views."""
        facts = self.facts
        keys, values = facts.num_key_heads * facts.key_dim, facts.num_value_heads * facts.value_dim
        q, k, v = mixed_LC.split_with_sizes((keys, keys, values), 1)
        return (
            q.view(len(q), facts.num_key_heads, facts.key_dim),
            k.view(len(k), facts.num_key_heads, facts.key_dim),
            v.view(len(v), facts.num_value_heads, facts.value_dim),
        )
