"""One forward pass over packed step tensors, from token ids to logits and to sampled tokens.

The same code runs eagerly and under graph capture: it queues device work and reads nothing back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bough.core.step import MOST_LEVELS
from bough.kernels.attention.cpu import CpuAttention
from bough.kernels.attention.inputs import AttentionInputs, HostLengths, LastRows, Lines, SpanTensors, TreeMask
from bough.kernels.attention.spread_keys import SpreadKeysAttention
from bough.kernels.attention.torch_backend import TorchAttention
from bough.kernels.attention.two_way import TwoWayAttention
from bough.kernels.draft_tree import TreePath, gather_path, start_tree, walk_tree
from bough.kernels.sampling import sample
from bough.kernels.step_end import advance, verify
from bough.kernels.step_start import SlotState, locate, start_step
from bough.layers.adapters import PassAdapters
from bough.layers.batch import AttentionBackend, Batch, Model
from bough.memory.mha import KVPool
from bough.runner.accepting import AcceptRule
from bough.runner.context import AttentionFactory, ContextShare, Cut
from bough.runner.cross import CrossPages
from bough.runner.encoder import MediaTensors
from bough.runner.inputs import StepTensors
from bough.runner.items import StepItems
from bough.runner.kv_scales import MeasuringAttention
from bough.runner.proposing import Bounds, Drafting, Proposer, Read, TreeDrafts, padding_rows, sampled_rows
from bough.runner.states import StepState

TAIL_SHARE = 0.25
"""The last layer is narrowed to the tokens that are read if these are at most this part of the step."""


@dataclass(frozen=True, slots=True)
class Extent:
    """What the host knows of a step: upper bounds that grids are sized by, and lengths where nothing is captured."""

    max_query: int
    max_kv: int
    span_tokens: int = 0
    """Query tokens of rows that may be in shared spans: the first ones; 0: nothing is shared."""
    levels: int = MOST_LEVELS
    """Of those spans."""
    host: HostLengths | None = None
    has_drafts: bool = False
    """Whether drafts are verified."""
    cut: Cut | None = None
    """How the step's tokens are split over ranks that share contexts; None: they are not."""
    adapted: bool = False
    """Whether rows may have adapters."""


@dataclass(frozen=True, slots=True)
class Walked:
    """A step whose trees have been walked, as if the paths that were taken had been its drafts."""

    path: TreePath
    tensors: StepTensors
    drawn_L: Tensor


class Forward:
    """Binds the model, its KV and the device state."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        state: SlotState,
        attention: AttentionFactory,
        proposer: Proposer | None = None,
        tree_width: int = 0,
        context: ContextShare | None = None,
        rule: AcceptRule | None = None,
    ) -> None:
        """`tree_width`: where drafts form trees, the tokens of their longest path with the one behind it. `context`: where
        ranks share the KV of sequences."""
        self.context = context
        self.page_size = pool.page_size * (1 if context is None else context.share.size)
        """Tokens of a sequence that a page holds, on all ranks that share it."""
        self.model = model
        self.proposer = proposer
        self.tree_width = tree_width
        self.pool = pool
        self.state = state
        self.cross: CrossPages | None = None
        """Pages of media; None: the model has no cross attention."""
        self.narrows = True
        """The last layer computes no more than what is read (off if the outputs of layers are dumped)."""
        self._last_layer: int | None = None
        if proposer is not None:  # whose layers come behind the model's
            self._last_layer = len(pool.keys) - proposer.num_layers - 1
        self._attention = attention
        self._drafts_attention = attention if not pool.spreads else self._spreading
        self._gapped: AttentionFactory = attention if attention is CpuAttention else TorchAttention
        """For steps with tokens that don't see all before them: not every backend hides keys."""
        self.measures_scales = False
        """Passes set the pool's scales of keys and values by what they write."""
        self.rule = rule
        """Which drafts count; None: those that are drawn. Set before any graph is captured."""

    def write_table(self, at_U: Tensor, pages_U: Tensor) -> None:
        """Writes pages at flat places of the page table, ahead of a step."""
        self.state.table_entries.scatter_(0, at_U, pages_U)

    def hidden(
        self,
        tensors: StepTensors,
        extent: Extent,
        at: Tensor | None,
        segments: Tensor | None = None,
        read: Read | None = None,
        media: MediaTensors | None = None,
        items: StepItems | None = None,
        states: StepState | None = None,
    ) -> Tensor:
        """Makes the step's page-table writes, and gives hidden states after the final norm at token indices `at` (all
        tokens: None). `read` gets what a proposer will need."""
        if at is not None and not len(at):
            return self.hidden(tensors, extent, at.new_zeros(1), segments, read, media, items, states)[:0]
        state, ids, pool = self.state, tensors.ids_T, self.pool
        start_step(state, tensors, self.page_size)
        lines = None
        if pool.line_of is not None:
            sharers = 1 if self.context is None else self.context.axis.size
            sizes = [size * sharers for size in pool.page_sizes[: len(state.tables)]]
            locs = (tensors.loc_T, *locate(state, tensors, sizes))
            lines = Lines(pool.line_of, state.tables, locs, sizes)
        tree = None
        if state.tree is not None and extent.has_drafts and read is not None:
            read.tree = start_tree(state, tensors, tensors.sample_at_L)
            tree = TreeMask(read.tree.seen_T, read.tree.tail_T, tensors.positions_T)
        shared = None
        if extent.span_tokens:
            shared = SpanTensors(
                rows_M=tensors.span_rows_M,
                start_S1=tensors.span_start_R1,
                first_S=tensors.span_first_R,
                last_S=tensors.span_last_R,
                level_S=tensors.span_level_R,
                levels=extent.levels,
                num_tokens=extent.span_tokens,
            )
        inputs = AttentionInputs(
            query_start_R1=tensors.query_start_R1,
            kv_len_R=tensors.kv_len_R,
            slots_R=tensors.slots_R,
            page_table=state.page_table,
            loc_T=tensors.loc_T,
            page_size=self.page_size,
            max_query=extent.max_query,
            max_kv=extent.max_kv,
            k_caches=pool.keys,
            v_caches=pool.values,
            index_caches=pool.index,
            k_scales=pool.k_scales,
            v_scales=pool.v_scales,
            ranges=pool.ranges,
            shared=shared,
            host=extent.host,
            lists_fresh=extent.host is None and self.context is None,
            tree=tree,
            lines=lines,
        )
        whole = read is not None and read.proposes and read.reads.hidden
        spans = media.spans if media is not None else ()
        wrapped = self.measures_scales or self.pool.spreads
        narrows = self.narrows and not wrapped and items is None and at is not None and not whole and not spans
        narrows &= tree is None and (extent.host is not None or self.context is None)  # rows of one query have no tree
        if narrows and at is not None and _is_small(at, len(ids), extent):
            # A copy of the inputs: with themselves it would be a cycle.
            inputs.tail = LastRows(at, partial(_rows_of, at, tensors, replace(inputs)), self._last_layer)
        if read is not None:
            read.inputs = inputs
        positions_T = tensors.positions_T
        if state.turn is not None:
            positions_T = positions_T + state.turn[tensors.token_slots_T]
        if items is not None:
            inputs.gaps_T2 = items.gaps(len(ids), ids.device)
            positions_T = items.positions(positions_T)
        if self.context is not None and extent.cut is not None:
            assert at is not None, "a stage does not share contexts"
            return self._split(self.context, tensors, positions_T, inputs, extent, at, media)
        backend = self._backend(inputs, gapped=items is not None)
        batch = Batch(
            ids_T=ids,
            positions_T=positions_T,
            attention=self._wrapped(TwoWayAttention(backend, inputs, spans) if spans else backend),
            logits_at=None if whole else at,
            num_tokens=len(ids),
            loc_T=tensors.loc_T if extent.host is None else None,
            segments_T=segments,
            taps=None if read is None else read.taps,
            states=None if states is None else states.begin(tensors),
            adapters=PassAdapters(self._adapters(tensors), at) if extent.adapted else None,
        )
        if self.cross is not None:
            batch.cross = self.cross.of_step(
                tensors.token_slots_T,
                None if media is None else media.fresh,
                None if media is None else media.sights,
            )
        if media is not None:
            media.put(batch)
        hidden = self.model.forward(batch)
        if read is None or not whole:
            return hidden
        read.hidden_TD = hidden
        return hidden if at is None else hidden[at]

    def _adapters(self, tensors: StepTensors) -> Tensor:
        """int32 [T]: the adapter of each token's row; padding has none."""
        assert self.state.adapter is not None, "rows have none otherwise"
        return self.state.adapter.index_select(0, tensors.token_slots_T)

    def _backend(self, inputs: AttentionInputs, *, gapped: bool) -> AttentionBackend:
        if self.context is not None:
            assert not gapped, "items are not scored in one pass where ranks share contexts"
            return self.context.backend(inputs, None)
        return self._gapped(inputs) if gapped else self._attention(inputs)

    def _wrapped(self, backend: AttentionBackend) -> AttentionBackend:
        """What layers are given: the outermost one sees keys as layers have them, the innermost as pages have them."""
        if self.pool.spreads:
            return SpreadKeysAttention(backend, self.pool.spreads)
        return MeasuringAttention(backend, self.pool) if self.measures_scales else backend

    def _spreading(self, inputs: AttentionInputs) -> AttentionBackend:
        return self._wrapped(self._attention(inputs))

    def _split(
        self,
        context: ContextShare,
        tensors: StepTensors,
        positions_T: Tensor,
        inputs: AttentionInputs,
        extent: Extent,
        at: Tensor,
        media: MediaTensors | None,
    ) -> Tensor:
        """As `hidden`, where this rank computes some of the step's tokens."""
        ids_T, cut = tensors.ids_T, extent.cut
        assert cut is not None, "otherwise the step is not split"
        mine = torch.from_numpy(cut.mine).to(at.device)
        batch = Batch(
            ids_T=ids_T[mine],
            positions_T=positions_T[mine],
            attention=context.backend(inputs, cut),
            num_tokens=len(mine),
            adapters=PassAdapters(self._adapters(tensors)[mine]) if extent.adapted else None,
        )
        if media is not None:
            media.of_tokens(mine, len(ids_T)).put(batch)
        return context.tell(self.model.forward(batch), at, cut)

    def draw(self, logits: Tensor, tensors: StepTensors, *, has_drafts: bool) -> Tensor:
        """int64 [L]: one token a sample."""
        count = len(logits)
        drawn = sample(
            logits,
            tensors.temperature_L[:count],
            tensors.top_k_L[:count],
            tensors.top_p_L[:count],
            tensors.min_p_L[:count],
            tensors.seed_L[:count],
            tensors.counter_L[:count],
        )
        if self.rule is None or not has_drafts:
            return drawn
        return self.rule.redraw(drawn, logits, tensors, self.state)

    def keep(self, drawn_L: Tensor, tensors: StepTensors) -> Tensor:
        """Every row yields what it drew: the slots go on from there. Returns the tokens."""
        advance(self.state, tensors, drawn_L)
        return drawn_L

    def verify(
        self, drawn_L: Tensor, tensors: StepTensors, num_rows: int, width: int, blocked_L: Tensor | None = None
    ) -> Tensor:
        """[rows, 1 + width]: how many tokens each row yields, and what it drew: the slots go on from there."""
        return verify(self.state, tensors, drawn_L, num_rows, width, blocked_L)

    def walk(
        self, read: Read, tensors: StepTensors, drawn_L: Tensor, num_rows: int, blocked_L: Tensor | None = None
    ) -> Walked:
        """`verify` for trees. Their paths' KV is put together in the target's layers."""
        tree = read.tree
        assert tree is not None, "the step's pass has begun with it"
        path = walk_tree(self.state, tensors, tree, drawn_L, num_rows, self.tree_width, blocked_L)
        layers = slice(None if self._last_layer is None else self._last_layer + 1)
        gather_path(self.pool.caches(layers), tensors.loc_T, path)
        read.follow(path)
        ids = tensors.ids_T[path.from_T]
        chain = replace(tensors, ids_T=ids, positions_T=tree.positions_T, counter_L=tree.counter_L)
        return Walked(path, chain, drawn_L[path.from_L])

    def reading(self, proposals: int) -> Read | None:
        """What `hidden` is given in a step with `proposals` proposals."""
        return None if self.proposer is None else Read.of(self.proposer.reads, proposals)

    def propose(
        self, read: Read, tensors: StepTensors, drawn_L: Tensor, result: Tensor, bounds: Bounds, count: int
    ) -> Tensor:
        """Leaves `count` drafts in the slots of the rows that sample. `result`: what `keep` or `verify` gave.

        Returns [rows, 1 + width + count]: as `verify` gives it, and behind it the drafts that the slots have now, where they
        form trees with their parents; without drafts the `result` itself.
        """
        assert self.proposer is not None, "steps of a runner without one have no proposals"
        state, num_rows = self.state, len(result)
        yields_R = result[:, 0] if result.ndim == 2 else None
        state.room.scatter_(0, tensors.slots_R.long(), tensors.room_R.long())
        if num_rows:
            rows = sampled_rows(state, tensors, drawn_L, num_rows, yields_R)
        else:
            rows, count = padding_rows(state, tensors), 0
        drafts = self.proposer.propose(
            Drafting(count, read, rows, bounds, tensors, drawn_L, state, self._drafts_attention)
        )
        if not count:
            return result
        slots = tensors.sample_slots_L[:num_rows]
        if yields_R is not None:
            slots = tensors.sample_slots_L[tensors.sample_start_R1[:num_rows].long().clamp_max(len(drawn_L) - 1)]
        left = self._leave(drafts, rows.slots_R, slots, count)
        if yields_R is None:
            left = [torch.ones_like(result[:, None]), result[:, None], *left]
        else:
            left = [result, *left]
        return torch.cat(left, 1)

    def _leave(self, drafts: list[Tensor] | TreeDrafts, into_R: Tensor, slots_R: Tensor, count: int) -> list[Tensor]:
        """Notes the drafts in slots `into_R`. Returns what `slots_R` have now."""
        state = self.state
        if isinstance(drafts, list):
            state.drafts[:, :count].index_copy_(0, into_R, torch.stack(drafts, 1))
            return [state.drafts[slots_R, :count]]
        tree = state.tree
        assert tree is not None, "a runner of trees has room for them"
        for held, made in (
            (state.drafts, drafts.tokens),
            (tree.parents, drafts.parents),
            (tree.depth, drafts.depth),
            (tree.seen, drafts.seen),
        ):
            held[:, :count].index_copy_(0, into_R, made)
        return [state.drafts[slots_R, :count], tree.parents[slots_R, :count]]


def _is_small(at: Tensor, num_tokens: int, extent: Extent) -> bool:
    """Whether the tokens that are read are few enough to narrow the last layer to them."""
    return (extent.host is not None or extent.max_query > 1) and len(at) <= num_tokens * TAIL_SHARE


def _rows_of(at: Tensor, tensors: StepTensors, inputs: AttentionInputs) -> AttentionInputs:
    """The tokens `at`, each as a row that sees everything up to itself."""
    lines = inputs.lines
    return AttentionInputs(
        query_start_R1=torch.arange(len(at) + 1, dtype=torch.int32, device=at.device),
        kv_len_R=(tensors.positions_T[at] + 1).to(torch.int32),
        slots_R=tensors.token_slots_T[at].to(torch.int32),
        page_table=inputs.page_table,
        loc_T=inputs.loc_T[at],
        page_size=inputs.page_size,
        max_query=1,
        max_kv=inputs.max_kv,
        k_caches=inputs.k_caches,
        v_caches=inputs.v_caches,
        index_caches=inputs.index_caches,
        k_scales=inputs.k_scales,
        v_scales=inputs.v_scales,
        ranges=inputs.ranges,
        lines=None if lines is None else replace(lines, locs=[loc_T[at] for loc_T in lines.locs]),
    )
