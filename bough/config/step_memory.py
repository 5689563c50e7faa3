"""Memory of steps, caches and weights on one rank: the inputs of the memory plan. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from bough.config.concerns import AUTO, Config, MediaConfig, SpeculativeConfig
from bough.config.kv_groups import KvPlan
from bough.config.layout import Layout
from bough.config.media_facts import TowerFacts
from bough.config.memory_plan import MIB, SMALL_STEP, PlanFacts
from bough.config.resolve_facts import MachineFacts, ModelPlanFacts
from bough.config.speculation import drafts_of_row, drafts_of_step
from bough.core.errors import ConfigError
from bough.core.kv import Grows, KvGroup, KvLayout

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
KV_CODE_BITS: Mapping[str, int] = {"int8": 8, "int4": 4}
"""Bits per value of an integer KV cache, by --kv-cache-dtype."""
_RANGE_BYTES = 4
"""Bytes of the scale and the minimum of one head's key or value in an integer KV cache."""
GRAPH_BYTES_PER_SIZE = 24 * MIB
"""Memory of a captured graph, beyond the buffers that all graphs share."""
SMALL_GRAPHS = 512
"""Tokens of the largest graph; for models whose steps are limited by kernel launches see `decisions.MOST_GRAPHS`."""
MOST_RUNNING: Mapping[str, int] = {"cuda": 1024, "cpu": 64}
"""Default maximum of running requests, by device: more would not be faster."""
SCORED_AT_ONCE: Mapping[str, int] = {"cuda": 512, "cpu": 128}
"""Prompt positions whose logits exist at the same time, by device."""
PENALISED_AT_ONCE = 1 << 22
"""Logits for which penalties are worked out at the same time."""
INDEX_PAIRS = 1 << 24
"""Scores of (query, token) pairs that exist at once where queries choose tokens."""
GATHERED_KEYS = 1 << 16
"""Maximum number of keys that attention in plain torch copies out of their pages at the same time, unless one row has
more."""
MOST_UNPACKED_EXPERTS = 2048 * MIB
"""Maximum size of a layer's gate and up matrices, of all experts and as 16-bit floats, that are dequantised together for
steps of many tokens (Hopper). gpt-oss-20b has 1,013 MiB, Qwen3-30B-A3B 768."""
ATTENTION_MASK_BYTES = 96 * MIB
"""Memory of the masks of attention in plain torch."""
MEDIA_BYTES: Mapping[str, int] = {"cuda": 512 * MIB, "cpu": 256 * MIB}
"""Memory of the embedding store, by device, unless the largest item needs more."""
MEDIA_BLOCK_ROWS = 16
"""Rows of the embedding store that are handed out together (`scheduler.media`)."""
STEP_PATCHES: Mapping[str, int] = {"cuda": 16_384, "cpu": 4096}
"""Tower tokens that a step computes of several items, by device."""
STATE_SHARE = 0.125
"""Default share of free memory for recurrent states and their snapshots."""


def state_bytes(model: ModelPlanFacts) -> int:
    """Bytes of one request's state, in float32."""
    return 4 * model.state_values


def states_bytes(model: ModelPlanFacts, rows: int, drafts: int) -> int:
    """Bytes of the states of all rows, of one initial state and one for padding, and of snapshots. With `drafts`, also
    the values kept per draft, and a copy of one layer's states on which drafts are tried."""
    if not model.state_values:
        return 0
    kept = 4 * drafts * (rows + 1) * model.draft_values + (4 * rows * model.state_layer_values if drafts else 0)
    return state_bytes(model) * (2 + rows + num_snapshots(rows)) + kept


def num_snapshots(rows: int) -> int:
    """Places for states beside those of rows: for each row one while it decodes, and one for its prompt."""
    return 2 * rows


def most_running(machine: MachineFacts, model: ModelPlanFacts) -> int:
    """Default maximum number of rows: limited by what speeds up the device, and by memory for their states."""
    most = MOST_RUNNING[machine.device]
    if model.state_values:
        each = state_bytes(model) * (1 + num_snapshots(1))
        most = max(1, min(most, int(STATE_SHARE * machine.free_bytes) // each))
    return most


def memory_facts(
    config: Config,
    machine: MachineFacts,
    model: ModelPlanFacts,
    *,
    dtype: str,
    kv_dtype: str,
    page_size: int,
    chunk: int,
    unwatched: int,
    captured: int,
    packed: bool,
    backend: str,
    table: bool,
) -> PlanFacts:
    """The memory plan's inputs for one rank. `captured`: tokens of the largest graph, 0 without graphs."""
    layout = Layout.of(config.parallel)
    ranks = config.parallel.tp_size
    context = config.model.context_length
    if context is not AUTO and context > model.context_length:
        raise ConfigError(
            what=f"a context of {context:,} tokens was asked for, the model allows {model.context_length:,}",
            why="it was not trained on longer positions",
            fix=f"""use --context-length {model.context_length}, or override the model's limit with """
            f"""--json-model-override-args '{{"max_position_embeddings": {context}}}'""",
            param="context_length",
        )
    longest = model.context_length if context is AUTO else context
    draft_kv_dtype = config.speculative.speculative_draft_kv_cache_dtype
    running = config.scheduler.max_running_requests
    rows = most_running(machine, model) if running is AUTO else running
    step_tokens, small_step = largest_step(chunk, unwatched, longest, rows), largest_step(SMALL_STEP, 0, longest, rows)
    if model.kv is not None:
        kv = model.kv(page_size, longest)
    else:
        kv_heads = -(-model.num_kv_heads // ranks)
        kv = KvPlan((KvGroup(Grows()),), model.kv_values_per_token * kv_heads // max(1, model.num_kv_heads))
    if kv_dtype in KV_CODE_BITS or draft_kv_dtype in KV_CODE_BITS:
        check_codes(kv, kv_dtype, model, shares_context=layout.cp > 1, draft=draft_kv_dtype)
    share = 1 / ranks if model.weight_share is None else model.weight_share
    packed_bytes = model.packed_bytes if packed else 0
    dense = model.dense_params if packed else model.dense_params + model.packed_params
    if table:
        dense += model.vocab_size * model.attention_width
    fraction = config.device.mem_fraction_static
    total = config.cache.max_total_tokens
    gathers = longest if backend == "torch" or layout.cp > 1 else 0

    drafts = drafts_of_step(config.speculative, machine.device, rows)
    unpacked = 0
    if packed_bytes and machine.device == "cuda":  # with many tokens, one weight at a time is dequantised
        unpacked = max(2 * model.ffn_size, model.attention_width) * model.hidden_size * ITEM_BYTES[dtype] // ranks
        experts = model.expert_values * ITEM_BYTES[dtype] // ranks
        unpacked = max(unpacked, experts if experts <= MOST_UNPACKED_EXPERTS else 0)

    kept_bytes, tower_bytes = 0, 0
    if model.tower is not None:
        kept_bytes = media_bytes(config.media, machine, model.tower, longest, dtype)
        tower_bytes = tower_activations(config.media, machine, model.tower, longest, dtype)

    def activations(tokens: int) -> int:
        layers = unpacked + activation_bytes(
            model, machine.device, tokens, rows, ITEM_BYTES[dtype], layout.heads,
            gathers=gathers, drafts=drafts, owners=layout.dp * layout.cp,
        )  # fmt: skip
        layers += rule_bytes(config.speculative, model.vocab_size, rows, min(rows + drafts, tokens))
        return max(layers, tower_bytes)

    return PlanFacts(
        model=model.name,
        device=machine.device,
        total_bytes=machine.total_bytes,
        free_bytes=machine.free_bytes,
        weight_bytes=math.ceil((packed_bytes + dense * ITEM_BYTES[dtype]) * share) + 4 * model.table_values * longest,
        kv_bytes_per_token=kv_bytes(kv, kv_dtype, draft_kv_dtype) * KvLayout(kv.groups, page_size).column_pages,
        groups=kv.groups,
        kv_note=kv.because,
        activation_bytes=activations(step_tokens),
        small_activation_bytes=activations(small_step),
        step_tokens=step_tokens,
        small_step_tokens=small_step,
        graph_bytes=graph_bytes(captured) if captured else 0,
        media_bytes=kept_bytes,
        state_bytes=states_bytes(model, rows, drafts_of_row(config.speculative)),
        page_size=page_size * layout.cp,
        model_context=model.context_length,
        context_length=None if context is AUTO else context,
        max_total_tokens=None if total is AUTO else total,
        mem_fraction=None if fraction is AUTO else fraction,
        kv_item_bytes=ITEM_BYTES.get(kv_dtype, 1),
        weight_dtype=dtype,
        tp_size=ranks,
        num_devices=machine.num_devices,
        host_free_bytes=machine.host_free_bytes,
    )


def kv_bytes(kv: KvPlan, kv_dtype: str, draft_kv_dtype: str = "auto") -> int:
    """Bytes per token of a column, in one line. `draft_kv_dtype`: type of the draft model's KV, if it differs."""
    bits = KV_CODE_BITS.get(kv_dtype)
    if bits is not None:
        return kv.values_per_token * bits // 8 + kv.vectors_per_token * _RANGE_BYTES
    drafted = kv.draft_values * ITEM_BYTES[kv_dtype if draft_kv_dtype == "auto" else draft_kv_dtype]
    return (kv.values_per_token - kv.draft_values) * ITEM_BYTES[kv_dtype] + drafted


def check_codes(kv: KvPlan, kv_dtype: str, model: ModelPlanFacts, *, shares_context: bool, draft: str) -> None:
    """Raises ConfigError if the model's KV cache can't be quantized to integers. `draft`: the draft model's type."""
    because = model.no_kv_codes
    if draft not in ("auto", kv_dtype):
        because = f"what drafts would keep them as {draft} beside {kv_dtype}: both, or neither, are in whole numbers"
    elif shares_context:
        because = "ranks that share the tokens of each sequence (--attn-cp-size) exchange floats"
    elif not because and not kv.even_vectors:
        because = (
            "layers with windows have heads of another width than others, and the scales of a page differ in number"
        )
    if because:
        raise ConfigError(
            what=f"keys and values of {model.name or 'this model'} can't be kept as {kv_dtype}",
            why=because,
            fix="use --kv-cache-dtype fp8_e4m3, or leave it out",
            param="kv_cache_dtype",
        )


def check_scales(config: Config, kv_dtype: str) -> None:
    """Raises ConfigError if scales of keys and values are given or asked for, and nothing would use them."""
    given = {
        "calculate_kv_scales": config.model.calculate_kv_scales,
        "quantization_param_path": bool(config.model.quantization_param_path),
    }
    for name in (name for name, is_given in given.items() if is_given and not kv_dtype.startswith("fp8")):
        raise ConfigError(
            what=f"--{name.replace('_', '-')} with keys and values in {kv_dtype}",
            why="only FP8 has a scale for each layer; int8 and int4 find one for every token and head",
            fix="add --kv-cache-dtype fp8_e4m3, or leave it out",
            param=name,
        )


def media_bytes(media: MediaConfig, machine: MachineFacts, tower: TowerFacts, context: int, dtype: str) -> int:
    """Bytes of the embedding store: those asked for, or the default and at least the largest item that fits a context."""
    row_bytes = tower.width * ITEM_BYTES[dtype]
    if media.mm_cache_size is not AUTO:
        wanted = media.mm_cache_size
    else:
        wanted = max(MEDIA_BYTES[machine.device], min(tower.max_positions, context) * row_bytes)
    blocks = max(1, -(-wanted // (row_bytes * MEDIA_BLOCK_ROWS)))
    return blocks * MEDIA_BLOCK_ROWS * row_bytes


def media_rows(num_bytes: int, tower: TowerFacts, dtype: str) -> int:
    """Number of positions that an embedding store of this size holds."""
    return num_bytes // (tower.width * ITEM_BYTES[dtype])


def tower_activations(media: MediaConfig, machine: MachineFacts, tower: TowerFacts, context: int, dtype: str) -> int:
    """Peak memory of the media encoder, for the largest item or the maximum per step."""
    patches = media.mm_encoder_step_tokens
    step = STEP_PATCHES[machine.device] if patches is AUTO else patches
    largest = min(tower.max_positions, context) * tower.tokens_per_position
    return max(step, largest) * tower.values_per_token * ITEM_BYTES[dtype]


def largest_step(chunk: int, unwatched: int, context: int, rows: int) -> int:
    """Tokens of a step: of prompts `chunk` (-1: a whole context) or `unwatched`, and of rows that decode beside them, while
    they are few against those; or those of all rows alone."""
    prompts = context if chunk < 0 else min(max(chunk, unwatched), context * rows)
    return max(rows, prompts + min(rows, prompts // 8))


def activation_bytes(
    model: ModelPlanFacts,
    device: Literal["cpu", "cuda"],
    step_tokens: int,
    rows: int,
    item_bytes: int,
    ranks: int,
    *,
    gathers: int = 0,
    drafts: int = 0,
    owners: int = 1,
) -> int:
    """Peak of any step: a layer's buffers for all its tokens beside logits with the sampler's copies; or the logits beside
    what penalties take; or the logits beside those of a prompt that is scored.

    `gathers`: longest context, where attention copies keys and values out of their pages. `drafts`: logits beyond one a row.
    `owners`: groups of `ranks` ranks with tokens of their own, which feed-forward blocks gather.
    """
    streams = 4 + (2 * owners if owners > 1 else 0)
    per_token = streams * model.hidden_size + (2 * model.attention_width + 3 * model.ffn_size) // ranks
    layer = step_tokens * (per_token + model.tapped_values) * item_bytes
    if gathers:
        keys = max(gathers, GATHERED_KEYS)
        layer += ATTENTION_MASK_BYTES + 2 * keys * (model.attention_width // ranks) * item_bytes
    if model.topk:
        layer += 4 * step_tokens * model.topk + 3 * 4 * INDEX_PAIRS
    hidden = 2 * step_tokens * model.hidden_size * item_bytes
    sampled = model.vocab_size * min(rows + drafts, step_tokens)
    copies = 4 * 4 * sampled
    penalties = 5 * model.vocab_size * rows + 36 * min(sampled, PENALISED_AT_ONCE)
    scores = 12 * model.vocab_size * min(SCORED_AT_ONCE[device], step_tokens) + 4 * sampled
    return max(layer + copies, hidden + copies + penalties, hidden + scores)


def rule_bytes(asked: SpeculativeConfig, vocab: int, rows: int, samples: int) -> int:
    """Memory of acceptance rules for drafts: draft probabilities per request, and those of a step's samples."""
    if asked.speculative_use_rejection_sampling or asked.speculative_use_block_verification:
        return 4 * vocab * (rows * drafts_of_row(asked) + 4 * samples)
    loose = min(asked.speculative_accept_threshold_single, asked.speculative_accept_threshold_acc) < 1
    return 4 * vocab * samples if loose else 0


def graph_bytes(max_tokens: int) -> int:
    """Upper bound for the graphs of all sizes up to `max_tokens`: sizes grow by doubling, then in steps."""
    sizes = max_tokens.bit_length() + min(max_tokens, SMALL_GRAPHS) // 64 + max(0, max_tokens - SMALL_GRAPHS) // 128
    return 2 * sizes * GRAPH_BYTES_PER_SIZE
