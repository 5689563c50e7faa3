"""Attention over latents, of all tokens and of chosen ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial

import numpy as np
import torch
from random_trees import tree_mask
from torch import Tensor

from bough.kernels.attention import (
    expanded,
    reference as attention_reference,
    triton_backend as backend,
)
from bough.kernels.attention.inputs import (
    AttentionInputs,
    AttentionSpec,
    IndexKeys,
    IndexQueries,
    LastRows,
    RawLatents,
    TreeMask,
)
from bough.kernels.norm import reference as norm_reference
from bough.kernels.rotary import reference as rotary_reference
from triton_cases.bed import FLOAT8, Bed, Cases, close, same_twice
from triton_cases.layers import attention_inputs, layer_of, ragged, small_shapes


def latent_cases(bed: Bed) -> Cases:
    caches = (None, FLOAT8) if bed.large else (None,)
    kinds = ("rows", "few queries", "tail")
    for dtype, cache, interleaved, kind in bed.cover(bed.dtypes, caches, (False, True), kinds):
        name = f"latents {dtype} cache {cache} interleaved {interleaved} {kind}"
        yield name, partial(_latents, bed, dtype, cache or dtype, interleaved=interleaved, kind=kind)


def sparse_cases(bed: Bed) -> Cases:
    kinds = ("rows", "trees", "tail", "tail of an earlier choice")
    for dtype, page, kind in bed.cover(bed.dtypes, (1, 16, 64) if bed.large else (1, 4), kinds):
        yield f"sparse {kind} page {page} {dtype}", partial(_sparse, bed, dtype, page, kind)


def _sparse(bed: Bed, dtype: torch.dtype, page: int, kind: str) -> None:
    """Queries that read chosen tokens, against choosing them one by one. Scores are small whole numbers: many are equal."""
    heads, rank, rotated, nope, v_dim = (16, 512, 64, 128, 128) if bed.large else (3, 16, 8, 12, 10)
    index_heads, width, topk = (64, 128, 256) if bed.large else (3, 12, 7)
    spec = layer_of(
        heads, 1, rank + rotated, v_head_dim=rank, latent=True, topk=topk, index=IndexKeys(width, interleaved=False)
    )
    rows = [*ragged(bed), (3, 4 * topk), (2, 0)]
    with small_shapes(bed), thresholds(bed):
        pads = bed.rng.choice((0, 2)) if not kind.startswith("tail") else 0
        inputs = attention_inputs(bed, rows, spec, page, dtype, pad_rows=pads)
        inputs.index_caches = [bed.whole(*inputs.k_caches[0].shape[:2], 1, width).to(dtype)]
        inputs.max_kv = max(inputs.max_kv, topk + 1)
        tokens = inputs.num_tokens
        if kind == "trees":
            mask, _ = tree_mask(bed.rng, rows, tokens)
            inputs.tree = TreeMask(*(getattr(mask, each.name).to(bed.device) for each in fields(mask)))
        q = bed.normal(tokens, heads, nope + rotated, dtype=dtype)
        kv = bed.normal(tokens, rank + rotated, dtype=dtype)
        norm_weight = bed.normal(rank, dtype=dtype)
        positions = bed.ints([bed.rng.randrange(50) for _ in range(tokens)], torch.int64)
        cos_sin = bed.normal(50, rotated)
        maps = Maps(bed.normal(heads, nope + v_dim, rank, dtype=dtype, scale=rank**-0.5), v_dim)
        index = IndexQueries(
            bed.whole(tokens, index_heads, width).to(dtype),
            bed.whole(tokens, index_heads),
            bed.whole(tokens, width).to(dtype),
        )
        at = bed.ints(sorted(bed.rng.sample(range(sum(row[0] for row in rows)), 2)), torch.int64)
        narrowed = replace(spec, layer=1) if kind == "tail of an earlier choice" else spec
        inputs.k_caches, inputs.v_caches = [*inputs.k_caches] * 2, [*inputs.v_caches] * 2
        inputs.index_caches = [*inputs.index_caches, None]
        if kind.startswith("tail"):
            few = rows_of_tokens(bed, inputs, rows, at)
            inputs.tail = LastRows(at, lambda: few, narrowed.layer)
        runner = backend.TritonAttention(bed.device)

        def attend() -> Tensor:
            runner.prepare(inputs)
            runner.choose(spec, index)
            raw = RawLatents(q.clone(), kv, norm_weight, 1e-5, 0.0, positions, cos_sin, False)
            return runner.forward_latent(narrowed, raw, maps)

        got = same_twice(attend)
        there = inputs.loc_T >= 0
        assert torch.equal(inputs.index_caches[0].flatten(0, 2)[inputs.loc_T[there]], index.k_TD[there])
        turned = rotary_reference.apply_rope(q[..., nope:].contiguous(), q[:, :0, nope:], positions, cos_sin)[0]
        absorbed = q.new_empty((tokens, heads, rank))
        maps.absorb(q[..., :nope], absorbed)
        read = read_chosen(spec, inputs, index, torch.cat((absorbed, turned), 2))
        want = q.new_empty((tokens, heads, v_dim))
        maps.values(read, want)
        close(got, want.flatten(1)[at] if kind.startswith("tail") else want.flatten(1), dtype)


def read_chosen(spec: AttentionSpec, inputs: AttentionInputs, index: IndexQueries, q_TNH: Tensor) -> Tensor:
    """[T, N, V]: of each query what it reads of the best tokens of its row, all of which are in the pages."""
    out = torch.zeros(len(q_TNH), spec.num_heads, spec.v_width, dtype=q_TNH.dtype, device=q_TNH.device)
    starts, lengths = inputs.query_start_R1.tolist(), inputs.kv_len_R.tolist()
    cache = inputs.index_caches[0]
    assert cache is not None
    for row, num_kv in enumerate(lengths):
        pages = inputs.page_table[int(inputs.slots_R[row])]
        keys = attention_reference.gather(cache, pages, num_kv).squeeze(1)
        latents = attention_reference.gather(inputs.k_caches[0], pages, num_kv)
        for token in range(starts[row], starts[row + 1] if num_kv else starts[row]):
            seen = torch.arange(num_kv, device=keys.device) <= num_kv - (starts[row + 1] - token)
            if inputs.tree is not None:
                tree = inputs.tree
                seen = attention_reference.sees(
                    tree.seen_T[token], tree.tail_T[token], torch.arange(num_kv).to(keys.device)
                )
            scores = ((index.q_TID[token].float() @ keys.T).relu() * index.weights_TI[token][:, None]).sum(0)
            readable = seen.nonzero().squeeze(1)
            ranked = readable[scores[readable].argsort(stable=True)]  # of equal ones the later stand behind
            chosen = latents[ranked[-spec.topk :].sort().values]
            read = attention_reference.attend_row(
                q_TNH[token : token + 1], chosen, chosen[..., : spec.v_width], scale=spec.scale, causal=False
            )
            out[token] = read[0].to(out.dtype)
    return out


def rows_of_tokens(bed: Bed, inputs: AttentionInputs, rows: list[tuple[int, int]], at: Tensor) -> AttentionInputs:
    """Some tokens of a step, as rows of one query each."""
    ends = np.cumsum([row[0] for row in rows])
    owner = [int(np.searchsorted(ends, int(each), side="right")) for each in at]
    lengths = [sum(rows[row]) - int(ends[row]) + int(each) + 1 for row, each in zip(owner, at, strict=True)]
    return replace(
        inputs, query_start_R1=bed.ints(range(len(at) + 1)), kv_len_R=bed.ints(lengths), slots_R=inputs.slots_R[owner],
        loc_T=bed.ints([0] * len(at), torch.int64), max_query=1, host=None,
    )  # fmt: skip


class Maps:
    """Makes keys and values of latents by one matrix a head."""

    def __init__(self, weight_NXR: Tensor, v_dim: int) -> None:
        self.weight = weight_NXR
        self.v_dim = v_dim

    def absorb(self, q_TNC: Tensor, out_TNR: Tensor) -> None:
        weight = self.weight[:, : -self.v_dim].float()
        out_TNR.copy_(torch.einsum("tnc,ncr->tnr", q_TNC.float(), weight))

    def values(self, read_TNR: Tensor, out_TNV: Tensor) -> None:
        weight = self.weight[:, -self.v_dim :].float()
        out_TNV.copy_(torch.einsum("tnr,nvr->tnv", read_TNR.float(), weight))

    def expand(self, latents_SR: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.einsum("sr,nxr->snx", latents_SR.float(), self.weight.float()).to(latents_SR.dtype)
        return both[..., : -self.v_dim], both[..., -self.v_dim :]


def _latents(bed: Bed, dtype: torch.dtype, cache: torch.dtype, *, interleaved: bool, kind: str) -> None:
    """Rows that read latents as they are and rows that have keys and values made of them, against the former alone. With
    "few queries" there are none of the latter."""
    tail = kind == "tail"
    heads, rank, rotated, nope, v_dim = (16, 512, 64, 128, 128) if bed.large else (3, 16, 8, 12, 10)
    spec = layer_of(heads, 1, rank + rotated, v_head_dim=rank, latent=True)
    rows = ragged(bed)
    rows += [(1500, 0), (300, 2500), (70, 0), (1, 3), (2100, 700)] if bed.large else [(40, 0), (30, 45), (1, 3)]
    if kind == "few queries":
        count = bed.rng.choice((1, 14, 60, 150)) if bed.large else bed.rng.choice((1, 20, 70))
        rows = [(bed.rng.choice((1, 1, 2)), bed.rng.randrange(3000 if bed.large else 40)) for _ in range(count)]
    bed.rng.shuffle(rows)
    with small_shapes(bed), thresholds(bed):
        inputs = attention_inputs(bed, rows, spec, 32 if bed.large else 4, cache, pad_rows=bed.rng.choice((0, 0, 2)))
        tokens = inputs.num_tokens
        q = bed.normal(tokens, heads, nope + rotated, dtype=dtype)
        kv = bed.normal(tokens, rank + rotated, dtype=dtype)
        norm_weight = bed.normal(rank, dtype=dtype)
        positions = bed.ints([bed.rng.randrange(50) for _ in range(tokens)], torch.int64)
        cos_sin = bed.normal(50, rotated)
        maps = Maps(bed.normal(heads, nope + v_dim, rank, dtype=dtype, scale=rank**-0.5), v_dim)

        latent = norm_reference.rms_norm(kv[:, :rank], norm_weight, 1e-5)
        turned, k = rotary_reference.apply_rope(
            q[..., nope:].contiguous(), kv[:, None, rank:].contiguous(), positions, cos_sin, interleaved=interleaved
        )
        key = torch.cat((latent[:, None], k), 2)
        absorbed = q.new_empty((tokens, heads, rank))
        maps.absorb(q[..., :nope], absorbed)
        read = attention_reference.forward(spec, inputs, torch.cat((absorbed, turned), 2), key, key[..., :rank])
        want = q.new_empty((tokens, heads, v_dim))
        maps.values(read.view(tokens, heads, rank), want)
        written = inputs.k_caches[0].clone()
        inputs.k_caches[0].flatten(0, 2)[inputs.loc_T[inputs.loc_T >= 0]] = 0.0

        runner = backend.TritonAttention(bed.device)
        at = bed.ints(sorted(bed.rng.sample(range(sum(row[0] for row in rows)), 2 if tail else 1)), torch.int64)
        if tail:
            few = rows_of_tokens(bed, inputs, rows, at)
            inputs.tail = LastRows(at, lambda: few)

        def attend() -> Tensor:
            runner.prepare(inputs)
            raw = RawLatents(q.clone(), kv, norm_weight, 1e-5, 0.0, positions, cos_sin, interleaved)
            return runner.forward_latent(spec, raw, maps)

        got = same_twice(attend)
        close(got, want.flatten(1)[at] if tail else want.flatten(1), dtype)
        close(inputs.k_caches[0].float(), written.float(), dtype)


@contextmanager
def thresholds(bed: Bed) -> Iterator[None]:
    """Bounds from which keys and values are made of latents, so that small inputs have such rows too."""
    chosen = {"PIECE": 1024} if bed.large else {"FRESH_FROM": 5, "LONG_FROM": 6, "PIECE": 16}
    before = {name: vars(expanded)[name] for name in chosen}
    try:
        for name, value in chosen.items():
            setattr(expanded, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(expanded, name, value)
