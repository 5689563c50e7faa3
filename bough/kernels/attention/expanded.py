"""Rows with many queries over latents: keys and values of each head are made of the latents, then attended to.

Rows without context attend to what the step itself made; others have their latents gathered from their pages, a piece at a
time, so that memory is bounded however long the context is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bough.kernels.attention import fresh, latent
from bough.kernels.attention.inputs import AttentionInputs, LatentMaps, Spec
from bough.kernels.choices import facts_of

FRESH_FROM = 64
"""Queries of the shortest row without context that is attended to here..."""
LONG_FROM = 256
"""...and of one with a context: its latents are gathered and multiplied once more, and a query saves 3.4 times."""
PIECE = 8192
"""KV tokens of a row whose keys and values are in memory at once."""
CUDNN_FROM = 1024
"""Queries of the shortest row for which the vendor's kernel is called by itself: it needs keys with their rotated part."""


Places = dict[int, Tensor]
"""By row: where its tokens lie in pages."""


class LongRow(NamedTuple):
    """A row with a context, by its number, its first token and its lengths."""

    row: int
    first: int
    length: int
    before: int
    """KV tokens before the step, at most."""


def attend(
    spec: Spec,
    inputs: AttentionInputs,
    maps: LatentMaps,
    q_TNH: Tensor,
    kv_TX: Tensor,
    fresh_rows: list[tuple[int, int]],
    long_rows: list[LongRow],
    k_scale: float,
    out_TNV: Tensor,
    places: Places,
) -> None:
    """Fills `out_TNV` for the given rows. Queries are rotated; `kv_TX` is what the step's tokens left in the pages, as it
    is read from there. `places`: what layers with the same pages have worked out."""
    rank = spec.v_head_dim
    assert rank is not None, "a layer with latents has one"
    if fresh_rows:
        _attend_fresh(spec, inputs, maps, q_TNH, kv_TX, fresh_rows, rank, out_TNV)
    for each in long_rows:
        _attend_long(spec, inputs, maps, q_TNH, each, rank, out_TNV, k_scale, places)


def _attend_fresh(
    spec: Spec,
    inputs: AttentionInputs,
    maps: LatentMaps,
    q_TNH: Tensor,
    kv_TX: Tensor,
    rows: list[tuple[int, int]],
    rank: int,
    out_TNV: Tensor,
) -> None:
    first = min(row[0] for row in rows)
    k_SNC, v_SNV = maps.expand(kv_TX[first:, :rank])
    longest = max(length for _, length in rows)
    by_vendor = [row for row in rows if row[1] >= CUDNN_FROM] if _has_cudnn(q_TNH) else []
    if by_vendor:
        rotated_SNE = kv_TX[first:, None, rank:].expand(-1, k_SNC.shape[1], -1)
        k_SNH = torch.cat((k_SNC, rotated_SNE), 2)
        moved = [(start - first, length) for start, length in by_vendor]
        fresh.attend_fresh(q_TNH[first:], k_SNH, v_SNV, moved, spec.scale, out_TNV[first:], hopper=False)
        longest = max((length for _, length in rows if length < CUDNN_FROM), default=0)
    if longest:
        latent.attend_expanded(
            q_TNH[first:],
            k_SNC,
            kv_TX[first:, rank:],
            v_SNV,
            inputs.query_start_R1,
            inputs.kv_len_R,
            out_TNV[first:],
            scale=spec.scale,
            most_query=longest,
            rows=inputs.num_rows,
            offset=first,
            fresh_from=FRESH_FROM,
        )


def _attend_long(
    spec: Spec,
    inputs: AttentionInputs,
    maps: LatentMaps,
    q_TNH: Tensor,
    each: LongRow,
    rank: int,
    out_TNV: Tensor,
    k_scale: float,
    places: Places,
) -> None:
    total = each.before + each.length
    if each.row not in places:
        places[each.row] = _locations(inputs, each.row, total)
    cache = inputs.k_caches[spec.layer].flatten(0, 2)
    mine = slice(each.first, each.first + each.length)
    in_parts = total > PIECE
    out, lse = out_TNV, None
    if in_parts:
        out = torch.empty((each.length, *out_TNV.shape[1:]), dtype=torch.float32, device=q_TNH.device)
        lse = torch.empty((each.length, q_TNH.shape[1]), dtype=torch.float32, device=q_TNH.device)
    for first_key in range(0, total, PIECE):
        kv_SX = _rows_of(cache, places[each.row][first_key : first_key + PIECE])
        if kv_SX.dtype != q_TNH.dtype:
            kv_SX = (kv_SX.float() * k_scale).to(q_TNH.dtype)
        k_SNC, v_SNV = maps.expand(kv_SX[:, :rank])
        latent.attend_expanded(
            q_TNH, k_SNC, kv_SX[:, rank:], v_SNV, inputs.query_start_R1, inputs.kv_len_R, out,
            scale=spec.scale, most_query=each.length, row=each.row, first_key=first_key, partial_lse=lse,
        )  # fmt: skip
    if in_parts:
        out_TNV[mine] = out.to(out_TNV.dtype)


def _locations(inputs: AttentionInputs, row: int, num_tokens: int) -> Tensor:
    """int64 [S]: where the first tokens of a row lie in its pages; of those that it has no pages for, anywhere."""
    pages = inputs.page_table.index_select(0, inputs.slots_R[row : row + 1]).squeeze(0)
    at_S = torch.arange(num_tokens, device=pages.device)
    column_S = (at_S // inputs.page_size).clamp(max=len(pages) - 1)
    return pages[column_S].long() * inputs.page_size + at_S % inputs.page_size


def _rows_of(cache_LX: Tensor, at_S: Tensor) -> Tensor:
    """Rows of a cache; as bytes where its dtype has no kernel for that."""
    if cache_LX.dtype.itemsize > 1:
        return cache_LX.index_select(0, at_S)
    return cache_LX.view(torch.uint8).index_select(0, at_S).view(cache_LX.dtype)


def _has_cudnn(q_TNH: Tensor) -> bool:
    """Whether the vendor's kernel takes keys and values of different widths here."""
    facts = facts_of(q_TNH.device.type, q_TNH.device.index)
    return (
        facts.device_type == "cuda"
        and facts.capability[0] == 9
        and torch.version.hip is None
        and q_TNH.dtype in (torch.bfloat16, torch.float16)
        and q_TNH.shape[2] % 8 == 0
        and q_TNH.shape[2] <= 256
    )
