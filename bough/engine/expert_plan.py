"""Where a model's experts are at the start. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bough.config.concerns import ParallelConfig
from bough.config.experts import ExpertPlan, read_location
from bough.config.model_facts import ModelFacts, Moe
from bough.core.errors import ConfigError
from bough.distributed.balance import balance_experts


def plan_experts(parallel: ParallelConfig, facts: ModelFacts) -> ExpertPlan:
    """Where the experts of a model are at the start. Raises `ConfigError` where settings and model don't fit."""
    plan = ExpertPlan.of(parallel)
    mixtures = [layer.ffn for layer in facts.layers if isinstance(layer.ffn, Moe)]
    location = read_location(parallel.init_expert_location)
    slots = None
    if location is not None and location.slots is not None:
        slots = location.slots
    elif location is not None and location.counts is not None:
        slots = _slots_for(location.counts, mixtures, parallel)
    plan = replace(plan, slots=slots)
    for number, mixture in enumerate(mixtures):
        held = len(plan.slots_of(number, mixture.num_experts))
        if (plan.moves or slots is not None) and held % parallel.ep_size:
            raise ConfigError(
                what=f"{held} slots for experts can't be spread evenly over {parallel.ep_size} groups of ranks",
                why="experts that move need equally many slots in each group",
                fix=f"add --ep-num-redundant-experts {-mixture.num_experts % parallel.ep_size}",
                param="ep_num_redundant_experts",
            )
    return plan


def _slots_for(
    counts: Sequence[Sequence[float]], mixtures: Sequence[Moe], parallel: ParallelConfig
) -> tuple[tuple[int, ...], ...]:
    if [len(each) for each in counts] != [mixture.num_experts for mixture in mixtures]:
        found = f"{len(counts)} layers of {len(counts[0])} experts"
        wanted = f"{len(mixtures)} layers of {mixtures[0].num_experts if mixtures else 0}"
        raise ConfigError(
            what=f"init_expert_location: logical_count has {found}",
            why=f"the model has {wanted}",
            fix="count tokens with this model (/dump_expert_distribution_record)",
            param="init_expert_location",
        )
    redundant = parallel.ep_num_redundant_experts
    return tuple(
        tuple(
            balance_experts(
                np.array([each], np.float64), mixture.num_experts + redundant, parallel.ep_size
            )[0].tolist()
        )
        for each, mixture in zip(counts, mixtures, strict=True)
    )  # fmt: skip
