"""Mamba and Mamba 2, in the place of attention. T tokens of all rows, H heads of a rank, P inputs of a head, G groups of
heads, N numbers of a state, C channels of the convolution."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.state_facts import Mamba, Mamba2
from bough.kernels import selective_scan, ssd
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.linear import GroupedLinear, HeadsLinear, RowLinear
from bough.layers.norm import RMSNorm
from bough.layers.states import CausalConv, DecayRates, Held, PerHead, StateLayer, fill_part, times
from bough.layers.stream import Input, Product, value_of
from bough.weights.slots import Slot


class Mamba2Mixer(StateLayer):
    """Projections, a short convolution, the recurrence, a gate and a norm. Ranks split the heads, and hold the groups that
    these read."""

    def __init__(self, facts: Mamba2, place: int, hidden: int, build: Build) -> None:
        """`place`: among the layers that keep a state."""
        axis = build.mesh.heads
        mine, groups, _ = axis.head_share(facts.num_heads, facts.num_groups)
        held = replace(facts, num_heads=mine.stop - mine.start, num_groups=groups.stop - groups.start)
        super().__init__(place, held.state_shapes, (held.num_heads, held.head_dim), held.input_values)
        self.facts = held
        """Of this rank's heads."""
        shared = facts.num_groups * facts.state_dim
        my_inner, my_shared = times(mine, facts.head_dim), times(groups, facts.state_dim)
        inputs, vectors = (facts.inner, my_inner), (shared, my_shared)
        widths = {"z": inputs, "x": inputs, "b": vectors, "c": vectors, "dt": (facts.num_heads, mine)}
        self.mix = GroupedLinear(hidden, widths, 1, build, bias=facts.in_bias)
        self.scales_O: Tensor | None = None
        if facts.scales is not None:
            both = zip(self.mix.widths, facts.scales, strict=True)
            made = [torch.full((width,), scale, dtype=build.dtype, device=build.device) for width, scale in both]
            self.scales_O = torch.cat(made)
        convolved = {"x": inputs, "b": vectors, "c": vectors}
        self.conv = CausalConv(convolved, facts.conv_width, build, bias=facts.conv_bias)
        self.rates = DecayRates(facts.num_heads, build, mine)
        self.step_bias, self.skip = PerHead(facts.num_heads, build, mine), PerHead(facts.num_heads, build, mine)
        self.norm: GroupedNorm | None = None
        if facts.norm_eps is not None:
            self.norm = GroupedNorm(facts.inner, facts.num_groups, facts.norm_eps, my_inner, groups, build)
        self.out = RowLinear(facts.inner, hidden, build, bias=facts.out_bias, axis=axis, inputs=my_inner)

    def forward(self, x: Input, batch: Batch) -> Product:
        facts = self.facts
        mixed_TO = self.mix.whole(x)
        if self.scales_O is not None:
            mixed_TO = mixed_TO * self.scales_O
        z_TF, mixed_TC, dt_TH = mixed_TO.split_with_sizes((facts.inner, facts.channels, facts.num_heads), 1)
        dt_TH = F.softplus(dt_TH.float() + self.step_bias.weight)
        if facts.step_limits is not None:
            dt_TH = dt_TH.clamp(*facts.step_limits)
        read_TF = self.over_rows((mixed_TC, dt_TH), batch).flatten(1)
        gate_TF = F.silu(z_TF.float())
        if self.norm is None:
            read_TF = read_TF * gate_TF
        else:
            read_TF = self.norm(read_TF) * gate_TF if facts.norm_first else self.norm(read_TF * gate_TF)
        out: Product = self.out(read_TF.to(mixed_TO.dtype))
        return out

    def scan(self, inputs: tuple[Tensor, ...], state: Held) -> Tensor:
        mixed_LC, dt_LH = inputs
        x, b, c = self._parts(self.conv.row(mixed_LC, state[0]))
        return ssd.scan_row(x, dt_LH, self.rates.weight, b, c, self.skip.weight, state[1])

    def step(self, inputs: tuple[Tensor, ...], states: Held, at_N: Tensor) -> Tensor:
        mixed_NC, dt_NH = inputs
        x, b, c = self._parts(self.conv.ones(mixed_NC, states[0], at_N))
        return ssd.step_rows(x, dt_NH, self.rates.weight, b, c, self.skip.weight, states[1], at_N)

    def _parts(self, mixed_LC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs [L, H, P], and B and C [L, G, N]."""
        facts, length = self.facts, len(mixed_LC)
        shared = facts.num_groups * facts.state_dim
        x, b, c = mixed_LC.split_with_sizes((facts.inner, shared, shared), 1)
        vectors = (length, facts.num_groups, facts.state_dim)
        return x.view(length, facts.num_heads, facts.head_dim), b.view(vectors), c.view(vectors)


class GroupedNorm(nn.Module):
    """An RMS norm of each group of neighbours. Where ranks hold parts of one group, they add up their squares."""

    def __init__(self, dim: int, groups: int, eps: float, mine: slice, my_groups: slice, build: Build) -> None:
        """`dim`: values of all groups; `mine`: those of this rank, in the groups `my_groups`."""
        super().__init__()
        self.dim, self.groups, self.eps = dim, groups, eps
        self.mine, self.my_groups = mine, my_groups
        self.axis = build.mesh.heads
        held = torch.empty(mine.stop - mine.start, dtype=build.dtype, device=build.device)
        self.weight = nn.Parameter(held, requires_grad=False)

    def slots(self) -> dict[str, Slot]:
        return {"weight": Slot((self.dim,), partial(fill_part, self.weight, self.mine))}

    def forward(self, x_TF: Tensor) -> Tensor:
        """`x_TF`: float32, as the result."""
        held = x_TF.view(len(x_TF), self.my_groups.stop - self.my_groups.start, -1)
        if self.axis.size <= self.groups:
            mean_TG1 = held.square().mean(-1, keepdim=True)
        else:
            squares_TG = x_TF.new_zeros(len(x_TF), self.groups)
            squares_TG[:, self.my_groups] = held.square().sum(-1)
            squares_TG = self.axis.talk.all_reduce(squares_TG)[:, self.my_groups]
            mean_TG1 = squares_TG[:, :, None] / (self.dim // self.groups)
        return (held * torch.rsqrt(mean_TG1 + self.eps)).view(x_TF.shape) * self.weight.float()


class MambaMixer(StateLayer):
    """Projections, a short convolution, what steps, B and C are made from, the recurrence, and a gate. Ranks split the
    channels."""

    def __init__(self, facts: Mamba, place: int, hidden: int, build: Build) -> None:
        """`place`: among the layers that keep a state."""
        axis = build.mesh.heads
        mine = axis.slice(facts.inner, "channels")
        held = replace(facts, inner=mine.stop - mine.start)
        super().__init__(place, held.state_shapes, (held.inner,), held.input_values)
        self.facts = held
        """Of this rank's channels."""
        both = {"x": (facts.inner, mine), "z": (facts.inner, mine)}
        self.mix = GroupedLinear(hidden, both, 1, build, bias=facts.bias)
        self.conv = CausalConv({"": (facts.inner, mine)}, facts.conv_width, build, bias=facts.conv_bias)
        made = facts.step_rank + 2 * facts.state_dim
        self.select = RowLinear(facts.inner, made, build, axis=axis, inputs=mine)
        self.norms: nn.ModuleDict | None = None
        if facts.norm_eps is not None:
            widths = {"dt": facts.step_rank, "b": facts.state_dim, "c": facts.state_dim}
            norm = partial(RMSNorm, eps=facts.norm_eps, build=build, weight=facts.norm_weights)
            self.norms = nn.ModuleDict({name: norm(width) for name, width in widths.items()})
        self.steps = HeadsLinear(facts.step_rank, facts.inner, 1, mine, build)
        self.step_bias = PerHead(facts.inner, build, mine)
        self.rates = DecayRates(facts.inner, build, mine, facts.state_dim)
        self.skip = PerHead(facts.inner, build, mine)
        self.out = RowLinear(facts.inner, hidden, build, bias=facts.bias, axis=axis, inputs=mine)

    def forward(self, x: Input, batch: Batch) -> Product:
        x_TC, z_TC = self.mix(x)
        read_TC = self.over_rows((x_TC,), batch) * F.silu(z_TC.float())
        out: Product = self.out(read_TC.to(x_TC.dtype))
        return out

    def scan(self, inputs: tuple[Tensor, ...], state: Held) -> Tensor:
        x_LC = self.conv.row(inputs[0], state[0])
        dt, b, c = self._selected(x_LC.to(inputs[0].dtype))
        return selective_scan.scan_row(x_LC, dt, self.rates.weight, b, c, self.skip.weight, state[1])

    def step(self, inputs: tuple[Tensor, ...], states: Held, at_N: Tensor) -> Tensor:
        x_NC = self.conv.ones(inputs[0], states[0], at_N)
        dt, b, c = self._selected(x_NC.to(inputs[0].dtype))
        return selective_scan.step_rows(x_NC, dt, self.rates.weight, b, c, self.skip.weight, states[1], at_N)

    def _selected(self, x_LC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Steps [L, C], and B and C [L, N], in float32."""
        facts = self.facts
        sizes = (facts.step_rank, facts.state_dim, facts.state_dim)
        parts = tuple(value_of(self.select(x_LC)).split_with_sizes(sizes, 1))
        if self.norms is not None:
            parts = tuple(norm(part) for norm, part in zip(self.norms.values(), parts, strict=True))
        dt, b, c = parts
        return F.softplus(self.steps(dt).float() + self.step_bias.weight), b.float(), c.float()
