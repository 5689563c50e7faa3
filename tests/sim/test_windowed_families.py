"""Families with windows, in their published shapes: what each keeps of a long context, by arithmetic on its config, and that
rows of such a layout hold no more while they run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bough.config.kv_groups import lifetimes_of, plan_groups
from bough.config.layout import Layout
from bough.core.kv import Grows, KvGroup, KvLayout, Window
from bough.models.registry import facts_of
from tests.sim.harness import VOCAB, Sim, check_answer

PAGE = 64


def _config(architecture: str, layers: int, heads: int, kv_heads: int, width: int, **extra: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture], "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": width, "hidden_size": heads * width, "intermediate_size": 8192,
        "vocab_size": 32_000, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, **extra,
    }  # fmt: skip


# name -> (config, context, (window or chunk, layers that have it), layers that keep everything)
FAMILIES: dict[str, tuple[dict[str, Any], int, tuple[Window, int], int]] = {
    "gemma-2-9b": (
        _config("Gemma2ForCausalLM", 42, 16, 8, 256, sliding_window=4096, max_position_embeddings=8192),
        8192, (Window(4096), 21), 21,
    ),
    "gemma-3-12b": (_config("Gemma3ForCausalLM", 48, 16, 8, 256, sliding_window=1024), 32_768, (Window(1024), 40), 8),
    "mistral-7b-v0.1": (
        _config("MistralForCausalLM", 32, 32, 8, 128, sliding_window=4096, max_position_embeddings=32_768),
        32_768, (Window(4096), 32), 0,
    ),
    "gpt-oss-20b": (
        _config(
            "GptOssForCausalLM", 24, 64, 8, 64, sliding_window=128, num_local_experts=32, num_experts_per_tok=4,
            rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        ),
        32_768, (Window(128), 12), 12,
    ),
    "phi-3-mini-4k": (
        _config("Phi3ForCausalLM", 32, 32, 32, 96, sliding_window=2047, max_position_embeddings=4096),
        4096, (Window(2047), 32), 0,
    ),
    "llama-4-scout": (
        _config(
            "Llama4ForCausalLM", 48, 40, 8, 128, attention_chunk_size=8192, intermediate_size_mlp=16_384,
            num_local_experts=16, num_experts_per_tok=1,
        ),
        131_072, (Window(8192, chunked=True), 36), 12,
    ),
    "command-r7b": (_config("Cohere2ForCausalLM", 32, 32, 8, 128, sliding_window=4096), 32_768, (Window(4096), 24), 8),
    "gemma-3n-e2b": (
        _config(
            "Gemma3nForCausalLM", 30, 8, 2, 256, sliding_window=512, num_kv_shared_layers=10,
            max_position_embeddings=32_768,
        ),
        32_768, (Window(512), 16), 4,
    ),
    "gemma-4-31b": (
        _config(
            "Gemma4ForCausalLM", 60, 32, 16, 256, sliding_window=1024, global_head_dim=512, attention_k_eq_v=True,
            num_global_key_value_heads=4, hidden_size_per_layer_input=0,
        ),
        32_768, (Window(1024), 50), 10,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_pages_of_a_long_context(name: str) -> None:
    """As many as windows and global layers need, but for the padding of lines to one length."""
    config, context, (window, windowed), growing = FAMILIES[name]
    facts = facts_of(config)
    lifetimes = lifetimes_of(facts, context)
    assert [lifetimes.count(window), lifetimes.count(Grows())] == [windowed, growing]
    plan = plan_groups(facts, Layout(), context=context, page_size=PAGE)
    assert not plan.because
    kept = KvLayout(plan.groups, PAGE).pages_for(context) * plan.values_per_token * PAGE
    needed = 0
    for mixer, lifetime in zip(facts.kv_mixers, lifetimes, strict=True):
        tokens = context if isinstance(lifetime, Grows) else min(context, window.most_columns(PAGE) * PAGE)
        needed += tokens * sum(mixer.planes)
    assert needed <= kept <= 1.12 * needed
    whole = context * sum(sum(mixer.planes) for mixer in facts.kv_mixers)
    assert kept < 0.8 * whole, "windows are worth it"


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_give_back_what_their_windows_have_left(name: str) -> None:
    """The family's groups, with windows of 8 tokens."""
    config, context, (window, _), _ = FAMILIES[name]
    planned = plan_groups(facts_of(config), Layout(), context=context, page_size=PAGE).groups
    small = tuple(_shrunk(group, replace(window, tokens=8)) for group in planned)
    layout = KvLayout(small, 4)
    sim = Sim(groups=small, num_pages=40 * layout.column_pages + 1, context_length=140)
    client = sim.ask([(3 * i * i + i) % VOCAB for i in range(40)], max_new=60)
    held = 0
    while not client.ends:
        sim.turn()
        if len(client.tokens) > 4:
            tokens = len(client.prompt) + len(client.tokens)
            held = sim.cache.total - sim.cache.num_available
            assert held <= layout.pages_for(tokens + 5) + layout.column_pages
    sim.run()
    check_answer(sim, client)


def _shrunk(group: KvGroup, window: Window) -> KvGroup:
    return group if isinstance(group.lifetime, Grows) else replace(group, lifetime=window)
