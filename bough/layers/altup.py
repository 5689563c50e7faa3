"""Streams that are updated by turns (AltUp, Gemma 3n): blocks compute one of them; the others are predicted before a block
and corrected behind it, by how far the block's result is from its own prediction.

T tokens, S streams, D width.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from bough.config.model_facts import AltUp, ModelFacts
from bough.layers.batch import Batch
from bough.layers.build import Build
from bough.layers.linear import ReplicatedLinear
from bough.layers.norm import fill, make_norm
from bough.layers.stream import Stream
from bough.weights.slots import Slot

_LEAST_SQUARE = 1e-5
"""A stream's mean square is taken for no less."""


class AltUpStream(Stream):
    """The active stream as any other, and all of them as they were predicted."""

    __slots__ = ("active", "all_STD")

    def __init__(self, all_STD: Tensor, active: int, batch: Batch, layer_inputs_TLP: Tensor | None) -> None:
        super().__init__(all_STD[active], batch, layer_inputs_TLP=layer_inputs_TLP)
        self.all_STD = all_STD
        self.active = active

    def predict(self, mixer: StreamMixer) -> None:
        """Before a block: all streams become what the mixer makes of them, and the block goes on from the active one."""
        self.all_STD = mixer.predicted(self._all())
        self.replace(self.all_STD[self.active].clone())  # what is added to it may be added in place

    def correct(self, mixer: StreamMixer) -> None:
        """Behind a block: all streams follow the active one."""
        self.all_STD = mixer.corrected(self._all(), self.read(None))
        self.replace(self.all_STD[self.active])

    def add_to_others(self, x_TD: Tensor) -> None:
        """Adds to all streams but the first."""
        self.all_STD[1:] += x_TD

    def last_of_all(self) -> Tensor:
        """[S, L, D]: all streams at a model's end, of the tokens that `Batch.logits_at` names."""
        at_L = self._batch.logits_at if self._at_L is None else None
        all_STD = self._all()
        return all_STD if at_L is None else all_STD.index_select(1, at_L)

    def _all(self) -> Tensor:
        """All streams, of the tokens that the active one has."""
        at_L = self._at_L
        is_fit = at_L is None or self.all_STD.shape[1] == at_L.shape[0]
        return self.all_STD if is_fit or at_L is None else self.all_STD.index_select(1, at_L)


class StreamMixer(nn.Module):
    """A block's predictions and corrections: mixtures whose coefficients depend on the active stream."""

    def __init__(self, facts: ModelFacts, altup: AltUp, build: Build) -> None:
        super().__init__()
        count, hidden = altup.streams, facts.hidden
        self.count, self.active = count, altup.active
        self.norm = make_norm(facts.norm, hidden, build)
        self.router = ReplicatedLinear(hidden, count, build)
        self.predict = ReplicatedLinear(count, count * count, build)
        self.correct = ReplicatedLinear(count, count, build)
        self.scale = 1.0 / hidden
        self.is_scaled = altup.scaled
        self.out_scale = nn.Parameter(torch.empty(hidden, dtype=build.dtype, device=build.device), requires_grad=False)

    def slots(self) -> dict[str, Slot]:
        return {"out_scale": Slot(tuple(self.out_scale.shape), partial(fill, self.out_scale))}

    def predicted(self, all_STD: Tensor) -> Tensor:
        """[S, T, D]"""
        modes_TS = self._modes(all_STD[self.active])
        mixing_TSS = self.predict(modes_TS).view(-1, self.count, self.count)
        return torch.einsum("tps,std->ptd", mixing_TSS, all_STD) + all_STD

    def corrected(self, all_STD: Tensor, active_TD: Tensor) -> Tensor:
        """[S, T, D]. `active_TD`: what a block made of the active stream."""
        by_TS: Tensor = self.correct(self._modes(active_TD)) + 1.0
        return (active_TD - all_STD[self.active]) * by_TS.T.unsqueeze(-1) + all_STD

    def scaled(self, active_TD: Tensor) -> Tensor:
        """The active stream, as it enters the others."""
        return active_TD * self.out_scale if self.is_scaled else active_TD

    def _modes(self, x_TD: Tensor) -> Tensor:
        routed_TS: Tensor = self.router(self.norm(x_TD) * self.scale)
        return torch.tanh(routed_TS.float()).to(x_TD.dtype)


class StreamEnds(nn.Module):
    """Makes the streams from the embeddings, and one of them again at the end."""

    def __init__(self, facts: ModelFacts, altup: AltUp, build: Build) -> None:
        super().__init__()
        others = range(altup.streams - 1)
        self.active = altup.active
        self.begin = nn.ModuleList(ReplicatedLinear(facts.hidden, facts.hidden, build) for _ in others)
        self.end = nn.ModuleList(ReplicatedLinear(facts.hidden, facts.hidden, build) for _ in others)

    def open(self, x_TD: Tensor, batch: Batch, layer_inputs_TLP: Tensor | None) -> AltUpStream:
        others = [_sized(each(x_TD), x_TD) for each in self.begin]
        return AltUpStream(torch.stack((x_TD, *others)), self.active, batch, layer_inputs_TLP)

    def close(self, stream: AltUpStream) -> Tensor:
        """[L, D]: the mean of all streams, of the tokens that are read."""
        all_SLD = stream.last_of_all()
        first_LD = all_SLD[0]
        others = [_sized(each(x_LD), first_LD) for each, x_LD in zip(self.end, all_SLD[1:], strict=True)]
        return torch.stack((first_LD, *others)).mean(0)


def _sized(x_TD: Tensor, like_TD: Tensor) -> Tensor:
    """`x_TD` with the root mean square of `like_TD`."""
    wanted_T1 = like_TD.square().mean(-1, keepdim=True).sqrt()
    return x_TD * wanted_T1 / x_TD.square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()
