"""Media on the device: runs the tower over a step's items, keeps what it gives in a store of rows, and hands a step the rows
that it reads. Which rows hold what is decided by `scheduler.media`. M tokens of media, W width of the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from bough.core.step import Encode, StepMedia
from bough.distributed.mesh import LONE, Axis
from bough.kernels.attention.two_way import TwoWaySpan
from bough.kernels.step_start import SlotState
from bough.layers.batch import Batch, BatchMedia
from bough.layers.tower import Tower, TowerInput
from bough.memory.transfer import upload
from bough.runner.cross import FreshMedia, MediaSights


class TowerRunner:
    """A tower and the store of its results."""

    def __init__(
        self, tower: Tower, num_rows: int, dtype: torch.dtype, device: torch.device, sharing: Axis = LONE
    ) -> None:
        """`sharing`: ranks that all encode the same items at the same time, and may compute some of them each."""
        self.tower = tower
        self.device = device
        self.sharing = sharing
        self.store_RW = torch.zeros(num_rows, tower.width, dtype=dtype, device=device)
        self.num_computed = 0
        """Items that this rank's tower has computed."""

    def encode(self, work: Sequence[Encode]) -> None:
        """Puts what the tower gives for all items into their rows. Queues device work only."""
        for each in work:
            if each.embedded:
                self._keep([each], upload(each.features, self.device).to(self.store_RW.dtype))
        work = [each for each in work if not each.embedded]
        if work:
            self._encode(work)

    def _encode(self, work: Sequence[Encode]) -> None:
        if self.sharing.size == 1 or len(work) == 1:  # one item is computed everywhere while one rank would compute it
            self._keep(work, self._computed(work))
            return
        shares = spread_items([len(each.rows) for each in work], self.sharing.size)
        mine = [work[number] for number in shares[self.sharing.rank]]
        counts = [sum(len(work[number].rows) for number in share) for share in shares]
        sent_LW = self.store_RW.new_zeros(max(counts), self.tower.width)
        if mine:
            sent_LW[: counts[self.sharing.rank]] = self._computed(mine)
        all_NLW = self.sharing.talk.all_gather(sent_LW)
        for share, count, part_LW in zip(shares, counts, all_NLW, strict=True):
            if share:
                self._keep([work[number] for number in share], part_LW[:count])

    def _computed(self, work: Sequence[Encode]) -> Tensor:
        """[positions of all items, W], all of them in one pass."""
        inputs = [TowerInput(upload(each.features, self.device), each.grid) for each in work]
        self.num_computed += len(work)
        return self.tower(inputs).to(self.store_RW.dtype)  # type: ignore[no-any-return]

    def _keep(self, work: Sequence[Encode], out_MW: Tensor) -> None:
        rows = upload(np.concatenate([each.rows for each in work]).astype(np.int64), self.device)
        self.store_RW.index_copy_(0, rows, out_MW)


def spread_items(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Numbers of the items that each rank computes: the largest first, each where least is to be done so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        rank = loads.index(min(loads))
        shares[rank].append(number)
        loads[rank] += sizes[number]
    return shares


@dataclass(slots=True)
class MediaTensors:
    """What a forward pass has of media."""

    values: BatchMedia | None
    axes_at: Tensor | None
    """int64 tokens whose positions have axes of their own..."""
    axes: Tensor | None
    """...and those, int64 [axes, tokens]."""
    spans: tuple[TwoWaySpan, ...] = ()
    """Tokens that see each other in both directions."""
    fresh: FreshMedia | None = None
    """What cross attention has to write; None: nothing."""
    sights: MediaSights | None = None
    """Tokens that see other media by cross attention than their slot's answer; None: there are none."""

    def put(self, batch: Batch) -> None:
        """Completes a batch, whose `positions_T` are those of the other tokens."""
        batch.media = self.values
        if self.axes is not None and self.axes_at is not None:
            batch.axes_AT = batch.positions_T.repeat(len(self.axes), 1).index_copy_(1, self.axes_at, self.axes)

    def of_tokens(self, mine_M: Tensor, num_tokens: int) -> MediaTensors:
        """Of some of the step's tokens (it has `num_tokens`), by where they are among those. Eager steps only."""
        place_T = mine_M.new_full((num_tokens,), -1)
        place_T[mine_M] = torch.arange(len(mine_M), device=mine_M.device)
        values, axes_at, axes = None, None, None
        if self.values is not None:
            at = place_T[self.values.at_M]
            values = replace(self.values, at_M=at[at >= 0], values_MW=self.values.values_MW[at >= 0])
        if self.axes_at is not None and self.axes is not None:
            at = place_T[self.axes_at]
            axes_at, axes = at[at >= 0], self.axes[:, at >= 0]
        return MediaTensors(values, axes_at, axes)


def turn_slots(state: SlotState, media: StepMedia, device: torch.device) -> None:
    """Brings the device's turns of slots up to date, where positions have several axes."""
    if state.turn is not None and len(media.turn_slots):
        at = upload(media.turn_slots.astype(np.int64), device)
        state.turn.index_copy_(0, at, upload(media.turns.astype(np.int64), device))


def media_tensors(media: StepMedia, encoder: TowerRunner | None, device: torch.device) -> MediaTensors:
    """The step's rows of the store. Without an encoder (a later stage of a pipeline) only its positions."""
    values = axes_at = axes = None
    if encoder is not None and len(media.at):
        at_M, rows_M = (upload(each.astype(np.int64), device) for each in (media.at, media.rows))
        values = BatchMedia(at_M, encoder.store_RW.index_select(0, rows_M))
    if len(media.axes_at):
        axes_at, axes = upload(media.axes_at.astype(np.int64), device), upload(media.axes.astype(np.int64), device)
    spans = tuple(TwoWaySpan(*span) for span in media.spans.tolist())
    fresh = None
    if encoder is not None and len(media.fixed_rows):
        rows_M, at_LM = upload(media.fixed_rows.astype(np.int64), device), upload(media.fixed_at, device)
        fresh = FreshMedia(encoder.store_RW.index_select(0, rows_M), at_LM)
    return MediaTensors(values, axes_at, axes, spans, fresh, _sights(media, device))


def _sights(media: StepMedia, device: torch.device) -> MediaSights | None:
    if not len(media.sights):
        return None
    slots, columns, lengths, firsts, counts = media.sights.astype(np.int64).T
    runs = np.arange(len(counts)).repeat(counts)
    at = np.arange(counts.sum()) - (np.cumsum(counts) - counts)[runs] + firsts[runs]
    return MediaSights(*(upload(each, device) for each in (at, lengths[runs], runs, slots, columns)))
