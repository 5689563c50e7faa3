"""The plan never exceeds the memory, and every command it suggests would really start."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings, strategies as st

from bough.config.memory_plan import GIB, MIB, PlanFacts, _candidates, plan_memory, runtime_bytes
from bough.core.errors import ConfigError

H200_8B = PlanFacts(
    model="llama-8b", device="cuda", total_bytes=139 * GIB, free_bytes=138 * GIB, weight_bytes=16_060_000_000,
    kv_bytes_per_token=131_072, activation_bytes=2 * GIB, step_tokens=8192, graph_bytes=1 * GIB, page_size=64,
    model_context=131_072,
)  # fmt: skip
SMOL = PlanFacts(
    model="", device="cpu", total_bytes=16 * GIB, free_bytes=12 * GIB, weight_bytes=120 * MIB,
    kv_bytes_per_token=30 * 2 * 3 * 64 * 2, activation_bytes=80 * MIB, step_tokens=1024, page_size=16, model_context=8192,
)  # fmt: skip


def test_a_big_gpu_fills_up() -> None:
    plan = plan_memory(H200_8B)
    assert plan.context_length == 131_072
    assert 850_000 < plan.kv_tokens < 1_000_000
    assert plan.kv_tokens % 64 == 0
    assert 0 <= plan.free_bytes < 64 * 131_072
    assert plan.max_concurrency == plan.kv_tokens / 131_072


def test_the_default_model_stays_small_on_a_cpu() -> None:
    plan = plan_memory(SMOL)
    assert plan.context_length == 8192
    assert plan.kv_tokens >= 2 * 8192
    python_and_torch = 300 * MIB
    assert plan.weight_bytes + plan.kv_bytes + plan.activation_bytes + python_and_torch < 1.2e9


def test_a_small_cpu_keeps_to_its_share() -> None:
    plan = plan_memory(replace(SMOL, total_bytes=2 * GIB, free_bytes=1200 * MIB))
    assert plan.kv_bytes <= 300 * MIB
    assert plan.context_length == 8192


def test_an_explicit_context_may_exceed_the_share() -> None:
    plan = plan_memory(
        replace(SMOL, free_bytes=1200 * MIB, total_bytes=2 * GIB, model_context=16_384, context_length=16_384)
    )
    assert plan.context_length == 16_384
    assert plan.kv_tokens >= 16_384


def test_auto_context_shrinks_to_what_fits() -> None:
    plan = plan_memory(replace(H200_8B, total_bytes=24 * GIB, free_bytes=23 * GIB))
    assert 512 <= plan.context_length < 131_072
    assert plan.context_length == plan.kv_tokens


def test_max_total_tokens_is_obeyed() -> None:
    plan = plan_memory(replace(H200_8B, max_total_tokens=1000))
    assert plan.kv_tokens == 960
    assert plan.context_length == 960


def test_less_than_a_page_is_told_apart_from_too_much() -> None:
    with pytest.raises(ConfigError, match="a KV cache of 10 tokens was asked for, a page has 64") as caught:
        plan_memory(replace(H200_8B, max_total_tokens=10))
    assert "fit" not in caught.value.what + caught.value.why


def test_misfit_has_numbers_and_commands() -> None:
    facts = replace(H200_8B, total_bytes=24 * GIB, free_bytes=23 * GIB, context_length=131_072, num_devices=8)
    with pytest.raises(ConfigError) as caught:
        plan_memory(facts)
    error = caught.value
    assert "131,072" in error.what
    assert "23.00 GiB free of 24.00 GiB" in error.why
    commands = error.fix.removeprefix("one of: ").split(" | ")
    assert 1 <= len(commands) <= 3
    shorter = int(re.search(r"--context-length (\d+)", error.fix).group(1))  # type: ignore[union-attr]
    assert plan_memory(replace(facts, context_length=shorter)).context_length == shorter
    with pytest.raises(ConfigError):
        plan_memory(replace(facts, context_length=shorter + 64))


def test_hopeless_says_how_much_is_needed() -> None:
    with pytest.raises(ConfigError, match="does not fit") as caught:
        plan_memory(replace(H200_8B, total_bytes=4 * GIB, free_bytes=4 * GIB))
    assert "at least" in caught.value.fix


FACTS = st.builds(
    PlanFacts,
    model=st.just("m"),
    device=st.sampled_from(["cpu", "cuda"]),
    total_bytes=st.integers(1, 160).map(lambda n: n * GIB),
    free_bytes=st.integers(1, 160 * 1024).map(lambda n: n * MIB),
    weight_bytes=st.integers(0, 80 * 1024).map(lambda n: n * MIB),
    kv_bytes_per_token=st.integers(1, 2**20),
    activation_bytes=st.integers(0, 4 * 1024).map(lambda n: n * MIB),
    step_tokens=st.sampled_from([512, 2048, 8192]),
    graph_bytes=st.integers(0, 2 * 1024).map(lambda n: n * MIB),
    page_size=st.sampled_from([1, 16, 64]),
    model_context=st.integers(128, 131_072),
    context_length=st.none() | st.integers(1, 131_072),
    max_total_tokens=st.none() | st.integers(1, 2**21),
    mem_fraction=st.none() | st.floats(0.05, 0.99),
    kv_item_bytes=st.sampled_from([1, 2, 4]),
    weight_dtype=st.sampled_from(["bfloat16", "float32"]),
    num_devices=st.sampled_from([1, 2, 8]),
    host_free_bytes=st.integers(0, 64).map(lambda n: n * GIB),
)


@settings(max_examples=300, deadline=None)
@given(FACTS)
def test_a_plan_keeps_its_promises(facts: PlanFacts) -> None:
    assume(facts.free_bytes <= facts.total_bytes)
    try:
        plan = plan_memory(facts)
    except ConfigError as error:
        suggested = set(re.findall(r"bough serve m (--[^|]+?)(?: \||$)", error.fix))
        known = dict(_candidates(facts))
        for flags in suggested:
            plan_memory(known[flags])  # raises if a suggestion would not start
        return
    assert plan.kv_tokens % facts.page_size == 0
    assert 1 <= plan.context_length <= plan.kv_tokens
    used = plan.weight_bytes + plan.kv_bytes + plan.graph_bytes + plan.activation_bytes + runtime_bytes(facts)
    assert used <= facts.free_bytes
    assert plan.kv_bytes == (plan.num_pages + 1) * facts.page_size * facts.kv_bytes_per_token
    assert sum(size for _, size, _ in plan.rows()) == facts.total_bytes
    if facts.context_length is not None:
        assert plan.context_length == facts.context_length
    if facts.mem_fraction is not None:
        assert plan.weight_bytes + plan.kv_bytes <= facts.total_bytes * facts.mem_fraction + 1


def test_states_alone_do_not_bound_the_tokens_of_requests() -> None:
    plan = plan_memory(replace(H200_8B, kv_bytes_per_token=0, state_bytes=64 * MIB))
    assert (plan.kv_bytes, plan.state_bytes) == (0, 64 * MIB)
    assert plan.kv_tokens >= 1000 * 4096, "as many requests as states are kept of"
