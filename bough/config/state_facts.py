"""Recurrent mixers: they keep one state per request instead of KV per token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar


class KeepsState:
    """Common facts: they have no KV cache and use no positions."""

    __slots__ = ()

    causal: ClassVar[bool] = True
    keys_turn: ClassVar[bool] = False
    num_kv_heads: ClassVar[int] = 0
    planes: ClassVar[tuple[int, ...]] = ()
    rope: ClassVar[None] = None

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a request's state, in float32."""
        raise NotImplementedError

    @property
    def state_values(self) -> int:
        """Number of values of a request's state."""
        return sum(math.prod(shape) for shape in self.state_shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(KeepsState):
    """Mamba 2: each head keeps a matrix, which decays at a rate and to which each token adds an outer product. Inputs
    first pass a short convolution over the last tokens."""

    num_heads: int
    head_dim: int
    """Inputs of a head."""
    num_groups: int
    """Groups of neighbouring heads; the heads of a group share the vectors B and C."""
    state_dim: int
    """Width of the vectors B and C."""
    conv_width: int
    """Tokens that the convolution sees, a token's own included."""
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    step_limits: tuple[float, float] | None = None
    """Steps are clamped to these; None: they are not."""
    norm_eps: float | None
    """Of an RMS norm over each group's outputs; None: there is none."""
    norm_first: bool = False
    """Outputs are normed before they are multiplied by their gates."""
    scales: tuple[float, float, float, float, float] | None = None
    """Multiply what is projected: gates, inputs, B, C and steps; None: nothing does."""

    @property
    def inner(self) -> int:
        """Inputs of all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Values of a token that pass the convolution: inputs, B and C."""
        return self.inner + 2 * self.num_groups * self.state_dim

    @property
    def projected(self) -> int:
        """Values of a token's gates, inputs, B, C and steps together."""
        return self.inner + self.channels + self.num_heads

    @property
    def input_values(self) -> int:
        """Values per token that the recurrence reads: those of the convolution, and one step size per head."""
        return self.channels + self.num_heads

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The state of a request: the last inputs of the convolution, and the matrices of the heads."""
        return (self.channels, self.conv_width - 1), (self.num_heads, self.head_dim, self.state_dim)

    def num_parameters(self, hidden: int) -> int:
        total = hidden * (self.projected + self.inner) + self.channels * self.conv_width + 3 * self.num_heads
        total += self.channels if self.conv_bias else 0
        total += self.projected if self.in_bias else 0
        total += hidden if self.out_bias else 0
        return total + (self.inner if self.norm_eps is not None else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba(KeepsState):
    """Mamba 1: each channel keeps a vector, each value of which decays at its own rate. Inputs first pass a short
    convolution over the last tokens; step sizes and the vectors B and C are computed from its output."""

    inner: int
    """Channels."""
    state_dim: int
    """State size of a channel; the width of B and C."""
    step_rank: int
    """Steps of all channels are made from this many values."""
    conv_width: int
    """Tokens that the convolution sees, a token's own included."""
    conv_bias: bool = True
    bias: bool = False
    """Of the first and the last projection."""
    norm_eps: float | None = None
    """Of RMS norms of B, C and what steps are made from; None: there are none."""
    norm_weights: bool = True
    """Whether those have weights."""

    num_heads: ClassVar[int] = 1

    @property
    def projected(self) -> int:
        """Values of a token's inputs and gates together."""
        return 2 * self.inner

    @property
    def input_values(self) -> int:
        """Numbers that the recurrence takes of a token."""
        return self.inner

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The state of a request: the last inputs of the convolution, and the vectors of the channels."""
        return (self.inner, self.conv_width - 1), (self.inner, self.state_dim)

    def num_parameters(self, hidden: int) -> int:
        made = self.step_rank + 2 * self.state_dim
        total = self.inner * (3 * hidden + made + self.step_rank + self.conv_width + self.state_dim + 2)
        total += self.inner if self.conv_bias else 0
        total += 2 * self.inner + hidden if self.bias else 0
        return total + (made if self.norm_eps is not None and self.norm_weights else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta(KeepsState):
    """Gated delta net: each value head keeps a matrix, which decays and which each token corrects at its key. Queries,
    keys and values first pass a short convolution over the last tokens."""

    num_key_heads: int
    num_value_heads: int
    """A multiple of the number of key heads, each of which is shared by consecutive value heads."""
    key_dim: int
    value_dim: int
    """Widths of a head."""
    conv_width: int
    """Tokens that the convolution sees, a token's own included."""
    norm_eps: float
    """Of an RMS norm of what each head has read, before its gate."""
    channel_rank: int | None = None
    """Kimi's: what is kept at each number of a head's key decays by a rate of its own. Those rates, and gates, which pass a
    sigmoid, are made from this many values each. None: rates are by head, and gates pass SiLU."""

    @property
    def num_heads(self) -> int:
        return self.num_value_heads

    @property
    def keys(self) -> int:
        """Values of all heads' keys."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Values of all heads' values."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Values of a token that pass the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def decays(self) -> int:
        """Rates of a token by which states decay."""
        return self.num_value_heads * (1 if self.channel_rank is None else self.key_dim)

    @property
    def projected(self) -> int:
        """Values of a token's queries, keys, values and gates together."""
        return self.channels + self.values

    @property
    def input_values(self) -> int:
        """Numbers that the recurrence takes of a token: what the convolution does, and both kinds of rates."""
        return self.channels + self.decays + self.num_value_heads

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The state of a request: the last inputs of the convolution, and the matrices of the heads."""
        return (
            (self.channels, self.conv_width - 1),
            (self.num_value_heads, self.key_dim, self.value_dim),
        )

    def num_parameters(self, hidden: int) -> int:
        inside = self.channels * self.conv_width + self.num_value_heads + self.decays + self.value_dim
        made = self.decays + self.values  # rates and gates
        total = hidden * made if self.channel_rank is None else self.channel_rank * (2 * hidden + made)
        return total + hidden * (self.channels + self.num_value_heads + self.values) + inside


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv(KeepsState):
    """LFM2: a short gated convolution of each channel over the last tokens."""

    channels: int
    conv_width: int
    """Tokens that the convolution sees, a token's own included."""
    bias: bool = False
    """Of the convolution and both projections."""

    num_heads: ClassVar[int] = 1

    @property
    def projected(self) -> int:
        """Values of a token's two gates and inputs together."""
        return 3 * self.channels

    @property
    def input_values(self) -> int:
        """Numbers that the convolution takes of a token."""
        return self.channels

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The state of a request: the last inputs of the convolution."""
        return ((self.channels, self.conv_width - 1),)

    def num_parameters(self, hidden: int) -> int:
        total = self.channels * (4 * hidden + self.conv_width)
        return total + (4 * self.channels + hidden if self.bias else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lightning(KeepsState):
    """Linear attention without a softmax (lightning attention): each head keeps the sum of outer products of keys and
    values, which decays at a fixed rate per head."""

    num_heads: int
    head_dim: int
    """Width of a head's query, key and value."""
    rate_scale: float
    """Multiplies the rates, which are 2 ** -(8 / heads), its square, its cube ..., by head."""
    norm_eps: float
    """Of an RMS norm over what all heads have read, before its gate."""

    @property
    def inner(self) -> int:
        """Values of all heads' queries."""
        return self.num_heads * self.head_dim

    @property
    def projected(self) -> int:
        """Values of a token's queries, keys, values and gates together."""
        return 4 * self.inner

    @property
    def input_values(self) -> int:
        """Numbers that the recurrence takes of a token: queries, keys and values."""
        return 3 * self.inner

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The state of a request: the matrices of the heads."""
        return ((self.num_heads, self.head_dim, self.head_dim),)

    def num_parameters(self, hidden: int) -> int:
        return 5 * hidden * self.inner + self.inner


StateMixer = GatedDelta | Lightning | Mamba | Mamba2 | ShortConv
"""Mixers with a recurrent state."""
