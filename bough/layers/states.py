"""Layers that keep a state of each row instead of something of each token: what they have in common."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from bough.kernels.causal_conv import conv_ones, conv_row
from bough.layers.batch import Batch, DraftedRows
from bough.layers.build import Build
from bough.weights.dummy import DummyDraw
from bough.weights.slots import Slot
from bough.weights.stored import Flat, Stored, copy_into, read_all

Held = tuple[Tensor, ...]
"""Tensors of a layer's states, in the order of `StateLayer.state_shapes`."""


class StateLayer(nn.Module):
    """A layer that keeps a state of each row. A subclass projects a step's tokens, calls `over_rows` with what its
    recurrence takes of each of them, and defines `scan` and `step`, which advance states.

    *Ranks.* `shapes` are of this rank's part: a layer is cut by `build.mesh.heads`, so that each rank advances the states of
    its own heads or channels and the last product sums over ranks (`RowLinear` with that axis). `config.shares.rank_mixer`
    tells the memory plan the same. A stage keeps the states of its own layers, numbered from its first one on.

    *States.* Each tensor is float32, [states, *shape]: state 0 is that of a row that begins and is never written, 1 + slot
    is a row's, the next one takes what padding writes, and snapshots follow (`memory/states.py`).

    *Drafts.* What `over_rows` is given of drafts is kept for the next step (`layers/batch.py: DraftedRows`); `input_values`
    says how much that is of a token.

    *Graphs.* `step` is captured in CUDA graphs: it changes states in place, its shapes follow from those of its arguments,
    and it reads no value on the host. Padding may name one state several times; what that one holds does not matter."""

    def __init__(
        self, place: int, shapes: tuple[tuple[int, ...], ...], out_shape: tuple[int, ...], input_values: int
    ) -> None:
        """`place`: among the layers that keep one. `shapes`: of what is kept of a row. `out_shape`: of what `scan` and
        `step` give for a token. `input_values`: numbers that they take of it."""
        super().__init__()
        self.input_values = input_values
        self.state_place = place
        self.state_shapes = shapes
        self.out_shape = out_shape

    def scan(self, inputs: tuple[Tensor, ...], state: Held) -> Tensor:
        """float32 [L, *out_shape] of the L consecutive tokens of one row, whose state it advances in place."""
        raise NotImplementedError

    def step(self, inputs: tuple[Tensor, ...], states: Held, at_N: Tensor) -> Tensor:
        """float32 [N, *out_shape] of one token of each of N rows. `states`: of all rows, of which it advances `at_N` (int64)
        in place."""
        raise NotImplementedError

    def over_rows(self, inputs: tuple[Tensor, ...], batch: Batch) -> Tensor:
        """[T, *out_shape]: each row goes on from its state of this layer. `inputs`: [T, ...] each."""
        states = batch.states
        if states is None:
            return self.scan(inputs, self._fresh(inputs[0].device))
        held = states.layers[self.state_place]
        if states.all_ones_N is not None:
            return self.step(inputs, held, states.all_ones_N)
        # The last line takes what padding gives.
        out_TF = torch.empty(len(inputs[0]) + 1, *self.out_shape, dtype=torch.float32, device=inputs[0].device)
        if states.drafted is not None:
            self._verify(inputs, held, states.drafted, states.kept[self.state_place], out_TF)
        for phase in states.phases:
            if len(phase.ones_N):
                at_N = phase.ones_at_N
                out_TF[at_N] = self.step(tuple(each[at_N] for each in inputs), held, phase.ones_N)
            for tokens, state in phase.longs:
                out_TF[tokens] = self.scan(tuple(each[tokens] for each in inputs), tuple(each[state] for each in held))
            if phase.saves is not None:
                source, target = phase.saves
                for each in held:
                    each[target] = each[source]
        return out_TF[:-1]

    def _verify(self, inputs: tuple[Tensor, ...], held: Held, rows: DraftedRows, kept: Tensor, out_TF: Tensor) -> None:
        """Rows with drafts. Shapes depend on bounds alone, and no value is read on the host."""
        state_R, last = rows.slots_R + 1, len(inputs[0]) - 1
        earlier_RKF = kept[rows.slots_R]
        for place in range(rows.most_kept):
            given = _cut_like(earlier_RKF[:, place], inputs)
            self.step(given, held, torch.where(rows.kept_R > place, state_R, rows.padding))
        at_R = rows.first_R.clamp_max(last)
        out_TF[torch.where(rows.count_R > 0, at_R, last + 1)] = self.step(_take(inputs, at_R), held, state_R)
        if rows.width == 1:
            return
        place_Q = torch.arange(1, rows.width, device=at_R.device)
        at_RQ = (rows.first_R[:, None] + place_Q).clamp_max(last)
        kept[rows.slots_R, : rows.width - 1] = torch.cat([each.flatten(1).float() for each in inputs], 1)[at_RQ]
        apart, own_R = tuple(each[state_R] for each in held), torch.arange(len(at_R), device=at_R.device)
        for place in range(1, rows.width):
            at_R = at_RQ[:, place - 1]
            out_RF = self.step(_take(inputs, at_R), apart, own_R)
            out_TF[torch.where(rows.count_R > place, at_R, last + 1)] = out_RF

    def _fresh(self, device: torch.device) -> Held:
        """The state of a row that begins."""
        return tuple(torch.zeros(each, dtype=torch.float32, device=device) for each in self.state_shapes)


def _take(inputs: tuple[Tensor, ...], at_N: Tensor) -> tuple[Tensor, ...]:
    return tuple(each[at_N] for each in inputs)


def _cut_like(joined_NF: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Inputs of some tokens that were joined, as they were."""
    parts = joined_NF.split_with_sizes([each[0].numel() for each in inputs], 1)
    return tuple(part.view(len(part), *each.shape[1:]).to(each.dtype) for part, each in zip(parts, inputs, strict=True))


def state_inputs(model: nn.Module) -> list[int]:
    """Numbers that the recurrence of each layer that keeps a state takes of a token, by place."""
    layers = [module for module in model.modules() if isinstance(module, StateLayer)]
    return [layer.input_values for layer in sorted(layers, key=lambda layer: layer.state_place)]


def state_shapes(model: nn.Module) -> list[tuple[tuple[int, ...], ...]]:
    """What each layer that keeps a state keeps of a row, by place."""
    layers = [module for module in model.modules() if isinstance(module, StateLayer)]
    return [layer.state_shapes for layer in sorted(layers, key=lambda layer: layer.state_place)]


class CausalConv(nn.Module):
    """A convolution of each channel over a token and those before it, and perhaps SiLU. In float32."""

    def __init__(
        self,
        widths: dict[str, tuple[int, slice]],
        width: int,
        build: Build,
        *,
        bias: bool = False,
        silu: bool = True,
    ) -> None:
        """`widths`: by name of what is convolved, its channels in the model, and which of them are this rank's; a single
        one may have no name."""
        super().__init__()
        self.widths = widths
        self.silu = silu
        count = sum(mine.stop - mine.start for _, mine in widths.values())
        kept = torch.empty(count, width, dtype=torch.float32, device=build.device)
        self.weight = nn.Parameter(kept, requires_grad=False)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(kept.new_empty(count), requires_grad=False)

    def slots(self) -> dict[str, Slot]:
        slots, first, width = {}, 0, self.weight.shape[1]
        for name, (channels, mine) in self.widths.items():
            rows = slice(first, first + mine.stop - mine.start)
            before, first = f"{name}." if name else "", rows.stop
            fill = partial(_fill_flat, self.weight[rows], mine)
            slots[f"{before}weight"] = Slot((channels, 1, width), fill, also=((channels, width),))
            if self.bias is not None:
                slots[f"{before}bias"] = Slot((channels,), partial(fill_part, self.bias[rows], mine))
        return slots

    def row(self, x_LC: Tensor, state_CW: Tensor) -> Tensor:
        """[L, C] of the tokens of a row; the state, its last inputs, moves on."""
        return conv_row(x_LC, self.weight, self.bias, state_CW, silu=self.silu)

    def ones(self, x_NC: Tensor, states_SCW: Tensor, at_N: Tensor) -> Tensor:
        """[N, C] of one token of each row."""
        return conv_ones(x_NC, self.weight, self.bias, states_SCW, at_N, silu=self.silu)


class PerHead(nn.Module):
    """Numbers by head, or by channel, in float32."""

    def __init__(self, count: int, build: Build, mine: slice | None = None, width: int | None = None) -> None:
        """`count`: heads of the model; `mine`: those of this rank; None: all. `width`: numbers of each; None: one."""
        super().__init__()
        self.mine = slice(0, count) if mine is None else mine
        inner = () if width is None else (width,)
        self.shape = (count, *inner)
        held = torch.empty(self.mine.stop - self.mine.start, *inner, dtype=torch.float32, device=build.device)
        self.weight = nn.Parameter(held, requires_grad=False)

    def slots(self) -> dict[str, Slot]:
        return {"weight": Slot(self.shape, self._fill, also=((1, 1, *self.shape, 1),))}

    def _fill(self, stored: Stored) -> None:
        if len(stored.shape) == len(self.shape):
            fill_part(self.weight, self.mine, stored)
        else:
            self.weight.copy_(read_all(stored).view(self.shape)[self.mine])


class DecayRates(PerHead):
    """Rates at which states decay, by head or by channel: negative. Checkpoints have the logarithms of their sizes."""

    def _fill(self, stored: Stored) -> None:
        super()._fill(stored)
        self.weight.copy_(-self.weight.exp())

    def draw_dummies(self, name: str, draw: DummyDraw) -> None:
        self.weight.fill_(-1.0)


def fill_part(target: Tensor, part: slice, stored: Stored) -> None:
    """Copies some rows of a tensor."""
    copy_into(target, stored, part)


def _fill_flat(target: Tensor, part: slice, stored: Stored) -> None:
    copy_into(target, Flat(stored), part)


def times(heads: slice, width: int) -> slice:
    """The values of some heads, each of which has `width`."""
    return slice(heads.start * width, heads.stop * width)
