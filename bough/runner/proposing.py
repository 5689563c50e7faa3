"""The seam between the runner and what drafts on the device: a `Proposer` is called at the end of a step, when its tokens
have been drawn, and leaves drafts for the next one in the slots.

T tokens of all rows of the step, R rows that sample (perhaps padded), D width of the target's stream, V vocabulary. Nothing
here reads from the device, and every shape is known before the step runs, so that a graph can hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from bough.core.step import I32, NO_PROPOSER
from bough.kernels.attention.inputs import AttentionInputs, Chain, HostLengths, LastRows, TreeMask
from bough.kernels.draft_chain import Ahead, ChainPages, ChainRows, look_ahead
from bough.kernels.draft_tree import TreePath, TreeStep
from bough.kernels.sampling import argmax, sample, sample_among
from bough.kernels.sampling.reference import spread_logits
from bough.kernels.step_start import SlotState
from bough.layers.batch import AttentionBackend, Batch, Taps
from bough.runner.accepting import draft_seeds, odds_of
from bough.runner.inputs import StepTensors


@dataclass(frozen=True, slots=True)
class Reads:
    """What a proposer needs to know of the target's forward pass, of all tokens of a step."""

    layers: tuple[int, ...] = ()
    """As `Taps.layers`."""
    hidden: bool = False
    """Whether it reads the states after the last layer: those after the final norm, or a tap behind the layer."""
    sampled: bool = False
    """Whether it reads the states after the final norm of tokens behind which something is sampled."""


@dataclass(slots=True)
class Read:
    """The same of one forward pass, filled while it is made."""

    reads: Reads
    taps: Taps | None = None
    hidden_TD: Tensor | None = None
    sampled_LD: Tensor | None = None
    inputs: AttentionInputs | None = None
    """As the target's layers had it."""
    proposes: bool = True
    """Whether drafts will be made; otherwise nothing is read."""
    tree: TreeStep | None = None
    """Where drafts are verified that form trees."""

    @staticmethod
    def of(reads: Reads, proposals: int) -> Read:
        proposes = proposals != NO_PROPOSER
        return Read(reads, Taps(reads.layers) if reads.layers and proposes else None, proposes=proposes)

    def follow(self, path: TreePath) -> None:
        """What was read of nodes goes to where their path has them, as if their drafts had been a chain."""
        if self.taps is not None:
            self.taps.states[:] = [state[path.from_T] for state in self.taps.states]
        if self.hidden_TD is not None:
            self.hidden_TD = self.hidden_TD[path.from_T]
        if self.sampled_LD is not None:
            self.sampled_LD = self.sampled_LD[path.from_L]
        if self.inputs is not None:
            self.inputs = replace(self.inputs, tree=None)


@dataclass(slots=True)
class TreeDrafts:
    """Drafts that form a tree: [R, N] each, as in `SlotState.drafts` and `DraftTrees`."""

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    seen: Tensor


class Proposer(Protocol):
    """Drafts from what the target has computed. Its own layers keep their KV in the target's pool, behind its layers."""

    @property
    def reads(self) -> Reads: ...

    @property
    def num_layers(self) -> int:
        """Layers that keep KV."""
        ...

    def propose(self, step: Drafting) -> list[Tensor] | TreeDrafts:
        """`step.count` drafts for each row: int64 [R] each, the next token's first; or as many nodes of a tree. Also
        computes its own KV of the step's tokens, and does only that if none are wanted."""
        ...


@dataclass(slots=True)
class SampledRows:
    """The rows of a step that sample, as they are once their tokens have been drawn."""

    index_R: Tensor
    """int64: the sample of each that counts last."""
    at_R: Tensor
    """int64: the last query token of each that counts, as an index of the step's tokens."""
    slots_R: Tensor
    """int64; the spare slot for rows that yield nothing, and for padding."""
    kv_len_R: Tensor
    """int64: KV tokens. The newest token is not among them: it stands at this position."""
    last_R: Tensor
    """int64: the newest token."""
    counter_R: Tensor
    """int64: output tokens, the number of the next draw."""
    sampling: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    """Temperature, top_k, top_p, min_p and seed of each."""


class SomeTokens(NamedTuple):
    """Some tokens of the target's vocabulary."""

    ids_V: Tensor
    """int64, ascending."""
    vocab: int
    """How many that has."""


@dataclass(slots=True)
class Bounds:
    """What the host knows of a step's rows that sample."""

    kv_len: I32 | None
    """KV tokens of each after the step, at most; None in a captured graph."""
    max_kv: int
    only_decodes: bool
    """No row has a part of a prompt, or forced tokens."""
    greedy: bool
    """All of them take the likeliest token."""


@dataclass(slots=True)
class Drafting:
    """A step at its end, as a proposer sees it."""

    count: int
    """Drafts that are wanted of each row."""
    read: Read
    rows: SampledRows
    bounds: Bounds
    tensors: StepTensors
    drawn_L: Tensor
    state: SlotState
    attend: Callable[[AttentionInputs], AttentionBackend]
    _ahead: Ahead | None = None
    _planned: dict[object, Any] = field(default_factory=dict)
    """As `Chain.prepared`."""

    @property
    def hidden_TD(self) -> Tensor:
        """The target's states after its final norm."""
        assert self.read.hidden_TD is not None, "asked for by `Reads.hidden`"
        return self.read.hidden_TD

    @property
    def hidden_RD(self) -> Tensor:
        """The target's states after its final norm, of the tokens behind which rows drew their newest."""
        sampled_LD = self.read.sampled_LD
        assert sampled_LD is not None, "asked for by `Reads.sampled`"
        return sampled_LD[self.rows.index_R] if len(sampled_LD) else sampled_LD

    @property
    def states(self) -> list[Tensor]:
        """The target's states at `Reads.layers`."""
        assert self.read.taps is not None, "asked for by `Reads.layers`"
        return self.read.taps.states

    def following_ids(self) -> Tensor:
        """int64 [T]: the token behind each of the step's tokens: drawn where the row samples there, else the row's next."""
        tensors, spare = self.tensors, len(self.state.room) - 1
        num_tokens = len(tensors.ids_T)
        following = _with_a_place_more(tensors.ids_T)
        start, end = tensors.query_start_R1[:-1], tensors.query_start_R1[1:]
        last = torch.where(end > start, end - 1, num_tokens).long()
        following.scatter_(0, last, tensors.following_R.long())
        slots_L = tensors.sample_slots_L[: len(self.drawn_L)]
        drawn_at = torch.where(slots_L == spare, num_tokens, tensors.sample_at_L[: len(self.drawn_L)])
        return following.scatter_(0, drawn_at, self.drawn_L)[:num_tokens]

    def moved_on(self, ids_T: Tensor, last_R: Tensor) -> Tensor:
        """int64 [T]: one token further in each row than `ids_T`, which ends with `last_R` in rows that sample."""
        num_tokens = len(ids_T)
        further = _with_a_place_more(ids_T)
        spare = self.rows.slots_R == len(self.state.room) - 1
        return further.scatter_(0, self.rows.at_R.masked_fill(spare, num_tokens), last_R)[:num_tokens]

    def keeping(self) -> tuple[Batch, AttentionInputs]:
        """Where keys and values of the step's tokens go: a batch that attends to nothing, and the caches."""
        given, tensors = self.read.inputs, self.tensors
        assert given is not None, "the target's pass has been made"
        batch = Batch(tensors.ids_T, tensors.positions_T, self.attend(given), loc_T=tensors.loc_T)
        return batch, given

    def whole(self, ids_T: Tensor, last_layer: int | None) -> Batch:
        """All tokens of the step at their positions, under other ids. `last_layer` may leave out what no row ends with;
        None: all states are read."""
        tensors, given = self.tensors, self.read.inputs
        assert given is not None, "the target's pass has been made"
        inputs = replace(given, tail=None)
        if self.bounds.kv_len is not None and last_layer is not None:
            inputs.tail = LastRows(self.rows.at_R, lambda: self._row_inputs(self.rows.kv_len_R - 1), last_layer)
        return Batch(
            ids_T=ids_T,
            positions_T=tensors.positions_T,
            attention=self.attend(inputs),
            logits_at=None if last_layer is None else self.rows.at_R,
            num_tokens=len(ids_T),
            loc_T=tensors.loc_T if self.bounds.kv_len is None else None,
        )

    def behind(self, ids_R: Tensor, place: int) -> Batch:
        """One token of each row, `place` positions behind its KV: 0 is that of its newest token."""
        inputs, positions_R = self._inputs_behind(place)
        return Batch(
            ids_T=ids_R,
            positions_T=positions_R,
            attention=self.attend(inputs),
            num_tokens=len(ids_R),
            loc_T=inputs.loc_T if self.bounds.kv_len is None else None,
        )

    def _inputs_behind(self, place: int) -> tuple[AttentionInputs, Tensor]:
        """Of one token of each row, and its positions."""
        ahead = self._look_ahead()
        chain = Chain(place, ahead.kv_len_PR, self._planned)
        inputs = self._one_query(ahead, place, 1 + place)
        inputs.chain = chain
        return inputs, ahead.positions_PR[place]

    def _look_ahead(self) -> Ahead:
        """All places that drafts of this step have, at once: one by one, a draft would wait for some twenty tiny kernels."""
        if self._ahead is None:
            rows = self.rows
            chain = ChainRows(rows.slots_R, rows.kv_len_R, rows.counter_R)
            self._ahead = look_ahead(chain, self._pages(), max(1, self.count))
        return self._ahead

    def _pages(self) -> ChainPages:
        given = self.read.inputs
        assert given is not None, "the target's pass has been made"
        return ChainPages(self.state.room, given.page_table, given.page_size)

    def frontier(self, ids_RK: Tensor, seen_RK: Tensor, place: int, generation: int) -> Batch:
        """Nodes of trees that are being grown, K of each row, `place` positions behind its KV. They lie there behind those
        of the `generation`s before them, and see the bits `seen_RK` of all of these and of themselves."""
        rows, size = self.rows, ids_RK.shape[1]
        places = torch.arange(size, device=ids_RK.device) + generation * size
        inputs = self._row_inputs(rows.kv_len_R + (generation + 1) * size - 1, (generation + 1) * size)
        positions = (rows.kv_len_R + place).repeat_interleave(size)
        loc = self._locations(rows.slots_R.repeat_interleave(size), (rows.kv_len_R[:, None] + places).flatten())
        host = inputs.host
        if host is not None:
            host = HostLengths(num_query_R=size * host.num_query_R, context_R=host.context_R - np.int32(size - 1))
        tail = rows.kv_len_R.to(torch.int32).repeat_interleave(size)
        inputs = replace(
            inputs, query_start_R1=size * inputs.query_start_R1, loc_T=loc, max_query=size, host=host,
            tree=TreeMask(seen_RK.flatten(), tail, positions),
        )  # fmt: skip
        return Batch(
            ids_T=ids_RK.flatten(),
            positions_T=positions,
            attention=self.attend(inputs),
            num_tokens=len(positions),
            loc_T=loc if self.bounds.kv_len is None else None,
        )

    def block(self, ids_RQ: Tensor) -> Batch:
        """Tokens of each row from its newest on, for layers that look both ways. The states of all but the first of each
        row are read."""
        rows, size = self.rows, ids_RQ.shape[1]
        places = torch.arange(size, device=ids_RQ.device)
        positions = (rows.kv_len_R[:, None] + places).flatten()
        inputs = self._row_inputs(rows.kv_len_R + (size - 1), size)
        starts = size * inputs.query_start_R1
        loc = self._locations(rows.slots_R.repeat_interleave(size), positions)
        host = inputs.host
        if host is not None:
            host = HostLengths(num_query_R=size * host.num_query_R, context_R=host.context_R - np.int32(size - 1))
        inputs = replace(inputs, query_start_R1=starts, loc_T=loc, max_query=size, host=host)
        return Batch(
            ids_T=ids_RQ.flatten(),
            positions_T=positions,
            attention=self.attend(inputs),
            logits_at=(starts[:-1, None].long() + places[1:]).flatten(),
            num_tokens=len(positions),
            loc_T=loc if self.bounds.kv_len is None else None,
        )

    def last_two(self) -> Batch:
        """Of each row the last query token that counts, and its newest token behind it: the states are the latter's.

        Where a row has no page for its newest token, both see one token less.
        """
        rows, tensors = self.rows, self.tensors
        inputs = self._row_inputs(rows.kv_len_R, 1)
        starts = 2 * inputs.query_start_R1
        ids = torch.stack((tensors.ids_T[rows.at_R], rows.last_R), 1).flatten()
        positions = torch.stack((rows.kv_len_R - 1, rows.kv_len_R), 1).flatten()
        spare = rows.slots_R == len(self.state.room) - 1
        loc = torch.stack((tensors.loc_T[rows.at_R].masked_fill(spare, -1), inputs.loc_T), 1).flatten()
        host = inputs.host
        if host is not None:
            host = HostLengths(num_query_R=2 * host.num_query_R, context_R=np.maximum(host.context_R - 1, 0))
        # A row of two queries has at least two KV tokens.
        inputs = replace(
            inputs, query_start_R1=starts, loc_T=loc, kv_len_R=inputs.kv_len_R.clamp_min(2), max_query=2, host=host
        )
        return Batch(
            ids_T=ids,
            positions_T=positions,
            attention=self.attend(inputs),
            logits_at=torch.arange(1, len(ids), 2, device=ids.device),
            num_tokens=len(ids),
            loc_T=loc if self.bounds.kv_len is None else None,
        )

    def draw(self, logits_RV: Tensor, place: int, among: SomeTokens | None = None) -> Tensor:
        """int64 [R]: what each row would draw `place` tokens behind its newest from these logits, with the noise that the
        target will draw with there: so both agree as often as their probabilities allow. Where a rule needs the
        probabilities, they are kept, and the noise is another. `among`: the tokens that logits stand for; None: all."""
        if self.bounds.greedy:
            return argmax(logits_RV, None if among is None else among.ids_V)
        temperature, top_k, top_p, min_p, seed = self.rows.sampling
        counter = self.rows.counter_R
        if self.state.odds is None:
            counters = self._look_ahead().counter_PR[place] if place else counter
            if among is None:
                return sample(logits_RV, temperature, top_k, top_p, min_p, seed, counters)
            return sample_among(logits_RV, *among, temperature, top_k, top_p, min_p, seed, counters)
        if among is not None:
            logits_RV = spread_logits(logits_RV, *among)
        odds_RV = odds_of(logits_RV, temperature, top_k, top_p, min_p)
        self.state.odds[:, place, : odds_RV.shape[1]].index_copy_(0, self.rows.slots_R, odds_RV)
        return sample(logits_RV, temperature, top_k, top_p, min_p, draft_seeds(seed, counter), counter + place)

    def _row_inputs(self, positions_R: Tensor, more: int = 0) -> AttentionInputs:
        """Of one query token a row. It is not kept where the row has no page for it, and then does not see itself."""
        rows = ChainRows(self.rows.slots_R, positions_R, self.rows.counter_R)
        return self._one_query(look_ahead(rows, self._pages(), 1), 0, more)

    def _one_query(self, ahead: Ahead, place: int, more: int) -> AttentionInputs:
        given = self.read.inputs
        assert given is not None, "the target's pass has been made"
        return AttentionInputs(
            query_start_R1=ahead.query_start_R1,
            kv_len_R=ahead.kv_len_PR[place],
            slots_R=ahead.slots_R,
            page_table=given.page_table,
            loc_T=ahead.loc_PR[place],
            page_size=given.page_size,
            max_query=1,
            max_kv=self.bounds.max_kv + more,
            k_caches=given.k_caches,
            v_caches=given.v_caches,
            index_caches=given.index_caches,
            k_scales=given.k_scales,
            v_scales=given.v_scales,
            ranges=given.ranges,
            host=self._host_lengths(more),
        )

    def _host_lengths(self, more: int) -> HostLengths | None:
        if self.bounds.kv_len is None:
            return None
        context = self.bounds.kv_len + np.int32(more - 1)
        return HostLengths(num_query_R=np.ones_like(context), context_R=context)

    def _locations(self, slots_Q: Tensor, positions_Q: Tensor) -> Tensor:
        """int64 [Q]: where these positions of slots lie in the pages; -1 where there is no page for them."""
        given = self.read.inputs
        assert given is not None, "the target's pass has been made"
        table, size, room = given.page_table, given.page_size, self.state.room
        place = (positions_Q // size).clamp_max(table.shape[1] - 1)
        loc = table[slots_Q, place].long() * size + positions_Q % size
        nowhere = (positions_Q >= room[slots_Q]) | (slots_Q == len(room) - 1)
        return loc.masked_fill(nowhere, -1)


def padding_rows(state: SlotState, tensors: StepTensors) -> SampledRows:
    """Of a step in which no row samples: one of padding."""
    zero = tensors.ids_T.new_zeros(1)
    ones = torch.ones(1, device=zero.device)
    return SampledRows(
        index_R=zero,
        at_R=zero,
        slots_R=zero + (len(state.room) - 1),
        kv_len_R=zero + 1,
        last_R=zero,
        counter_R=zero,
        sampling=(0 * ones, zero, ones, 0 * ones, zero),
    )


def sampled_rows(
    state: SlotState, tensors: StepTensors, drawn_L: Tensor, num_rows: int, yields_R: Tensor | None
) -> SampledRows:
    """`yields_R`: how many tokens each row yields; None: each of them one, which is its only sample."""
    if yields_R is None:
        index = torch.arange(num_rows, device=drawn_L.device)
        slots = tensors.sample_slots_L[:num_rows]
    else:
        first = tensors.sample_start_R1[:num_rows].long()
        index = (first + (yields_R - 1).clamp_min(0)).clamp_max(len(drawn_L) - 1)
        slots = tensors.sample_slots_L[index].masked_fill(yields_R == 0, len(state.room) - 1)
    at = tensors.sample_at_L[index]
    return SampledRows(
        index_R=index,
        at_R=at,
        slots_R=slots,
        kv_len_R=tensors.positions_T[at] + 1,
        last_R=drawn_L[index],
        counter_R=tensors.counter_L[index] + 1,
        sampling=(
            tensors.temperature_L[index],
            tensors.top_k_L[index],
            tensors.top_p_L[index],
            tensors.min_p_L[index],
            tensors.seed_L[index],
        ),
    )


def _with_a_place_more(ids_T: Tensor) -> Tensor:
    """[T + 1]: the token behind each, to be overwritten where that is another row's, and a place that padding writes to."""
    return torch.cat((ids_T[1:], ids_T[:1], ids_T[:1]))
