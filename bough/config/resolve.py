"""Turns "auto" into values, each with its reason. Pure: facts in, a configuration and the list of decisions out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from bough.config.concerns import AUTO, Config
from bough.config.decisions import (
    Decision,
    choose_attention,
    choose_captured,
    choose_chunk,
    choose_context,
    choose_device,
    choose_dtype,
    choose_first_layer,
    choose_fraction,
    choose_kv_dtype,
    choose_page_size,
    choose_quantization,
    choose_running,
    choose_step_patches,
    choose_threads,
    choose_tpot_target,
    choose_unwatched,
    choose_workers,
    one_at_a_time,
    switch_offs,
)
from bough.config.memory_plan import MemoryPlan, plan_memory
from bough.config.resolve_facts import MachineFacts, ModelPlanFacts
from bough.config.speculation import KEEPS_KV, ON_DEVICE, draft_numbers, draft_tokens
from bough.config.step_memory import SMALL_GRAPHS, check_scales, media_rows, memory_facts

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A configuration without "auto", the decisions that led to it, and the memory plan they share."""

    config: Config
    decisions: Mapping[str, Decision[object]]
    """Setting -> what was decided. Settings that the user fixed are not here."""
    plan: MemoryPlan

    def lines(self) -> list[str]:
        """The start-up log: one decision a line."""
        width = max((len(name) for name in self.decisions), default=0)
        return [f"{name:<{width}} = {each.value}  ({each.because})" for name, each in self.decisions.items()]


def resolve(config: Config, machine: MachineFacts, model: ModelPlanFacts) -> Resolved:
    """Decides all settings that are `AUTO`. Raises `ConfigError` if a setting cannot work on this machine."""
    decisions: dict[str, Decision[object]] = {}

    def settle(name: str, given: object, open_value: object, decide: Decision[T]) -> T:
        if given != open_value:
            return given  # type: ignore[return-value]
        decisions[name] = Decision(decide.value, decide.because)
        return decide.value

    if config.device.deterministic:
        config, alone = one_at_a_time(config)
        decisions.update(alone)
    device = config.device
    settle("device", device.device, "auto", choose_device(config, machine))
    dtype = settle("dtype", config.model.dtype, "auto", choose_dtype(machine, model))
    kv_dtype = settle("kv_cache_dtype", config.model.kv_cache_dtype, "auto", choose_kv_dtype(machine, model, dtype))
    check_scales(config, kv_dtype)
    quantization = settle("quantization", config.model.quantization, "auto", choose_quantization(machine, model, dtype))
    backend = settle("attention_backend", device.attention_backend, "auto", choose_attention(machine, config))
    page_size = settle("page_size", config.cache.page_size, AUTO, choose_page_size(machine, backend, model))
    chunk = settle("chunked_prefill_size", config.scheduler.chunked_prefill_size, AUTO, choose_chunk(machine))
    bound = config.scheduler.max_prefill_tokens if chunk != -1 else 0
    if bound and chunk > bound:
        chunk = bound
        decisions["chunked_prefill_size"] = Decision(chunk, "--max-prefill-tokens")
    threads = settle("cpu_threads", device.cpu_threads, AUTO, choose_threads(machine, config))
    tpot = settle("tpot_target_ms", config.scheduler.tpot_target_ms, AUTO, choose_tpot_target(machine))
    drafted, passes = config.speculative.speculative_num_draft_tokens, config.speculative.speculative_num_steps
    if config.speculative.speculative_algorithm in ON_DEVICE:
        numbers = draft_numbers(config.speculative, model.most_draft_steps, model.architecture)
        passes = settle("speculative_num_steps", passes, AUTO, Decision(numbers.steps, numbers.because))
        drafted = settle("speculative_num_draft_tokens", drafted, AUTO, Decision(numbers.tokens, numbers.because))
    topk = config.speculative.speculative_eagle_topk
    if config.speculative.speculative_algorithm in KEEPS_KV:
        drafted_in = config.speculative.speculative_draft_kv_cache_dtype
        same = Decision(kv_dtype, "--kv-cache-dtype")
        draft_kv = settle("speculative_draft_kv_cache_dtype", drafted_in, "auto", same)
        config = replace(config, speculative=replace(config.speculative, speculative_draft_kv_cache_dtype=draft_kv))
    settled = replace(
        config.speculative, speculative_num_steps=0 if passes is AUTO else passes, speculative_num_draft_tokens=drafted,
        speculative_eagle_topk=1 if topk is AUTO else topk,
    )  # fmt: skip
    config = replace(config, speculative=settled)
    if config.speculative.speculative_algorithm != "none":
        drafted = settle("speculative_num_draft_tokens", drafted, AUTO, Decision(*draft_tokens(config.speculative)))
    elif drafted is AUTO:
        drafted = draft_tokens(config.speculative)[0]
    switches = {
        "overlap_schedule": config.scheduler.overlap_schedule,
        "cuda_graph": device.cuda_graph,
        "custom_kernels": device.custom_kernels,
    }
    for name, switched_off in switch_offs(config, machine, backend).items():
        if switches[name]:
            switches[name] = False
            decisions[name] = Decision(False, switched_off)

    captured = device.cuda_graph_max_tokens
    if switches["cuda_graph"]:
        captured = settle("cuda_graph_max_tokens", captured, AUTO, choose_captured(model))
    captured = SMALL_GRAPHS if captured is AUTO else captured

    def planned(unwatched: int, table: bool) -> MemoryPlan:
        facts = memory_facts(
            config, machine, model, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size, chunk=chunk,
            unwatched=unwatched, captured=captured if switches["cuda_graph"] else 0, packed=quantization != "none",
            backend=backend, table=table,
        )  # fmt: skip
        return plan_memory(facts)

    given = config.model.first_layer_table
    larger = choose_unwatched(config, machine, chunk, lambda tokens: planned(tokens, given == "on"))
    unwatched = settle("unwatched_prefill_size", config.scheduler.unwatched_prefill_size, AUTO, larger)
    if bound and unwatched > bound:
        unwatched = bound
        decisions["unwatched_prefill_size"] = Decision(unwatched, "--max-prefill-tokens")
    looked_up = choose_first_layer(config, machine, lambda table: planned(unwatched, table))
    table = settle("first_layer_table", given, "auto", looked_up)
    plan = planned(unwatched, table == "on")
    settle("context_length", config.model.context_length, AUTO, choose_context(plan, model))
    settle("max_total_tokens", config.cache.max_total_tokens, AUTO, Decision(plan.kv_tokens, plan.because))
    fraction = settle("mem_fraction_static", device.mem_fraction_static, AUTO, choose_fraction(plan))
    media = replace(
        config.media,
        mm_workers=choose_workers(machine) if config.media.mm_workers is AUTO else config.media.mm_workers,
        mm_cache_size=plan.media_bytes,
        mm_encoder_step_tokens=0,
    )
    if model.tower is not None:
        rows = media_rows(plan.media_bytes, model.tower, dtype)
        kept = Decision(plan.media_bytes, f"{rows:,} positions of {model.tower.width:,} values")
        given_patches = config.media.mm_encoder_step_tokens
        patches = settle("mm_encoder_step_tokens", given_patches, AUTO, choose_step_patches(machine))
        settle("mm_cache_size", config.media.mm_cache_size, AUTO, kept)
        media = replace(media, mm_encoder_step_tokens=patches)
    most = choose_running(machine, plan, model)
    running = settle("max_running_requests", config.scheduler.max_running_requests, AUTO, most)

    resolved = replace(
        config,
        model=replace(
            config.model, dtype=dtype, kv_cache_dtype=kv_dtype, quantization=quantization,
            context_length=plan.context_length, first_layer_table=table,
        ),
        device=replace(
            device, device=machine.device, mem_fraction_static=fraction, attention_backend=backend, cpu_threads=threads,
            cuda_graph=switches["cuda_graph"], cuda_graph_max_tokens=captured, custom_kernels=switches["custom_kernels"],
        ),
        cache=replace(config.cache, page_size=page_size, max_total_tokens=plan.kv_tokens),
        scheduler=replace(
            config.scheduler, max_running_requests=running, chunked_prefill_size=chunk,
            unwatched_prefill_size=unwatched, tpot_target_ms=tpot, overlap_schedule=switches["overlap_schedule"],
        ),
        speculative=replace(config.speculative, speculative_num_draft_tokens=drafted),
        media=media,
    )  # fmt: skip
    return Resolved(config=resolved, decisions=decisions, plan=plan)
