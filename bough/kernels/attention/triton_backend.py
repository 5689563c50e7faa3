"""The attention backend of CUDA devices: plans a step once per kind of layer, then runs every layer from the plan."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from bough.core.step import SpanCosts
from bough.kernels.attention import (
    absorbed,
    choosing,
    decode_hopper,
    expanded,
    fresh,
    fresh_hopper,
    latent,
    latent_hopper,
    plan,
    sparse,
    triton,
)
from bough.kernels.attention.inputs import AttentionInputs, IndexQueries, LastRows, LatentMaps, RawLatents, Spec
from bough.kernels.attention.plan import Kind, Plan, Shape
from bough.kernels.kv_codes import as_read, bits_of
from bough.kernels.launching import num_sms, power_of_two, shared_bytes_per_sm
from bough.kernels.rotary.triton import rope_and_write, rope_queries, write_kv

DECODE = Shape(block_m=16, block_n=64, num_warps=2, num_stages=2, ctas_per_sm=4, may_align=True)
"""Rows whose queries (times the heads of a KV head) fit into one tile: the KV is read once, at memory bandwidth."""
FEW_DECODE = Shape(block_m=16, block_n=64, num_warps=4, num_stages=2, ctas_per_sm=4, min_tokens=64)
"""The same for a handful of tokens, where the time is that of one program, not of the memory."""
_FEW = 8
MANY_DECODE = Shape(block_m=16, block_n=64, num_warps=4, num_stages=3, ctas_per_sm=2, may_align=True)
"""The same for more (row, KV head) pairs than `DECODE` has programs at once: fewer programs, with more in flight, leave less
of a last wave. Measured on an H200: 3 to 10 % less from contexts of 400 on, 5 % more below 150."""
_MANY_BYTES = 200 * 1024
"""Of shared memory a multiprocessor, for two of those programs."""
EXTEND = Shape(block_m=64, block_n=64, num_warps=4, num_stages=3, ctas_per_sm=1)
"""Longer rows of small steps."""
PREFILL = Shape(block_m=128, block_n=64, num_warps=8, num_stages=3, ctas_per_sm=1)
"""Longer rows of large steps."""
SHARED = Shape(block_m=64, block_n=64, num_warps=4, num_stages=3, ctas_per_sm=2)
"""Query tokens against a span that their rows share. Reading a span from memory takes about as long as one such tile's
arithmetic, so that groups of few rows are not paid for with empty tiles."""
MOST_NODES = 64
"""Query tokens of a row whose drafts form a tree."""
_LARGE_STEP = 1024
_NEVER = 2**30
"""No row is as long: all of them are left to the paged kernel."""


_BYTES_PER_NS = 4200.0
"""Read by an H200; what spans are worth is a matter of ratios, which are similar on other devices."""
_FLOPS_PER_NS = 400_000.0
"""Of tiles of `SHARED` whose KV is in L2."""
_SPAN_NS = 100.0
_FIXED_NS = 15_000.0
"""Two launches more than the one that serves decode rows on Hopper, and rotation apart from attention."""


def span_costs(spec: Spec, kv_bytes: float) -> SpanCosts:
    """What shared spans cost in a layer like `spec` with a cache of `kv_bytes` per number. Measured by `bough bench kernels
    shared` on an H200."""
    group = spec.num_heads // spec.num_kv_heads
    v_width = spec.v_head_dim or spec.head_dim
    numbers = spec.num_kv_heads * (spec.head_dim + v_width)
    block_m = max(SHARED.block_m, 1 << (group - 1).bit_length())
    return SpanCosts(
        read_ns=numbers * kv_bytes / _BYTES_PER_NS,
        row_queries=max(1, DECODE.block_m // group),
        tile_ns=2 * numbers * block_m / _FLOPS_PER_NS,
        tile_queries=block_m // group,
        span_ns=_SPAN_NS,
        merge_ns=8 * spec.num_heads * v_width / _BYTES_PER_NS,
        fixed_ns=_FIXED_NS,
    )


@dataclass(slots=True)
class _Prepared:
    """The launches of one kind of layer in this step."""

    rows: list[Plan]
    shared: Plan | None
    fresh: list[tuple[int, int]]
    """(first token, tokens) of rows whose attention needs no pages."""
    all_fresh_from: int
    """From this token on there are no others."""
    long: list[expanded.LongRow]
    """Rows with a context of which keys and values are made (latents)."""
    listed: fresh_hopper.Listed | None = None
    """Rows like `fresh` that the device alone knows; None: the host knows them."""
    just_planned: bool = True
    places: expanded.Places = field(default_factory=dict)
    """Of those rows' tokens, once a layer has worked them out."""

    @property
    def end(self) -> int:
        """Behind the last token of `fresh` and `long` rows, of which there are some."""
        ends = [first + length for first, length in self.fresh]
        return max([*ends, *(each.first + each.length for each in self.long)])


class TritonAttention:
    """`AttentionBackend` over `AttentionInputs`. One object serves a device's stream: its buffers are reused."""

    def __init__(self, device: torch.device, *, hopper: bool = True) -> None:
        """`hopper`: kernels written for Hopper are used where they can be had and suit."""
        self._device = device
        self._hopper = hopper
        self._inputs: AttentionInputs | None = None
        self._by_line: dict[int, AttentionInputs] = {}
        self._prepared: dict[tuple[Kind, int, int], _Prepared] = {}
        self._decode_plans: dict[tuple[Kind, torch.dtype, Shape], Plan] = {}
        self._choice: AttentionInputs | None = None
        """The tokens that were chosen last, as `sparse.view_of` has them; None: all are read..."""
        self._reader: TritonAttention | None = None
        """...and what reads them."""
        self._workspaces: dict[tuple[int, int], list[triton.Workspace]] = {}
        self._latent_rooms: list[latent_hopper.LatentRoom] = []

    def prepare(self, inputs: AttentionInputs) -> None:
        """Starts a step (or the capture of a graph). Plans are queued by the first layer that needs them."""
        self._inputs = inputs
        self._by_line.clear()
        self._prepared.clear()
        self._decode_plans.clear()
        self._choice = None

    def queries_at(self, spec: Spec) -> Tensor | None:
        """Tokens whose queries a layer's forward takes, and whose results it gives: in the last layer the step's tail, where
        it has one. None: all."""
        tail = self._tail(spec)
        return None if tail is None else tail.at_L

    def forward(self, spec: Spec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """Writes k and v to their pages, then attends. Returns [T, num_heads * v_head_dim], or [L, ...] of `queries_at`."""
        inputs = self._of_layer(spec)
        k_scale, v_scale = inputs.scales(spec.layer)
        k_cache, v_cache = inputs.k_caches[spec.layer], inputs.v_caches[spec.layer]
        ranges = inputs.ranges_of(spec.layer)
        write_kv(k_TKH, v_TKH, k_cache, v_cache, inputs.loc_T, k_scale=k_scale, v_scale=v_scale, ranges=ranges)
        tail = self._tail(spec)
        if tail is not None:
            q_TNH = _of_tail(q_TNH, tail)
            self.prepare(tail.inputs())
        return self.attend(spec, q_TNH, k_TKH, v_TKH)

    def forward_rope(
        self,
        spec: Spec,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        positions_T: Tensor,
        cos_sin_PR: Tensor,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        interleaved: bool = False,
    ) -> Tensor:
        """`forward` for q and k that still need their norms and rotation, which one kernel does with the KV write."""
        inputs = self._of_layer(spec)
        tail = self._tail(spec)
        if self._hopper and inputs.max_query == 1 and tail is None:
            raw = decode_hopper.Raw(
                q_TNH, k_TKH, v_TKH, positions_T, cos_sin_PR, q_norm, k_norm, eps, offset, interleaved
            )  # fmt: skip
            if decode_hopper.suits(spec, inputs, raw):
                return self._decode(spec, inputs, raw)
        first, later = q_TNH, None
        if tail is not None:
            first = q_TNH[:0]
        else:
            prepared = self._kind(spec, q_TNH, v_TKH)
            plain = q_norm is None and not interleaved
            if prepared.fresh and plain and fresh.rotates(spec, q_TNH, v_TKH, cos_sin_PR, hopper=self._hopper):
                first, later = q_TNH[: prepared.all_fresh_from], fresh.Unrotated(q_TNH, cos_sin_PR)
        k_scale, v_scale = inputs.scales(spec.layer)
        q, k = rope_and_write(
            first,
            k_TKH,
            v_TKH,
            positions_T,
            cos_sin_PR,
            inputs.k_caches[spec.layer],
            inputs.v_caches[spec.layer],
            inputs.loc_T,
            q_norm,
            k_norm,
            eps,
            offset,
            interleaved=interleaved,
            k_scale=k_scale,
            v_scale=v_scale,
            ranges=inputs.ranges_of(spec.layer),
        )
        if tail is not None:  # its keys and values are in the pages now, with all others
            positions_L = positions_T.index_select(0, tail.at_L)
            q = rope_queries(
                _of_tail(q_TNH, tail), positions_L, cos_sin_PR, q_norm, eps, offset, interleaved=interleaved
            )
            self.prepare(tail.inputs())
            prepared = self._kind(spec, q, v_TKH)
        return self._attend(spec, prepared, q, k, v_TKH, later)

    def choose(self, spec: Spec, index: IndexQueries) -> None:
        """Writes the keys of the step's tokens to their pages, and chooses what this layer and those after it read: of the
        tokens of `queries_at` alone in the layer that narrows. Where no row is longer than `spec.topk`, all are read."""
        inputs = self._of_layer(spec)
        sparse.write_index(index.k_TD, sparse.cache_of(inputs, spec), inputs.loc_T)
        if inputs.max_kv <= spec.topk:
            return
        tail, before = self._tail(spec), self._choice
        if tail is not None:
            inputs, before = tail.inputs(), None
            index = index._replace(q_TID=_of_tail(index.q_TID, tail), weights_TI=_of_tail(index.weights_TI, tail))
        if before is None or before.max_kv != spec.topk:
            tokens, device = inputs.num_tokens, inputs.loc_T.device
            table_TK = torch.empty((tokens, spec.topk), dtype=torch.int32, device=device)
            before = sparse.view_of(inputs, table_TK, torch.empty(tokens, dtype=torch.int32, device=device))
        # How many tokens a query reads is the same in all layers: so is the plan to read them.
        choosing.choose(spec, inputs, index, before.page_table, before.kv_len_R)
        self._choice = before

    def forward_latent(self, spec: Spec, raw: RawLatents, maps: LatentMaps) -> Tensor:
        """Norms, rotates and writes latents to their pages, then attends. Returns [T, N * V], or of `queries_at` alone.

        Rows with many queries attend to keys and values that are made of the latents, others to the latents. Where tokens
        have been chosen, all attend to the latents of those.
        """
        inputs = self._of_layer(spec)
        cache = inputs.k_caches[spec.layer]
        k_scale, _ = inputs.scales(spec.layer)
        rank = cache.shape[3] - raw.cos_sin_PE.shape[1]
        tail = self._tail(spec)
        choice = self._choice if spec.topk else None
        prepared, front = None, inputs.num_tokens
        decodes = self._hopper and choice is None and latent_hopper.suits(spec, inputs, raw.q_TNH)
        if tail is not None:
            front = 0
        elif choice is None and not decodes:
            prepared = self._kind(spec, raw.q_TNH, raw.kv_TX, expands=True)
            front = prepared.all_fresh_from
        expands = tail is not None or (prepared is not None and bool(prepared.fresh or prepared.long))
        if not expands and absorbed.suits(raw.q_TNH, maps.weight):
            q = absorbed.absorb_and_write(raw, maps.weight, inputs.loc_T, cache, scale=k_scale)
            read_TNR = q.new_empty((front, spec.num_heads, rank))
            self._read_latents(spec, inputs, prepared, choice, q, read_TNR)
            out_TNV = q.new_empty((front, spec.num_heads, maps.v_dim))
            if front <= absorbed.MOST_VALUED:
                absorbed.values(read_TNR, maps.weight, out_TNV)
            else:
                maps.values(read_TNR, out_TNV)
            return out_TNV.flatten(1)
        q, k = latent.norm_rope_write(
            raw.q_TNH, raw.kv_TX, raw.norm_R, raw.positions_T, raw.cos_sin_PE, inputs.loc_T, cache,
            front=front, eps=raw.eps, offset=raw.offset, scale=k_scale, interleaved=raw.interleaved,
        )  # fmt: skip
        q_TNH, nope = raw.q_TNH, raw.q_TNH.shape[2] - raw.cos_sin_PE.shape[1]
        if tail is not None:
            q_TNH = _of_tail(q_TNH, tail)
            q = q_TNH.new_empty((*q_TNH.shape[:2], cache.shape[3]))
            q[..., rank:] = q_TNH[..., nope:]
            self.prepare(tail.inputs())
            inputs, front = self._of_layer(spec), len(q)
            if choice is None:
                prepared = self._kind(spec, q_TNH, raw.kv_TX)
            else:
                choice = _choice_of_tail(choice, tail)
        out_TNV = q.new_empty((inputs.num_tokens, spec.num_heads, maps.v_dim))
        if front:
            maps.absorb(q_TNH[:front, :, :nope], q[..., :rank])
            read_TNR = q.new_empty((front, spec.num_heads, rank))
            self._read_latents(spec, inputs, prepared, choice, q, read_TNR)
            maps.values(read_TNR, out_TNV[:front])
        if prepared is not None and (prepared.fresh or prepared.long):
            seen_TX = _as_read(k, cache.dtype, k_scale).squeeze(1)
            rows = prepared.fresh, prepared.long
            expanded.attend(spec, inputs, maps, q_TNH, seen_TX, *rows, k_scale, out_TNV, prepared.places)
        return out_TNV.flatten(1)

    def _read_latents(
        self,
        spec: Spec,
        inputs: AttentionInputs,
        prepared: _Prepared | None,
        choice: AttentionInputs | None,
        q_TNX: Tensor,
        out_TNR: Tensor,
    ) -> None:
        """Attends to latents as they are: to all of a row, or to chosen ones. With neither `prepared` nor `choice`, by the
        kernel for decode rows."""
        if prepared is not None:
            self._launch(spec, inputs, prepared, q_TNX, out_TNR)
        elif choice is not None:
            self._read(spec, choice, q_TNX, out_TNR)
        else:
            self._decode_latents(spec, inputs, q_TNX, out_TNR)

    def attend(self, spec: Spec, q_TNH: Tensor, k_TKH: Tensor | None = None, v_TKH: Tensor | None = None) -> Tensor:
        """`forward` for KV that is already in the pages. With the step's keys and values at hand, rows without context are
        attended to without pages, where that is faster."""
        if spec.topk and self._choice is not None:
            raise RuntimeError("what reads chosen tokens gives its latents to forward_latent")
        q = q_TNH if q_TNH.stride(2) == 1 else q_TNH.contiguous()
        prepared = self._kind(spec, q, v_TKH)
        if k_TKH is not None and v_TKH is not None:
            return self._attend(spec, prepared, q, k_TKH, v_TKH)
        inputs = self._of_layer(spec)
        out = q.new_empty(len(q), spec.num_heads, spec.v_width)
        self._launch(spec, inputs, prepared, q, out)
        return out.flatten(1)

    def _attend(
        self,
        spec: Spec,
        prepared: _Prepared,
        q: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        later: fresh.Unrotated | None = None,
    ) -> Tensor:
        """`later`: the queries of all tokens, to be rotated where `q`, which is rotated, ends: there all rows are fresh."""
        inputs = self._of_layer(spec)
        if prepared.fresh or prepared.listed is not None:
            k_TKH, v_TKH = _as_cached(inputs, spec, k_TKH, v_TKH)
        if not prepared.rows and prepared.shared is None:
            lengths = {length for _, length in prepared.fresh}
            if len(lengths) == 1 and sum(length for _, length in prepared.fresh) == inputs.num_tokens:
                queries = q if later is None else later
                return fresh.attend_whole(
                    queries, k_TKH, v_TKH, lengths.pop(), spec.scale, window=spec.window, sinks=spec.sinks,
                    hopper=self._hopper,
                ).flatten(1)  # fmt: skip
        out = torch.empty((inputs.num_tokens, spec.num_heads, spec.v_width), dtype=q.dtype, device=q.device)
        self._launch(spec, inputs, prepared, q, out)
        if prepared.listed is not None:
            fresh.attend_listed(q, k_TKH, v_TKH, prepared.listed, spec, out)
            return out.flatten(1)
        rows = prepared.fresh
        if later is not None:
            rest = [row for row in rows if row[0] >= len(q)]
            rows = rows[: len(rows) - len(rest)]
            if rest:
                fresh.attend_fresh(
                    later, k_TKH, v_TKH, rest, spec.scale, out, window=spec.window, sinks=spec.sinks
                )  # fmt: skip
        if rows:
            fresh.attend_fresh(
                q, k_TKH, v_TKH, rows, spec.scale, out, window=spec.window, sinks=spec.sinks, hopper=self._hopper
            )  # fmt: skip
        return out.flatten(1)

    def _read(self, spec: Spec, choice: AttentionInputs, q: Tensor, out: Tensor) -> None:
        """Attends to chosen tokens."""
        if self._reader is None:
            self._reader = TritonAttention(self._device, hopper=self._hopper)
        reader = self._reader
        if reader._inputs is not choice:
            reader.prepare(choice)
        prepared = reader._kind(spec, q, None)
        # Kernels may read page tables before those ahead of them have ended: this one has just been written.
        prepared.just_planned = True
        reader._launch(spec, choice, prepared, q, out)

    def _decode(self, spec: Spec, inputs: AttentionInputs, raw: decode_hopper.Raw) -> Tensor:
        """Writes keys and values, and attends, in one kernel."""
        found, after_plan = self._decode_plan(spec, inputs, decode_hopper.shape_for(spec, inputs))
        workspace = self._workspace(found, spec.head_dim)
        return decode_hopper.attend(spec, inputs, found, workspace, raw, after_plan=after_plan).flatten(1)

    def _decode_latents(self, spec: Spec, inputs: AttentionInputs, q_TNX: Tensor, out_TNR: Tensor) -> None:
        """Attends to latents by the kernel for decode rows."""
        shape = latent_hopper.fitted(latent_hopper.shape_for(inputs), self._device, spec.num_heads)
        found, after_plan = self._decode_plan(spec, inputs, shape)
        if not self._latent_rooms or not self._latent_rooms[-1].holds(found):
            self._latent_rooms.append(latent_hopper.LatentRoom.make(found, self._device))
        latent_hopper.attend(spec, inputs, found, self._latent_rooms[-1], q_TNX, out_TNR, after_plan=after_plan)

    def _decode_plan(self, spec: Spec, inputs: AttentionInputs, shape: Shape) -> tuple[Plan, bool]:
        """The plan of decode rows for layers of a kind, and whether it has just been queued."""
        kind = _kind_of(spec)
        key = (kind, inputs.k_caches[spec.layer].dtype, shape)
        found = self._decode_plans.get(key)
        if found is not None:
            return found, False
        chain, planned, is_new = inputs.chain, None, True
        if chain is not None:
            is_new = key not in chain.prepared
            if is_new:
                chain.prepared[key] = plan.plan_chain(inputs, kind, shape, chain.kv_len_PR)
            planned = chain.prepared[key]
        if chain is None or planned is None:
            found, is_new = plan.plan_rows(inputs, kind, shape, most_query=1), True
        else:
            found = planned[chain.place]
        self._decode_plans[key] = found
        return found, is_new

    def _tail(self, spec: Spec) -> LastRows | None:
        inputs = self._step()
        tail = inputs.tail
        if tail is None or not spec.causal:
            return None
        return tail if spec.layer == (len(inputs.k_caches) - 1 if tail.layer is None else tail.layer) else None

    def _of_layer(self, spec: Spec) -> AttentionInputs:
        """The step, with the pages of a layer."""
        inputs = self._step()
        if inputs.lines is None:
            return inputs
        line = inputs.lines.of_layer[spec.layer]
        if line not in self._by_line:
            self._by_line[line] = inputs.of_layer(spec.layer)
        return self._by_line[line]

    def _step(self) -> AttentionInputs:
        if self._inputs is None:
            raise RuntimeError("prepare() must run before the layers of a step")
        return self._inputs

    def _launch(self, spec: Spec, inputs: AttentionInputs, prepared: _Prepared, q: Tensor, out: Tensor) -> None:
        k_scale, v_scale = inputs.scales(spec.layer)
        front = None
        plans = prepared.rows
        if prepared.shared is not None:
            assert inputs.shared is not None
            room = (inputs.shared.levels, inputs.shared.num_tokens, *out.shape[1:])
            whole = torch.empty(room, dtype=torch.float32, device=q.device)
            front = (whole, torch.empty(room[:3], dtype=torch.float32, device=q.device))
            plans = [prepared.shared, *plans]
        for place, each in enumerate(plans):
            is_rows = each is not prepared.shared
            triton.attend(
                q,
                inputs.k_caches[spec.layer],
                inputs.v_caches[spec.layer],
                inputs.page_table,
                each,
                self._workspace(each, out.shape[2]),
                out,
                scale=spec.scale,
                window=spec.window,
                softcap=spec.softcap,
                causal=spec.causal,
                chunk=spec.chunk,
                sinks=spec.sinks,
                slopes=spec.slopes,
                k_scale=k_scale,
                v_scale=v_scale,
                shared=front if each.prefixed or not is_rows else None,
                zero_padding=is_rows and each is prepared.rows[0],
                after_plan=prepared.just_planned and place == 0,
                tree=inputs.tree,
                latent=spec.latent,
                ranges=inputs.ranges_of(spec.layer),
            )
        if not prepared.rows and (prepared.fresh or prepared.long):
            out[prepared.end :].zero_()
        prepared.just_planned = False

    def _workspace(self, each: Plan, v_width: int) -> triton.Workspace:
        """The largest so far, or a larger one; those before it stay, since graphs may hold them."""
        made = self._workspaces.setdefault((each.shape.block_m, v_width), [])
        if not made or made[-1].num_chunks < each.num_chunks:
            num_chunks = power_of_two(each.num_chunks)
            made.append(triton.Workspace.make(num_chunks, each.shape.block_m, v_width, self._device))
        return made[-1]

    def _kind(self, spec: Spec, q: Tensor, v: Tensor | None, *, expands: bool = False) -> _Prepared:
        """The launches of layers like this one. `v`: the values of the step's tokens; None: they are in the pages alone.
        `expands`: latents may be left to `expanded`."""
        inputs = self._step()
        v_width = spec.v_width
        kind = _kind_of(spec)
        if (
            inputs.tree is not None and kind.window is not None
        ):  # a node stands up to MOST_NODES positions before its place
            kind = replace(kind, window=kind.window + MOST_NODES)
        fresh_from = long_from = _NEVER
        if inputs.host is not None and spec.latent:
            if expands and inputs.tree is None:
                fresh_from = expanded.FRESH_FROM
                long_from = _NEVER if inputs.shared is not None else expanded.LONG_FROM
        elif inputs.host is not None and v is not None and fresh.suits(spec, q, v, hopper=self._hopper):
            fresh_from = fresh.shortest(spec, q, v, hopper=self._hopper)
        elif v is not None and _may_list(inputs, spec, q, v) and fresh.lists(spec, q, v, hopper=self._hopper):
            fresh_from = fresh.FRESH_FROM
        key = (kind, fresh_from, v_width)
        found = self._prepared.get(key)
        if found is None:
            width = spec.head_dim if spec.latent else power_of_two(spec.head_dim, 16) + power_of_two(v_width, 16)
            token = TokenBytes(width * q.dtype.itemsize, spec.latent)
            found = self._prepared[key] = _plan_step(inputs, kind, token, fresh_from, long_from)
            if inputs.host is None and fresh_from != _NEVER:
                found.listed = self._list(inputs, fresh_from)
        return found

    def _list(self, inputs: AttentionInputs, fresh_from: int) -> fresh_hopper.Listed:
        """Of a step: all kinds of layers share it."""
        before = (each.listed for each in self._prepared.values() if each.listed is not None)
        return next(before, None) or plan.list_fresh(inputs, fresh_from)


def _may_list(inputs: AttentionInputs, spec: Spec, q: Tensor, v: Tensor) -> bool:
    """Whether the device may list rows without context, whose keys and values are at hand."""
    known = inputs.lists_fresh and inputs.host is None and inputs.tree is None and not spec.latent
    return known and inputs.max_query >= fresh.FRESH_FROM and len(q) == len(v) == inputs.num_tokens


def _kind_of(spec: Spec) -> Kind:
    """A chunk is planned like a window as long, which holds it."""
    return Kind(spec.num_heads, spec.num_kv_heads, spec.chunk or spec.window, spec.causal)


def _of_tail(q_TNH: Tensor, tail: LastRows) -> Tensor:
    """The tail's queries, also of who projects those of all tokens."""
    return q_TNH if len(q_TNH) == len(tail.at_L) else q_TNH.index_select(0, tail.at_L)


def _choice_of_tail(choice: AttentionInputs, tail: LastRows) -> AttentionInputs:
    """What the tail's queries read, also where an earlier layer has chosen for all tokens."""
    if choice.num_tokens == len(tail.at_L):
        return choice
    table_LK = choice.page_table.index_select(0, tail.at_L)
    at = slice(len(table_LK))
    return replace(
        choice,
        query_start_R1=choice.query_start_R1[: len(table_LK) + 1],
        kv_len_R=choice.kv_len_R.index_select(0, tail.at_L),
        slots_R=choice.slots_R[at],
        page_table=table_LK,
        loc_T=choice.loc_T[at],
    )


def _as_cached(inputs: AttentionInputs, spec: Spec, k_TKH: Tensor, v_TKH: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as steps to come will read them from the caches: rows see the same, cached or not."""
    k_cache, v_cache = inputs.k_caches[spec.layer], inputs.v_caches[spec.layer]
    if inputs.ranges_of(spec.layer) is not None:
        bits = bits_of(k_cache, spec.head_dim)
        return as_read(k_TKH, bits), as_read(v_TKH, bits)
    k_scale, v_scale = inputs.scales(spec.layer)
    return _as_read(k_TKH, k_cache.dtype, k_scale), _as_read(v_TKH, v_cache.dtype, v_scale)


def _as_read(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Keys or values as they are read from a cache of floats."""
    if dtype == x.dtype:
        return x
    held = x.float() / scale
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        held = held.clamp(-limit, limit)
    return (held.to(dtype).float() * scale).to(x.dtype)


def _plan_step(
    inputs: AttentionInputs, kind: Kind, token: TokenBytes, fresh_from: int, long_from: int = _NEVER
) -> _Prepared:
    """Which launches the step needs: host lengths, where known, leave out those without rows. Rows with a context and at
    least `long_from` queries are left to `expanded`."""
    decode = shape_for(_decode_shape(inputs, kind), kind.group, token)
    most_decode = decode.block_m // kind.group
    fresh_rows: list[tuple[int, int]] = []
    long_rows: list[expanded.LongRow] = []
    has_decode, has_longer = True, inputs.max_query > most_decode
    all_fresh_from = inputs.num_tokens
    if inputs.host is not None:
        has_decode = has_longer = False
        start = 0
        lengths = zip(inputs.host.num_query_R.tolist(), inputs.host.context_R.tolist(), strict=True)
        for row, (length, before) in enumerate(lengths):
            is_fresh = before == 0 and length >= fresh_from
            is_long = before > 0 and length >= long_from
            if is_fresh:
                fresh_rows.append((start, length))
            elif is_long:
                long_rows.append(expanded.LongRow(row, start, length, before))
            has_decode |= length <= most_decode
            has_longer |= length > most_decode and not is_fresh and not is_long
            start += length
        elsewhere = [*fresh_rows, *((each.first, each.length) for each in long_rows)]
        all_fresh_from = _all_from(elsewhere, inputs.num_tokens)
    shared, covered_2R = None, None
    if inputs.shared is not None and kind.window is None and (has_decode or has_longer):
        shared, covered_2R = plan.plan_spans(inputs, kind, shape_for(SHARED, kind.group, token))
    rows: list[Plan] = []
    if has_decode:
        rows.append(plan.plan_rows(inputs, kind, decode, most_query=most_decode, covered_2R=covered_2R))
    if has_longer:
        longer = shape_for(PREFILL if inputs.num_tokens >= _LARGE_STEP else EXTEND, kind.group, token)
        rows.append(
            plan.plan_rows(
                inputs, kind, longer, least_query=most_decode + 1, most_query=long_from - 1, fresh_from=fresh_from,
                covered_2R=covered_2R,
            )
        )  # fmt: skip
    return _Prepared(rows, shared, fresh_rows, all_fresh_from, long_rows)


def _all_from(rows: list[tuple[int, int]], end: int) -> int:
    """The first token from which on, up to `end`, all belong to `rows`."""
    for first, length in sorted(rows, reverse=True):
        if first + length != end:
            break
        end = first
    return end


def _decode_shape(inputs: AttentionInputs, kind: Kind) -> Shape:
    if inputs.num_tokens <= _FEW:
        return FEW_DECODE
    device, num_rows = inputs.kv_len_R.device, inputs.kv_len_R.shape[0]
    many = num_rows * kind.num_kv_heads > DECODE.ctas_per_sm * num_sms(device)
    return MANY_DECODE if many and shared_bytes_per_sm(device) >= _MANY_BYTES else DECODE


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Of KV that a head reads of a token: K and V, widths rounded up to powers of two, or a latent."""

    num_bytes: int
    latent: bool = False


@cache
def shape_for(shape: Shape, group: int, token: TokenBytes) -> Shape:
    """The shape with tiles that hold at least one token of `group` heads, and KV blocks that fit into shared memory."""
    least_m = 1 << (group - 1).bit_length()
    block_m = max(shape.block_m, least_m)
    block_n = shape.block_n
    if token.latent:
        # A tile's queries and sums of 512 numbers must fit into registers, beside blocks of latents in shared memory.
        block_m = max(min(block_m, 32), least_m, 16)
        warps, stages = (8, 2) if block_m >= 32 else (4, 3)
        return replace(shape, block_m=block_m, block_n=32, num_warps=warps, num_stages=stages, ctas_per_sm=2)
    if token.num_bytes > 512:
        block_m = max(min(block_m, 64), least_m)
        block_n = max(16, 1 << (block_n * 512 // token.num_bytes).bit_length() - 1)
    return replace(shape, block_m=block_m, block_n=block_n)
