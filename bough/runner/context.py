"""Sequences whose KV several ranks share: each keeps every c-th token of them.

Decode rows and short prompts are computed by all of these ranks alike: each attends to the KV that it has, and the results
are weighed by their log-sum-exp. The tokens of long prompts are split: a prompt's chunk is cut into 2c pieces, and rank i
computes pieces i and 2c - 1 - i ("zigzag"), so that all have as many keys to read; keys and values are gathered in each
layer.

T tokens of the step, M tokens that this rank computes, S tokens of rows that are split, C tokens before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bough.core.step import Step
from bough.distributed.mesh import Axis
from bough.kernels.attention.inputs import I32, AttentionInputs, HostLengths, Spec
from bough.kernels.attention.partial import PartialAttention, TokenShare, merge_partials
from bough.kernels.rotary import write_kv
from bough.layers.batch import AttentionBackend

I64 = npt.NDArray[np.int64]
AttentionFactory = Callable[[AttentionInputs], AttentionBackend]

SPLIT_TOKENS: Final = 64
"""Tokens per rank from which on a prompt's chunk is split: fewer are computed sooner than they are gathered."""


@dataclass(frozen=True, slots=True)
class SplitRow:
    """A row whose tokens are split."""

    row: int
    start: int
    """Its first token in the step."""
    num_query: int
    context: int
    """Tokens before these."""

    def pieces(self, size: int) -> list[tuple[slice, slice]]:
        """By rank: its two pieces of the row's tokens."""
        ends = [self.num_query * at // (2 * size) for at in range(2 * size + 1)]
        cuts = [slice(low, high) for low, high in pairwise(ends)]
        return [(cuts[rank], cuts[2 * size - 1 - rank]) for rank in range(size)]


class Cut:
    """Who computes which tokens of a step with rows that are split. The same on all ranks but for `mine`."""

    def __init__(self, step: Step, rows: Sequence[SplitRow], rank: int, size: int) -> None:
        self.rows = list(rows)
        starts = np.cumsum(step.num_query) - step.num_query
        split = {each.row for each in rows}
        self.alike_rows = np.array([row for row in range(step.num_rows) if row not in split], np.int64)
        """Rows that all ranks compute."""
        alike = [np.arange(starts[row], starts[row] + step.num_query[row]) for row in self.alike_rows]
        self.alike: I64 = np.concatenate(alike).astype(np.int64) if alike else np.empty(0, np.int64)
        by_rank: list[list[I64]] = [[] for _ in range(size)]
        for each in rows:
            for other, pieces in enumerate(each.pieces(size)):
                by_rank[other] += [np.arange(each.start + part.start, each.start + part.stop) for part in pieces]
        self.split_of = [np.concatenate(each).astype(np.int64) for each in by_rank]
        """By rank: the tokens that it alone computes, in the order it has them."""
        self.mine: I64 = np.concatenate((self.alike, self.split_of[rank]))
        """Tokens of the step that this rank computes, in the order it has them."""
        self.most = len(self.alike) + max(len(each) for each in self.split_of)
        """Tokens that a rank computes at most."""
        self.owner = np.full(step.num_tokens, rank == 0)
        """bool [T]: whose hidden states this rank gives to the others."""
        for other, tokens in enumerate(self.split_of):
            self.owner[tokens] = other == rank
        self.place = np.zeros(step.num_tokens, np.int64)
        """Where a token of this rank's is among its own."""
        self.place[self.mine] = np.arange(len(self.mine))


class ContextShare:
    """One rank's part in shared contexts."""

    def __init__(self, axis: Axis, attention: AttentionFactory, *, split_tokens: int = SPLIT_TOKENS) -> None:
        """`attention`: attends to keys that have been gathered."""
        self.axis = axis
        self.share = TokenShare(axis.rank, axis.size)
        self._attention = attention
        self._least = split_tokens * axis.size
        self.num_splits = 0
        """Steps that were split so far."""

    def cut(self, step: Step) -> Cut | None:
        """How a step's tokens are split; None: all ranks compute all of them."""
        rows = self._long_rows(step)
        return Cut(step, rows, self.axis.rank, self.axis.size) if rows else None

    def num_rows(self, step: Step) -> tuple[int, bool]:
        """(tokens that a rank computes at most, whether they are split)."""
        cut = self.cut(step)
        return (step.num_tokens, False) if cut is None else (cut.most, True)

    def _long_rows(self, step: Step) -> list[SplitRow]:
        if step.num_decodes == step.num_rows or int(step.num_query.max()) < self._least:
            return []
        starts = np.cumsum(step.num_query) - step.num_query
        return [
            SplitRow(row, int(starts[row]), int(step.num_query[row]), int(step.context[row]))
            for row in range(step.num_decodes, step.num_rows)
            if step.num_query[row] >= self._least
        ]

    def backend(self, inputs: AttentionInputs, cut: Cut | None) -> AttentionBackend:
        self.num_splits += cut is not None
        return SharedContextAttention(inputs, self.axis, self.share, cut, self._attention)

    def tell(self, hidden_MD: Tensor, at: Tensor, cut: Cut) -> Tensor:
        """[len(at), D]: hidden states of tokens of the step, on all ranks."""
        owner = torch.from_numpy(cut.owner).to(at.device)[at]
        found = hidden_MD[torch.from_numpy(cut.place).to(at.device)[at]]
        return self.axis.talk.all_reduce(torch.where(owner[:, None], found, 0))


@dataclass(frozen=True, slots=True)
class _Line:
    """What layers of one line need, of all tokens of the step."""

    loc_T: Tensor
    """Where this rank keeps a token; -1: it does not."""
    alike_loc: Tensor
    """The same, of tokens that all ranks compute."""
    alike: PartialAttention | None
    """Of rows that all ranks compute; None: there are none."""
    context_loc: Tensor | None
    """Where this rank keeps what it has of the contexts of rows that are split; None: there are none."""


class SharedContextAttention:
    """Attention of one step over KV that ranks share."""

    def __init__(
        self, inputs: AttentionInputs, axis: Axis, share: TokenShare, cut: Cut | None, attention: AttentionFactory
    ) -> None:
        """`inputs`: of all tokens of the step, with pages that hold all tokens of a sequence, but this rank's caches."""
        self._inputs, self._axis, self._share, self._cut = inputs, axis, share, cut
        self._num_alike = inputs.num_tokens if cut is None else len(cut.alike)
        self._gathered = None if cut is None else _Gathered(inputs, axis, share, cut, attention)
        self._lines: dict[int, _Line] = {}

    def forward(self, spec: Spec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """Of this rank's tokens."""
        inputs, here, line = self._inputs, self._num_alike, self._line_of(spec.layer)
        k_cache, v_cache = inputs.k_caches[spec.layer], inputs.v_caches[spec.layer]
        k_scale, v_scale = inputs.scales(spec.layer)
        write_kv(k_TKH[:here], v_TKH[:here], k_cache, v_cache, line.alike_loc, k_scale=k_scale, v_scale=v_scale)
        parts = []
        if line.alike is not None:
            parts.append(self._over_all_ranks(line.alike, spec, q_TNH[:here]).to(q_TNH.dtype).flatten(1))
        if self._gathered is not None:
            assert line.context_loc is not None
            new = q_TNH[here:], k_TKH[here:], v_TKH[here:]
            parts.append(self._gathered.forward(spec, *new, line.loc_T, line.context_loc))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend(self, spec: Spec, q_TNH: Tensor) -> Tensor:
        raise AssertionError("models whose layers share KV are refused where ranks share contexts")

    def _line_of(self, layer: int) -> _Line:
        lines = self._inputs.lines
        number = 0 if lines is None else lines.of_layer[layer]
        if number not in self._lines:
            self._lines[number] = self._made(replace(self._inputs.of_layer(layer), lines=None))
        return self._lines[number]

    def _made(self, inputs: AttentionInputs) -> _Line:
        """`inputs`: with the page table of the line."""
        cut, share = self._cut, self._share
        loc_T = share.locations(inputs.loc_T)
        if cut is None or self._gathered is None:
            return _Line(loc_T, loc_T, PartialAttention(inputs, share), None)
        alike = None
        if len(cut.alike_rows):
            alike = PartialAttention(_some_rows(inputs, cut.alike_rows, len(cut.alike)), share)
        at = torch.from_numpy(cut.alike).to(loc_T.device)
        return _Line(loc_T, loc_T[at], alike, self._gathered.kept(inputs))

    def _over_all_ranks(self, alike: PartialAttention, spec: Spec, q_TNH: Tensor) -> Tensor:
        out_TNV, lse_TN = alike.forward(spec, q_TNH)
        every = self._axis.talk.all_gather(torch.cat((out_TNV, lse_TN.unsqueeze(-1)), -1))
        return merge_partials(every[..., :-1], every[..., -1])


class _Gathered:
    """Rows that are split: keys and values of all their tokens are brought together, beside one another."""

    def __init__(
        self, inputs: AttentionInputs, axis: Axis, share: TokenShare, cut: Cut, attention: AttentionFactory
    ) -> None:
        """`inputs`: of any line. What is gathered lies in pages as large as its, whichever line it comes from."""
        self._inputs, self._axis, self._cut, self._share = inputs, axis, cut, share
        device = inputs.loc_T.device
        page = inputs.page_size // share.size
        self._most = max(len(each) for each in cut.split_of)
        self._tokens = torch.from_numpy(np.concatenate([np.arange(e.start, e.start + e.num_query) for e in cut.rows]))
        """int64 [S]: tokens of the step, row after row."""
        source = np.zeros(inputs.num_tokens, np.int64)
        for rank, tokens in enumerate(cut.split_of):
            source[tokens] = rank * self._most + np.arange(len(tokens))
        self._source = torch.from_numpy(source[self._tokens.numpy()]).to(device)
        """Where each of them is among those of all ranks."""
        self._tokens = self._tokens.to(device)
        places, pages = self._laid_out(page)
        new = [np.arange(each.context, each.context + each.num_query) for each in cut.rows]
        self._new_loc = torch.from_numpy(
            np.concatenate([first * page + at for (first, _), at in zip(pages, new, strict=True)])
        ).to(device)
        self._old_loc = torch.from_numpy(places).to(device)
        num_pages = pages[-1][0] + pages[-1][1]
        self._scratch: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        beside = [self._beside(k, v, num_pages) for k, v in zip(inputs.k_caches, inputs.v_caches, strict=True)]
        self._k_caches, self._v_caches = [keys for keys, _ in beside], [values for _, values in beside]
        self._backend = attention(self._own_rows(page, pages, axis.rank))

    def kept(self, inputs: AttentionInputs) -> Tensor:
        """Where this rank keeps what it has of the rows' contexts, in the pages of a line. Of each row every rank brings
        equally many tokens, so that a token's place does not depend on whose it is."""
        page, device = inputs.page_size // self._share.size, inputs.loc_T.device
        found = []
        for each in self._cut.rows:
            here = torch.arange(-(-each.context // self._share.size), device=device)
            table = inputs.page_table[inputs.slots_R[each.row].long()]
            found.append(table[here // page].long() * page + here % page)
        return torch.cat(found)

    def _laid_out(self, page: int) -> tuple[I64, list[tuple[int, int]]]:
        """(where what all ranks keep of the rows' contexts goes, first page and pages of each row)."""
        places, pages, first, size = [], [], 0, self._share.size
        for each in self._cut.rows:
            count = -(-(each.context + each.num_query) // page)
            here = np.arange(-(-each.context // size))
            position = here[None, :] * size + np.arange(size)[:, None]  # [ranks, here]
            places.append(np.where(position < each.context, first * page + position, -1))
            pages.append((first, count))
            first += count
        return np.concatenate(places, 1).reshape(-1), pages

    def _beside(self, k_cache: Tensor, v_cache: Tensor, num_pages: int) -> tuple[Tensor, Tensor]:
        """Room for the keys and values of one layer; layers of one shape share it."""
        page = self._inputs.page_size // self._share.size
        shape = (*k_cache.shape[2:], *v_cache.shape[2:])
        if shape not in self._scratch:
            keys = k_cache.new_zeros(num_pages, page, *k_cache.shape[2:])
            is_latent = v_cache.data_ptr() == k_cache.data_ptr()
            values = keys[..., : v_cache.shape[-1]]
            if not is_latent:
                values = v_cache.new_zeros(num_pages, page, *v_cache.shape[2:])
            self._scratch[shape] = keys, values
        return self._scratch[shape]

    def _own_rows(self, page: int, pages: list[tuple[int, int]], rank: int) -> AttentionInputs:
        """This rank's pieces as rows, over what is gathered."""
        inputs, device = self._inputs, self._inputs.loc_T.device
        num_query, kv_len, slots = [], [], []
        for slot, each in enumerate(self._cut.rows):
            for part in each.pieces(self._axis.size)[rank]:
                num_query.append(part.stop - part.start)
                kv_len.append(each.context + part.stop)
                slots.append(slot)
        table = np.zeros((len(pages), max(count for _, count in pages)), np.int32)
        for slot, (first, count) in enumerate(pages):
            table[slot, :count] = np.arange(first, first + count)
        queries, lengths = np.array(num_query, np.int32), np.array(kv_len, np.int32)
        return AttentionInputs(
            query_start_R1=torch.from_numpy(np.concatenate(([0], np.cumsum(queries))).astype(np.int32)).to(device),
            kv_len_R=torch.from_numpy(lengths).to(device),
            slots_R=torch.tensor(slots, dtype=torch.int32, device=device),
            page_table=torch.from_numpy(table).to(device),
            loc_T=torch.full((int(queries.sum()),), -1, device=device),
            page_size=page,
            max_query=int(queries.max()),
            max_kv=int(lengths.max()),
            k_caches=self._k_caches,
            v_caches=self._v_caches,
            k_scales=inputs.k_scales,
            v_scales=inputs.v_scales,
            host=HostLengths(num_query_R=queries, context_R=lengths - queries),
        )

    def forward(
        self, spec: Spec, q_MNH: Tensor, k_MKH: Tensor, v_MKV: Tensor, loc_T: Tensor, context_loc: Tensor
    ) -> Tensor:
        """[M, N * V] of this rank's pieces. `loc_T`, `context_loc`: of the layer's line."""
        inputs, layer = self._inputs, spec.layer
        k_SKH, v_SKV = self._all_tokens(k_MKH), self._all_tokens(v_MKV)
        k_scale, v_scale = inputs.scales(layer)
        k_cache, v_cache = inputs.k_caches[layer], inputs.v_caches[layer]
        keys, values = self._k_caches[layer], self._v_caches[layer]
        if len(context_loc):
            self._bring_context(k_cache, context_loc, keys)
            if not spec.latent:
                self._bring_context(v_cache, context_loc, values)
        write_kv(k_SKH, v_SKV, keys, values, self._new_loc, k_scale=k_scale, v_scale=v_scale)
        write_kv(k_SKH, v_SKV, k_cache, v_cache, loc_T[self._tokens], k_scale=k_scale, v_scale=v_scale)
        if not len(q_MNH):
            return q_MNH.new_empty(0, spec.num_heads * v_cache.shape[-1])
        return self._backend.forward(spec, q_MNH, k_MKH, v_MKV)

    def _all_tokens(self, x_MKH: Tensor) -> Tensor:
        """[S, K, H]: what all ranks have made of their tokens, row after row."""
        padded = x_MKH.new_zeros(self._most, *x_MKH.shape[1:])
        padded[: len(x_MKH)] = x_MKH
        return self._axis.talk.all_gather(padded).flatten(0, 1)[self._source]

    def _bring_context(self, cache: Tensor, context_loc: Tensor, into: Tensor) -> None:
        """Gathers what all ranks keep of the rows' contexts."""
        mine = cache.flatten(0, 1).view(torch.uint8 if cache.dtype.itemsize == 1 else cache.dtype)[context_loc]
        every = self._axis.talk.all_gather(mine.contiguous()).flatten(0, 1)
        real = self._old_loc >= 0
        into.flatten(0, 1).view(every.dtype)[self._old_loc[real]] = every[real]


def _some_rows(inputs: AttentionInputs, rows: I64, num_tokens: int) -> AttentionInputs:
    """A step of some of the rows, their tokens one after another."""
    assert inputs.host is not None
    at = torch.from_numpy(rows).to(inputs.kv_len_R.device)
    queries: I32 = inputs.host.num_query_R[rows]
    starts = np.concatenate(([0], np.cumsum(queries))).astype(np.int32)
    return replace(
        inputs,
        query_start_R1=torch.from_numpy(starts).to(at.device),
        kv_len_R=inputs.kv_len_R[at],
        slots_R=inputs.slots_R[at],
        loc_T=inputs.loc_T[:num_tokens],
        host=HostLengths(num_query_R=queries, context_R=inputs.host.context_R[rows]),
    )
