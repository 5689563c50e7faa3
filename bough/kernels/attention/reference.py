"""What the attention kernels compute: row by row, in float32, gathering each row's pages."""

from __future__ import annotations

import torch
from torch import Tensor

from bough.kernels.attention.inputs import AttentionInputs, Spec
from bough.kernels.kv_codes import decode
from bough.kernels.rotary.reference import write_kv


def gather(cache: Tensor, pages: Tensor, num_tokens: int, scale: float = 1.0) -> Tensor:
    """float32 [num_tokens, K, H]: the first tokens held by `pages` in order."""
    return _first(cache, pages, num_tokens).float() * scale


def gather_row(inputs: AttentionInputs, spec: Spec, pages: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """float32 keys and values of the first tokens held by `pages`."""
    caches, ranges = (inputs.k_caches[spec.layer], inputs.v_caches[spec.layer]), inputs.ranges_of(spec.layer)
    if ranges is not None:
        codes = [_first(cache, pages, num_tokens) for cache in caches]
        keys, values = (_first(each, pages, num_tokens) for each in ranges)
        return decode(codes[0], keys, spec.head_dim), decode(codes[1], values, spec.v_width)
    k_scale, v_scale = inputs.scales(spec.layer)
    return gather(caches[0], pages, num_tokens, k_scale), gather(caches[1], pages, num_tokens, v_scale)


def _first(cache: Tensor, pages: Tensor, num_tokens: int) -> Tensor:
    return cache[pages[: -(-num_tokens // cache.shape[1])].long()].flatten(0, 1)[:num_tokens]


def attend_row(
    q_QNH: Tensor,
    k_SKH: Tensor,
    v_SKV: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    chunk: int | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    tree: tuple[Tensor, Tensor, Tensor] | None = None,
    gaps_Q2: Tensor | None = None,
) -> Tensor:
    """float32 [Q, N, V]: queries that are the last Q of S tokens. `tree`: what `TreeMask` has of each query."""
    num_query, num_heads, _ = q_QNH.shape
    num_kv, kv_heads, _ = k_SKH.shape
    k = k_SKH.float().repeat_interleave(num_heads // kv_heads, 1)
    v = v_SKV.float().repeat_interleave(num_heads // kv_heads, 1)
    scores = torch.einsum("qnh,snh->nqs", q_QNH.float(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(num_kv - num_query, num_kv, device=q_QNH.device).unsqueeze(1)
    key = torch.arange(num_kv, device=q_QNH.device).unsqueeze(0)
    seen = torch.ones(num_query, num_kv, dtype=torch.bool, device=q_QNH.device)
    if tree is not None:
        seen = sees(tree[0].unsqueeze(1), tree[1].unsqueeze(1), key)
        at = tree[2].unsqueeze(1)
    elif causal:
        seen &= key <= at
    if window is not None:
        seen &= key > at - window
    if chunk is not None:
        seen &= key >= at // chunk * chunk
    if gaps_Q2 is not None:
        seen &= (key < gaps_Q2[:, :1]) | (key >= gaps_Q2[:, 1:])
    if slopes is not None:
        scores = scores + slopes.float().view(-1, 1, 1) * key
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        beside = sinks.float().view(-1, 1, 1).expand(-1, num_query, 1)
        scores = torch.cat((scores, beside), -1)
    return torch.einsum("nqs,snv->qnv", scores.softmax(-1)[..., :num_kv], v)


def sees(seen: Tensor, tail: Tensor, key: Tensor) -> Tensor:
    """Which keys queries see by their bits and tails, all three to be broadcast."""
    place = key - tail
    return (place < 0) | ((place < 64) & ((seen >> place.clamp(0, 63)) & 1).bool())


def paged_attention(q_TNH: Tensor, inputs: AttentionInputs, spec: Spec) -> Tensor:
    """[T, N, V] over KV that is already in the pages."""
    inputs = inputs.of_layer(spec.layer)
    out = torch.zeros(q_TNH.shape[0], spec.num_heads, spec.v_width, dtype=q_TNH.dtype, device=q_TNH.device)
    tree = inputs.tree
    starts, lengths, slots = inputs.query_start_R1.tolist(), inputs.kv_len_R.tolist(), inputs.slots_R.tolist()
    for row, num_kv in enumerate(lengths):
        begin, end = starts[row], starts[row + 1]
        if end == begin or num_kv == 0:
            continue
        keys, values = gather_row(inputs, spec, inputs.page_table[slots[row]], num_kv)
        out[begin:end] = attend_row(
            q_TNH[begin:end],
            keys,
            values,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            causal=spec.causal,
            chunk=spec.chunk,
            sinks=spec.sinks,
            slopes=spec.slopes,
            tree=None
            if tree is None
            else (tree.seen_T[begin:end], tree.tail_T[begin:end], tree.positions_T[begin:end]),
            gaps_Q2=None if inputs.gaps_T2 is None else inputs.gaps_T2[begin:end],
        ).to(out.dtype)
    return out


def forward(spec: Spec, inputs: AttentionInputs, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor) -> Tensor:
    """Writes k and v to their pages, then attends: [T, N * V]. Shared spans change nothing here: they lie in every row."""
    k_scale, v_scale = inputs.scales(spec.layer)
    caches = inputs.k_caches[spec.layer], inputs.v_caches[spec.layer]
    ranges, loc_T = inputs.ranges_of(spec.layer), inputs.of_layer(spec.layer).loc_T
    write_kv(k_TKH, v_TKV, *caches, loc_T, k_scale=k_scale, v_scale=v_scale, ranges=ranges)
    return paged_attention(q_TNH, inputs, spec).flatten(1)
