"""What differs in an engine that pools: its settings, its limits and its runner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from bough.config.concerns import AUTO, Auto, Config
from bough.config.hf import Checkpoint
from bough.config.model_facts import ModelFacts
from bough.config.pooling_facts import PoolingFacts, is_dual, pooling_facts, rerank_tokens
from bough.config.resolve_facts import ModelPlanFacts
from bough.core.errors import ConfigError
from bough.core.step import RunnerLimits
from bough.scheduler.limits import Limits

STEP_TOKENS = {"cpu": 2048, "cuda": 16_384}
"""Tokens of whole texts computed together, where the operator asks for nothing else."""


def pooling_of(config: Config, checkpoint: Checkpoint, facts: ModelFacts) -> PoolingFacts | None:
    """How this engine pools; None: it generates."""
    model = config.model
    return pooling_facts(facts, checkpoint.path, forced=model.is_embedding, mode=model.pooling)


def pooling_settings(
    config: Config, pooling: PoolingFacts, checkpoint: Checkpoint, facts: ModelFacts, device: str
) -> Config:
    """The configuration of an engine that pools: nothing is cached, and texts that must be whole are not cut."""
    if config.model.calculate_kv_scales:
        raise ConfigError(
            what=f"--calculate-kv-scales with {checkpoint.name}, a pooling model",
            why="models that pool keep nothing of a prompt",
            fix="leave it out",
            param="calculate_kv_scales",
        )
    model = replace(config.model, is_embedding=True)
    encodes = facts.encoder is not None or is_dual(facts.architecture)
    if model.dtype == "auto" and encodes and _in_float32(checkpoint):
        # Vectors made here are compared with vectors made elsewhere, so digits count: bfloat16 keeps too few.
        model = replace(model, dtype="float32" if device == "cpu" else "float16")
    if model.context_length is AUTO and 0 < pooling.max_length < facts.max_context:
        model = replace(model, context_length=pooling.max_length)
    scheduler = config.scheduler
    if pooling.whole:
        longest = facts.max_context if isinstance(model.context_length, Auto) else model.context_length
        tokens = whole_step_tokens(scheduler.chunked_prefill_size, longest, device)
        scheduler = replace(scheduler, chunked_prefill_size=tokens, unwatched_prefill_size=AUTO)
    return replace(
        config,
        model=model,
        cache=replace(config.cache, radix_cache=False),
        scheduler=scheduler,
        device=replace(config.device, cuda_graph=False),
    )


def _in_float32(checkpoint: Checkpoint) -> bool:
    if checkpoint.kind == "config-only":
        return str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "float32") == "float32"
    return all(tensor.kind in ("F32", "I64") for tensor in checkpoint.tensors.values())


def without_kv(facts: ModelPlanFacts) -> ModelPlanFacts:
    """The plan's facts of a model that keeps nothing of a text once it is computed."""
    return replace(facts, kv_values_per_token=0, kv=None)


def whole_step_tokens(given: object, context_length: int, device: str) -> int:
    """Tokens of a step: at least one text of full length. `given`: what the operator asked for."""
    wanted = given if isinstance(given, int) and given > 0 else STEP_TOKENS[device]
    return max(wanted, context_length)


def pooling_limits(limits: Limits, runner: RunnerLimits, pooling: PoolingFacts) -> Limits:
    """Limits of a scheduler whose requests end with their prompt."""
    limits = replace(limits, tpot_target_ms=0.0)
    if not pooling.whole:
        return limits
    return replace(limits, whole_prompts=True, uncut=True, chunk_tokens=runner.max_step_tokens, small_share=0.0)


def ready_pooling(pooling: PoolingFacts | None, checkpoint: Checkpoint) -> dict[str, Any]:
    """What the way in must know: how the model pools, or how it scores as a reranker."""
    tokens = rerank_tokens(checkpoint.path) if pooling is None else None
    return {
        "pooling": None if pooling is None else msgspec.to_builtins(pooling),
        "rerank_tokens": None if tokens is None else msgspec.to_builtins(tokens),
    }
