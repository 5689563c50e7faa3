"""A gated delta net, in the place of attention. T tokens of all rows, H value heads, K and V widths of a head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.config.model_facts import GatedDelta
from bough.kernels.delta_rule import scan_row, step_rows
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.linear import GroupedLinear, ReplicatedLinear
from bough.layers.norm import make_norm
from bough.layers.states import CausalConv, PerHead, StateLayer, over_rows
from bough.layers.stream import Input, value_of


class GatedDeltaNet(StateLayer):
    """Projections, a short convolution, the delta rule, and a norm with a gate."""

    def __init__(self, facts: GatedDelta, place: int, hidden: int, build: Build) -> None:
        """`place`: among the layers that keep a state."""
        super().__init__(place, facts.state_shapes)
        self.facts = facts
        keys, values = facts.num_key_heads * facts.key_dim, facts.num_value_heads * facts.value_dim
        groups = facts.num_key_heads
        self.mix = GroupedLinear(hidden, {"q": keys, "k": keys, "v": values, "z": values}, groups, build)
        self.rates = GroupedLinear(hidden, {"b": facts.num_value_heads, "a": facts.num_value_heads}, groups, build)
        self.conv = CausalConv(facts.channels, facts.conv_width, build)
        self.a_log = PerHead(facts.num_value_heads, build)
        self.dt_bias = PerHead(facts.num_value_heads, build)
        self.norm = make_norm(facts.norm, facts.value_dim, build)
        self.out = ReplicatedLinear(values, hidden, build)

    def forward(self, x: Input, batch: Batch) -> Tensor:
        facts, x_TD = self.facts, value_of(x)
        *qkv, z_TF = self.mix(x_TD)
        b_TH, a_TH = (each.float() for each in self.rates(x_TD))
        b_TH = b_TH.sigmoid()
        g_TH = -self.a_log.weight.exp() * F.softplus(a_TH + self.dt_bias.weight)
        mixed_TC = torch.cat(qkv, 1)
        shape = (len(x_TD), facts.num_value_heads, facts.value_dim)

        def scan(part: slice, held: tuple[Tensor, ...]) -> Tensor:
            heads = self._heads(self.conv.row(mixed_TC[part], held[0]))
            return scan_row(*heads, g_TH[part], b_TH[part], held[1])

        def steps(at_N: Tensor, held: tuple[Tensor, ...], states_N: Tensor) -> Tensor:
            heads = self._heads(self.conv.ones(mixed_TC[at_N], held[0], states_N))
            return step_rows(*heads, g_TH[at_N], b_TH[at_N], held[1], states_N)

        read_THV = over_rows(self, batch, g_TH.new_empty(shape), scan, steps)
        gated_THV = self.norm(read_THV.to(x_TD.dtype)).float() * F.silu(z_TF.float().view(shape))
        out_TD: Tensor = self.out(gated_THV.to(x_TD.dtype).flatten(1))
        return out_TD

    def _heads(self, mixed_LC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[L, H, K] queries and keys of length 1, queries scaled; [L, H, V] values."""
        facts = self.facts
        keys = facts.num_key_heads * facts.key_dim
        q, k, v = mixed_LC[:, :keys], mixed_LC[:, keys : 2 * keys], mixed_LC[:, 2 * keys :]
        q, k = (_unit(each.reshape(len(each), facts.num_key_heads, facts.key_dim)) for each in (q, k))
        repeats = facts.num_value_heads // facts.num_key_heads
        if repeats > 1:
            q, k = q.repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1)
        return q * facts.key_dim**-0.5, k, v.reshape(len(v), facts.num_value_heads, facts.value_dim)


def _unit(x_LHK: Tensor) -> Tensor:
    return x_LHK * torch.rsqrt(x_LHK.square().sum(-1, keepdim=True) + 1e-6)
