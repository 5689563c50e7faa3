"""What ranks hold, in bytes of float32, compared with what is planned for each of them: it has to be less than all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bough.config.hf import open_checkpoint
from bough.config.kv_groups import plan_groups
from bough.config.layout import Layout
from bough.config.model_facts import ModelFacts
from bough.config.shares import rank_kv_values, rank_parameters, rank_state_values
from bough.engine.held import RankMemory
from bough.models.registry import facts_of

FLOAT = 4


def check_held(
    facts: ModelFacts,
    layout: Layout,
    held: Sequence[RankMemory],
    *,
    kv_tokens: int,
    page_size: int,
    slots: int,
    kv_bytes: int | None = None,
) -> None:
    """`kv_tokens`, `page_size`, `slots`: of each scheduler, as the server was asked for them. With `--attn-cp-size` a page
    holds the tokens of all ranks that share it. `kv_bytes`: by the memory plan, if known."""
    assert [each.rank for each in held] == list(range(layout.size))
    # Rotary tables are on every rank: of windows and of all tokens, cosines and sines.
    tables = 2 * 2 * FLOAT * facts.max_context * max((mixer.head_dim for mixer in facts.kv_mixers), default=0)
    page = page_size * layout.cp
    plan = plan_groups(facts, layout, context=facts.max_context, page_size=page)
    num_states = 2 + slots + 2 * slots  # of rows that begin, of padding, of slots, and snapshots
    for rank, each in enumerate(held):
        planned = FLOAT * rank_parameters(facts, layout, rank)
        assert planned * 0.9 - FLOAT * facts.hidden * 8 <= each.weight_bytes <= planned * 1.1 + tables
        if len(plan.groups) == 1:
            assert each.kv_bytes == FLOAT * rank_kv_values(facts, layout, rank) * (kv_tokens + page)
        assert each.state_bytes == FLOAT * rank_state_values(facts, layout, rank) * num_states
    if len(plan.groups) > 1 and kv_bytes is not None:  # pages are as many on all stages, and hold the layers of each
        assert max(each.kv_bytes for each in held) == kv_bytes
    if layout.size > 1:
        _check_less(facts, layout, held, tables, num_states)


def _check_less(facts: ModelFacts, layout: Layout, held: Sequence[RankMemory], tables: int, num_states: int) -> None:
    """Of weights, of KV and of states each rank has a part, wherever the layout splits them."""
    splits = layout.heads * layout.pp > 1
    most = 0.8 if layout.stage_sizes else 0.7  # a stage may have three of four layers
    if splits or any(layer.ffn is not None for layer in facts.layers):
        assert max(each.weight_bytes for each in held) - tables < 0.9 * FLOAT * facts.num_parameters()
    if facts.state_mixers and splits:
        whole = FLOAT * rank_state_values(facts, Layout(), 0) * num_states
        assert max(each.state_bytes for each in held) < most * whole
    latents = any(mixer.num_kv_heads == 1 for mixer in facts.kv_mixers)  # which ranks hold whole
    stages = min(layout.pp, len(facts.kv_mixers))
    if (1 if latents else layout.heads) * stages * layout.cp > 1:
        values = [rank_kv_values(facts, layout, rank) for rank in range(layout.size)]
        assert max(values) < most * rank_kv_values(facts, Layout(), 0)


def check_served(model: Path, layout: Layout, ranks: Sequence[dict[str, Any]]) -> None:
    """`ranks`: what `GET /server_info` says of a server that `cluster.Node` has started."""
    held = [msgspec.convert({name: each[name] for name in RankMemory.__struct_fields__}, RankMemory) for each in ranks]
    check_held(facts_of(open_checkpoint(str(model)).config), layout, held, kv_tokens=4096, page_size=4, slots=16)
