"""The largest steps that a scheduler may plan, for a runner built as the engine builds it: what memory is planned for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bough.config.memory_plan import MemoryPlan
from bough.config.server_args import build_config
from bough.core.messages import LogprobSpec
from bough.core.sampling import SamplingParams
from bough.core.step import RunnerLimits, SlotSetup, Step
from bough.distributed.mesh import SINGLE
from bough.engine.build import load_model, make_runner, open_device, warm_up
from bough.engine.decide import decide
from bough.platform import detect
from bough.runner.model_runner import ModelRunner
from bough.runner.pooling import PoolingRunner

GREEDY = SamplingParams(temperature=0.0)
RICH = SamplingParams(
    temperature=0.9, top_p=0.9, top_k=200, min_p=0.01, frequency_penalty=0.3, presence_penalty=0.2,
    repetition_penalty=1.1, logit_bias={5: 1.0},
)  # fmt: skip
DRAWN = SamplingParams(temperature=0.9, top_p=0.95)
SCORED = LogprobSpec(start=0, top=20)


def step_of(
    limits: RunnerLimits, rows: list[tuple[int, int]], sampling: SamplingParams, scores: LogprobSpec | None = None
) -> Step:
    """A step of rows (query tokens, context), decodes first. They have no pages of their own: all is page 0, nobody's."""
    query = np.array([row[0] for row in rows], np.int32)
    slots = np.arange(len(rows), dtype=np.int32)
    rng = np.random.default_rng(0)
    prefills = np.flatnonzero(query > 1).astype(np.int32) if scores is not None else np.empty(0, np.int32)
    penalised = np.arange(8, dtype=np.int32) if sampling is RICH else None
    return Step(
        index=-1,
        num_decodes=int(np.count_nonzero(query == 1)),
        slots=slots,
        num_query=query,
        context=np.array([row[1] for row in rows], np.int32),
        samples=np.ones(len(rows), np.bool_),
        tokens=rng.integers(0, limits.vocab_size, int(query.sum())).astype(np.int32),
        table_at=np.empty(0, np.int64),
        table_pages=np.empty(0, np.int32),
        setups=[
            SlotSetup(slot=slot, sampling=sampling, prompt=penalised, output=penalised, logprobs=scores)
            for slot in slots.tolist()
        ],
        prompt_logprobs=prefills,
        following=np.full(len(prefills), -1, np.int32),
    )


def largest_steps(limits: RunnerLimits) -> dict[str, Step]:
    """What the scheduler may plan at most, in its different mixtures."""
    tokens, slots = limits.max_step_tokens, limits.num_slots
    one = min(tokens, limits.context_length)
    late = limits.context_length - one
    many = [(tokens // 64, 100)] * min(64, slots - 1)
    crowd = [(1, 300)] * (slots - 2)
    return {
        "one prompt": step_of(limits, [(one, 0)], GREEDY),
        "the end of a long prompt": step_of(limits, [(one, late)], GREEDY),
        "many prompts": step_of(limits, many, GREEDY),
        "decodes beside a prompt": step_of(limits, [*crowd, (tokens - len(crowd), late)], DRAWN),
        "every slot decodes": step_of(limits, [(1, 300)] * slots, GREEDY),
        "every slot draws": step_of(limits, [(1, 300)] * slots, DRAWN),
        "every slot draws with all there is": step_of(limits, [(1, 300)] * slots, RICH),
        "a prompt is scored": step_of(limits, [(one, 0)], GREEDY, SCORED),
        "every slot is scored": step_of(limits, [(1, 300)] * slots, DRAWN, SCORED),
    }


def made(folder: Path, device: str, **settings: Any) -> tuple[ModelRunner, MemoryPlan]:
    """A runner as the engine builds it, on its own plan."""
    runner, plan = _made(folder, device, **settings)
    assert isinstance(runner, ModelRunner)
    return runner, plan


def made_to_pool(folder: Path, device: str, **settings: Any) -> tuple[PoolingRunner, MemoryPlan]:
    """The same for a model that pools."""
    runner, plan = _made(folder, device, **settings)
    assert isinstance(runner, PoolingRunner)
    return runner, plan


def _made(folder: Path, device: str, **settings: Any) -> tuple[ModelRunner | PoolingRunner, MemoryPlan]:
    config = build_config(model=str(folder), load_format="dummy", device=device, **settings)
    checkpoint, facts, pooling, resolved, _ = decide(config, detect(config.device.device))
    machine = open_device(resolved.config, 0)
    model = load_model(checkpoint, resolved.config, resolved.plan, machine, SINGLE, pooling)
    runner = make_runner(model, resolved.config, resolved.plan, machine, facts, pooling)
    warm_up(runner, resolved.config)
    return runner, resolved.plan
