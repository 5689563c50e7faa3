"""Lightning attention. T tokens of all rows, H heads of a rank, P their width."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.config.state_facts import Lightning
from bough.kernels import ssd
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.linear import GroupedLinear, RowLinear
from bough.layers.mamba import GroupedNorm
from bough.layers.states import Held, StateLayer, times
from bough.layers.stream import Input, Product, value_of


class LightningAttention(StateLayer):
    """Projections, the recurrence, a norm over all heads and a gate. Ranks split the heads.

    The recurrence is Mamba 2's with values as inputs, keys as B, queries as C, and steps of 1."""

    def __init__(self, facts: Lightning, place: int, hidden: int, build: Build) -> None:
        """`place`: among the layers that keep a state."""
        axis = build.mesh.heads
        heads = axis.slice(facts.num_heads, "attention heads")
        held = replace(facts, num_heads=heads.stop - heads.start)
        super().__init__(place, held.state_shapes, (held.num_heads, held.head_dim), held.input_values)
        self.facts = held
        """Of this rank's heads."""
        mine = times(heads, facts.head_dim)
        width = (facts.inner, mine)
        self.mix = GroupedLinear(hidden, {"q": width, "k": width, "v": width, "z": width}, facts.num_heads, build)
        self.norm = GroupedNorm(facts.inner, 1, facts.norm_eps, mine, slice(0, 1), build)
        self.out = RowLinear(facts.inner, hidden, build, axis=axis, inputs=mine)
        powers = torch.arange(1, facts.num_heads + 1, dtype=torch.float32) * (8 / facts.num_heads)
        rates_H = (-facts.rate_scale * torch.exp2(-powers))[heads].to(build.device)
        self.rates_H: Tensor
        self.skip_H: Tensor
        self.register_buffer("rates_H", rates_H, persistent=False)
        self.register_buffer("skip_H", torch.zeros_like(rates_H), persistent=False)

    def forward(self, x: Input, batch: Batch) -> Product:
        x_TD = value_of(x)
        qkv_TF, z_TF = self.mix.whole(x_TD).split_with_sizes((3 * self.facts.inner, self.facts.inner), 1)
        read_TF = self.norm(self.over_rows((F.silu(qkv_TF.float()),), batch).flatten(1))
        out: Product = self.out((read_TF * z_TF.float().sigmoid()).to(x_TD.dtype))
        return out

    def scan(self, inputs: tuple[Tensor, ...], state: Held) -> Tensor:
        q, k, v = self._heads(inputs[0])
        return ssd.scan_row(v, self._steps(v), self.rates_H, k, q, self.skip_H, state[0])

    def step(self, inputs: tuple[Tensor, ...], states: Held, at_N: Tensor) -> Tensor:
        q, k, v = self._heads(inputs[0])
        return ssd.step_rows(v, self._steps(v), self.rates_H, k, q, self.skip_H, states[0], at_N)

    def _heads(self, qkv_LF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[L, H, P] each: views."""
        q, k, v = qkv_LF.view(len(qkv_LF), 3, self.facts.num_heads, self.facts.head_dim).unbind(1)
        return q, k, v

    def _steps(self, v_LHP: Tensor) -> Tensor:
        """[L, H]: ones."""
        return v_LHP.new_ones(v_LHP.shape[:2])
