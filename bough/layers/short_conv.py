"""A short convolution between two gates, in the place of attention. T tokens of all rows, C channels of a rank."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from bough.config.state_facts import ShortConv
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.linear import GroupedLinear, RowLinear
from bough.layers.states import CausalConv, Held, StateLayer
from bough.layers.stream import Input, Product


class ShortConvMixer(StateLayer):
    """A projection to two gates and inputs, the convolution of gated inputs, and the second gate. Ranks split the
    channels."""

    def __init__(self, facts: ShortConv, place: int, hidden: int, build: Build) -> None:
        """`place`: among the layers that keep a state."""
        axis = build.mesh.heads
        mine = axis.slice(facts.channels, "channels")
        held = replace(facts, channels=mine.stop - mine.start)
        super().__init__(place, held.state_shapes, (held.channels,), held.input_values)
        width = (facts.channels, mine)
        self.mix = GroupedLinear(hidden, {"b": width, "c": width, "x": width}, 1, build, bias=facts.bias)
        self.conv = CausalConv({"": width}, facts.conv_width, build, bias=facts.bias, silu=False)
        self.out = RowLinear(facts.channels, hidden, build, bias=facts.bias, axis=axis, inputs=mine)

    def forward(self, x: Input, batch: Batch) -> Product:
        b_TC, c_TC, x_TC = self.mix(x)
        seen_TC = self.over_rows((b_TC * x_TC,), batch)
        out: Product = self.out(c_TC * seen_TC.to(c_TC.dtype))
        return out

    def scan(self, inputs: tuple[Tensor, ...], state: Held) -> Tensor:
        return self.conv.row(inputs[0], state[0])

    def step(self, inputs: tuple[Tensor, ...], states: Held, at_N: Tensor) -> Tensor:
        return self.conv.ones(inputs[0], states[0], at_N)
