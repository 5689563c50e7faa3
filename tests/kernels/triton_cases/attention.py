"""Attention over pages: every kind of mask, rotation on the way, and the last layer's few rows."""

from dataclasses import fields, replace
from functools import partial

import torch
from random_trees import tree_mask
from torch import Tensor

from bough.core.kv import Window
from bough.kernels.attention import (
    reference as attention_reference,
    triton_backend as backend,
)
from bough.kernels.attention.inputs import (
    AttentionInputs,
    AttentionSpec,
    LastRows,
    TreeMask,
)
from bough.kernels.rotary import reference as rotary_reference
from triton_cases.bed import FLOAT8, Bed, Cases, close, each_member, same_twice
from triton_cases.layers import attention_inputs, layer_of, ragged, small_shapes, with_sinks


def attention_cases(bed: Bed) -> Cases:
    layers = (
        [
            layer_of(32, 8, 128),
            layer_of(28, 4, 128),
            layer_of(8, 8, 64),
            layer_of(16, 1, 256),
            layer_of(6, 2, 80, v_head_dim=48),
        ]
        if bed.large
        else [layer_of(4, 2, 16), layer_of(3, 1, 24, v_head_dim=8)]
    )
    kinds = ("plain", "window", "softcap", "both ways", "chunk", "sinks and slopes")
    for dtype, layer, kind in bed.cover(bed.dtypes, layers, (*kinds, "float8") if bed.large else kinds):
        page = bed.rng.choice((1, 16, 32, 64, 128) if bed.large else (1, 4, 16, 32))
        cache = FLOAT8 if kind == "float8" else dtype
        spec = {
            "plain": layer,
            "float8": layer,
            "window": replace(layer, window=bed.rng.randrange(5, 60)),
            "softcap": replace(layer, softcap=5.0),
            "both ways": replace(layer, causal=False),
            "chunk": replace(layer, chunk=bed.rng.randrange(5, 60)),
            "sinks and slopes": with_sinks(bed, layer),
        }[kind]
        name = f"attention {kind} {layer} page {page} {dtype} cache {cache}"
        yield name, partial(_attention, bed, spec, page, dtype, cache)
    for dtype in bed.dtypes:
        latents = (
            layer_of(16, 1, 576, v_head_dim=512, latent=True)
            if bed.large
            else layer_of(3, 1, 24, v_head_dim=16, latent=True)
        )
        yield f"attention {latents} {dtype}", partial(_attention, bed, latents, 32, dtype, dtype)
    for page, window in ((1, None), (16, 9), (64, None)):
        spec = layer_of(6, 2, 32, window=window)
        yield (
            f"attention of trees page {page}",
            partial(_attention, bed, spec, page, bed.dtypes[0], bed.dtypes[0], trees=True),
        )

    dtypes = (bed.dtypes[-1], bed.dtypes[0]) if bed.large else bed.dtypes[-1:]
    for bits, kind, dtype in bed.cover((8, 4), ("plain", "window", "chunk", "trees"), dtypes):
        layer = bed.rng.choice([layer_of(32, 8, 128), layer_of(6, 2, 80, v_head_dim=48)] if bed.large else layers)
        bound = {"window": 23} if kind == "window" else {"chunk": 23} if kind == "chunk" else {}
        page = bed.rng.choice((1, 16, 64) if bed.large else (1, 4, 16))
        run = partial(_attention, bed, replace(layer, **bound), page, dtype, dtype, trees=kind == "trees")
        yield f"attention {kind} {layer} page {page} {dtype} {bits} bits", partial(run, bits=bits)


def _attention(
    bed: Bed,
    spec: AttentionSpec,
    page: int,
    dtype: torch.dtype,
    cache: torch.dtype,
    *,
    trees: bool = False,
    bits: int = 0,
) -> None:
    with small_shapes(bed):
        rows = ragged(bed)
        inputs = attention_inputs(bed, rows, spec, page, cache, pad_rows=bed.rng.choice((0, 2)), bits=bits)
        tokens = inputs.num_tokens
        if trees:
            mask, _ = tree_mask(bed.rng, rows, tokens)
            inputs.tree = TreeMask(*(getattr(mask, each.name).to(bed.device) for each in fields(mask)))
        heads = (spec.num_heads, spec.num_kv_heads)
        q, k = bed.strided(tokens, heads, spec.head_dim, dtype)
        v = bed.normal(tokens, spec.num_kv_heads, spec.v_head_dim or spec.head_dim).to(cache).to(dtype)
        k = k.float().to(cache).to(dtype) if cache == FLOAT8 else k
        v = k[..., : spec.v_head_dim] if spec.latent else v
        runner = backend.TritonAttention(bed.device)
        runner.prepare(inputs)
        got = same_twice(lambda: runner.forward(spec, q, k, v))
        want = attention_reference.forward(spec, inputs, q, k, v)
        close(got, want, dtype)
        assert not got[sum(row[0] for row in rows) :].any(), "padding must be zero"
        if (spec.window or spec.chunk) and cache != FLOAT8:
            spoil_passed(inputs, rows, spec)
            close(runner.forward(spec, q, k, v), want, dtype)


def spoil_passed(inputs: AttentionInputs, rows: list[tuple[int, int]], spec: AttentionSpec) -> None:
    """Pages that lie before every window are other rows' by now, and hold what isn't a number."""
    bound = spec.chunk or spec.window or 0
    window = Window(bound, chunked=spec.chunk is not None)
    for slot, (_, context) in zip(inputs.slots_R.tolist(), rows, strict=False):
        for column in range(window.first_needed(context) // inputs.page_size):
            page = int(inputs.page_table[slot, column])
            for each in inputs.ranges[0] if inputs.ranges else (inputs.k_caches[0], inputs.v_caches[0]):
                each[page] = -1 if inputs.ranges else float("nan")  # ranges of these bits are no numbers


def rope_cases(bed: Bed) -> Cases:
    layers = [layer_of(32, 8, 128), layer_of(7, 7, 64)] if bed.large else [layer_of(4, 2, 16)]
    kinds = ("fresh last", "fresh alone", "anyhow", "half rotated")
    axes = (kinds, bed.dtypes, layers)
    for kind, dtype, spec in bed.cover(*axes) if bed.large else each_member(*axes):
        yield f"rope {spec} {kind} {dtype}", partial(_rope, bed, spec, kind, dtype)


def _rope(bed: Bed, spec: AttentionSpec, kind: str, dtype: torch.dtype) -> None:
    """Rotation, KV write and attention at once: rows without context may be rotated by another kernel than the rest."""
    with small_shapes(bed):
        rows = [] if kind == "fresh alone" else ragged(bed)
        long = [(bed.rng.randrange(64, 700) if bed.large else bed.rng.randrange(8, 30), 0) for _ in range(3)]
        rows += [long[0]] * 3 if kind == "fresh alone" and bed.rng.random() < 0.5 else long
        if kind == "anyhow":
            bed.rng.shuffle(rows)
        inputs = attention_inputs(bed, rows, spec, 16, dtype, pad_rows=0, pad_tokens=0)
        q, k, v = bed.strided(
            inputs.num_tokens, (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), spec.head_dim, dtype
        )
        positions = bed.ints([context + i for num, context in rows for i in range(num)], torch.int64)
        rotated = spec.head_dim // 2 if kind == "half rotated" else spec.head_dim
        angles = bed.normal(int(positions.max()) + 1, rotated // 2, scale=3.0)
        table = torch.cat((angles.cos(), angles.sin()), 1)
        runner = backend.TritonAttention(bed.device)

        def attend() -> Tensor:
            runner.prepare(inputs)
            return runner.forward_rope(spec, q, k, v, positions, table)

        got = same_twice(attend)
        turned = rotary_reference.apply_rope(q, k, positions, table)
        close(got, attention_reference.forward(spec, inputs, *turned, v), dtype)


def tail_cases(bed: Bed) -> Cases:
    layer = layer_of(32, 8, 128) if bed.large else layer_of(4, 2, 16)
    for dtype, spec in bed.cover(bed.dtypes, (layer, replace(layer, window=37))):
        yield f"tail {spec} {dtype}", partial(_tail, bed, spec, dtype)


def _tail(bed: Bed, spec: AttentionSpec, dtype: torch.dtype) -> None:
    """The last layer narrowed to some tokens gives their rows of the whole result."""
    with small_shapes(bed):
        rows = ragged(bed)
        inputs = attention_inputs(bed, rows, spec, bed.rng.choice((16, 64)), dtype, pad_rows=0, pad_tokens=0)
        tokens = inputs.num_tokens
        q, k, v = bed.strided(tokens, (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), spec.head_dim, dtype)
        at = bed.ints(sorted(bed.rng.sample(range(tokens), max(1, tokens // 4))), torch.int64)
        row_of = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([row[0] for row in rows])).to(bed.device)
        behind = inputs.query_start_R1[row_of + 1] - torch.arange(tokens, device=bed.device, dtype=torch.int32)
        positions = (inputs.kv_len_R[row_of] - behind).to(torch.int64)
        cos_sin = bed.normal(int(positions.max()) + 1, spec.head_dim)
        runner = backend.TritonAttention(bed.device)

        q_norm, k_norm = (
            (bed.normal(spec.head_dim).to(dtype) for _ in range(2)) if bed.rng.random() < 0.5 else (None, None)
        )

        def attend() -> Tensor:
            runner.prepare(inputs)
            queries_at = runner.queries_at(spec)
            queries = q if queries_at is None or bed.rng.random() < 0.5 else q[queries_at]
            return runner.forward_rope(spec, queries, k, v, positions, cos_sin, q_norm=q_norm, k_norm=k_norm)

        def attend_unrotated() -> Tensor:
            runner.prepare(inputs)
            return runner.forward(spec, q if inputs.tail is None else q[at], k, v)

        whole, unrotated = attend(), attend_unrotated()
        few = replace(
            inputs,
            query_start_R1=bed.ints(range(len(at) + 1)),
            kv_len_R=(positions[at] + 1).to(torch.int32),
            slots_R=inputs.slots_R[row_of[at]],
            loc_T=inputs.loc_T[at],
            max_query=1,
            host=None,
        )
        inputs.tail = LastRows(at, lambda: few)
        close(same_twice(attend), whole[at], dtype)
        close(same_twice(attend_unrotated), unrotated[at], dtype)
        earlier = replace(spec, layer=spec.layer - 1)
        runner.prepare(inputs)
        assert runner.queries_at(earlier) is None
