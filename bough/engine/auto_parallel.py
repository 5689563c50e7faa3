"""`--auto-parallel`: how a model is spread over the GPUs of its machines, chosen by what fits and by the model of step
times, with reasons. Needs no torch in this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from bough.config.check import check
from bough.config.concerns import Config, ParallelConfig
from bough.config.hf import Checkpoint
from bough.config.layout import Layout
from bough.config.model_facts import ModelFacts
from bough.config.spreads import Spread, spreads
from bough.config.step_cost import HARDWARE, FleetModel, Hardware, StepLoad
from bough.core.errors import BoughError, ConfigError
from bough.engine.decide import decide
from bough.models.registry import facts_of
from bough.platform import DeviceFacts

PROMPT_TOKENS: Final = 1000
OUTPUT_TOKENS: Final = 200
"""Of the requests by which ways are compared."""
ROWS: Final = 64
"""Requests of that kind that run at once on each scheduler, if their KV fits."""
_ALIKE: Final = 0.97
"""Ways that reach this part of the fastest are as good as it: of them, that with the most room for KV is taken."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A way to use the devices, and why."""

    parallel: ParallelConfig
    because: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Way:
    spread: Spread
    parallel: ParallelConfig
    kv_tokens: int
    tokens_s: float

    @property
    def room(self) -> int:
        return self.kv_tokens * self.parallel.num_schedulers


def choose_parallel(config: Config, device: DeviceFacts, checkpoint: Checkpoint) -> Chosen:
    """Raises ConfigError if the model fits in no way, with what the most promising one lacks."""
    asked = config.parallel
    ranks = device.num_devices * asked.nnodes
    if device.kind == "cpu" and asked.nnodes > 1:
        raise ConfigError(
            what=f"auto_parallel is set for {asked.nnodes} machines without GPUs",
            why="nothing is known of the network between CPUs",
            fix="choose --tp-size or --pp-size yourself",
            param="auto_parallel",
        )
    if device.kind == "cpu" or ranks == 1:
        why = "ranks of a CPU would share its cores" if device.kind == "cpu" else "there is one GPU"
        return Chosen(replace(asked, auto_parallel=False), (f"one rank: {why}",))
    facts = facts_of(checkpoint.config, config.model.model_impl)
    hardware, remark = hardware_of(device)
    found: list[_Way] = []
    refused: list[tuple[Spread, BoughError]] = []
    for spread, parallel in _ways(asked, facts, ranks, device.num_devices):
        try:
            found.append(_tried(replace(config, parallel=parallel), spread, facts, device, hardware, checkpoint))
        except ConfigError as error:
            refused.append((spread, error))
    if not found:
        raise (
            refused[-1][1]
            if refused
            else ConfigError(
                what=f"no way is known to spread {facts.architecture} over {ranks} GPUs",
                why=f"{asked.nnodes} machines with {device.num_devices} each",
                fix="choose --tp-size and the other sizes yourself",
                param="auto_parallel",
            )
        )
    fastest = max(found, key=lambda way: way.tokens_s)
    best = max((way for way in found if way.tokens_s >= _ALIKE * fastest.tokens_s), key=lambda way: way.room)
    return Chosen(best.parallel, (*_reasons(best, found, refused, device), *remark))


def hardware_of(device: DeviceFacts) -> tuple[Hardware, tuple[str, ...]]:
    """The rates of a GPU by its name, and a remark if it is not known."""
    words = device.name.lower().replace("-", " ").split()
    for name, hardware in HARDWARE.items():
        if name in words:
            return replace(hardware, memory_bytes=device.total_bytes, per_machine=device.num_devices), ()
    likened = replace(HARDWARE["h100"], memory_bytes=device.total_bytes, per_machine=device.num_devices)
    return likened, (f"the rates of {device.name} are not known: those of an H100 were used, for all ways alike",)


def _ways(
    asked: ParallelConfig, facts: ModelFacts, ranks: int, per_machine: int
) -> Iterator[tuple[Spread, ParallelConfig]]:
    for spread in spreads(facts, ranks, per_machine):
        layout = spread.layout
        if asked.nnodes > 1 and spread.replicas > 1:
            continue  # replicas of an engine run on one machine
        yield (
            spread,
            replace(
                asked,
                auto_parallel=False,
                tp_size=layout.tp,
                pp_size=layout.pp,
                dp_size=spread.replicas,
                attn_dp_size=layout.dp,
                ep_size=layout.ep,
                moe_a2a_backend="alltoall" if layout.whole_shared else "none",
            ),
        )


def _tried(
    config: Config,
    spread: Spread,
    facts: ModelFacts,
    device: DeviceFacts,
    hardware: Hardware,
    checkpoint: Checkpoint,
) -> _Way:
    """Raises ConfigError if it can't be had, or does not fit."""
    check(config)
    plan = decide(config, device, checkpoint=checkpoint).resolved.plan
    layout = Layout.of(config.parallel)
    parameters = max(1, facts.num_parameters() // (layout.pp * layout.tp))
    model = FleetModel(facts, layout, hardware, weight_bytes=min(2.0, max(0.5, plan.weight_bytes / parameters)))
    rows = max(1, min(ROWS, plan.kv_tokens // (PROMPT_TOKENS + OUTPUT_TOKENS)))
    per_step = max(1, rows // layout.pp)
    context = PROMPT_TOKENS + OUTPUT_TOKENS // 2
    decoding = model.cost([StepLoad.of([1] * per_step, [context] * per_step, per_step)] * layout.dp).stage_s / per_step
    prompt = model.cost([StepLoad.of([PROMPT_TOKENS], [0], 1)] * layout.dp).stage_s
    request_s = prompt + OUTPUT_TOKENS * decoding
    return _Way(spread, config.parallel, plan.kv_tokens, OUTPUT_TOKENS / request_s * config.parallel.num_schedulers)


def _reasons(
    best: _Way, found: list[_Way], refused: list[tuple[Spread, BoughError]], device: DeviceFacts
) -> Iterator[str]:
    count = len(found) + len(refused)
    yield (
        f"{best.spread.flags}, of {count} ways to use {best.spread.ranks} x {device.name}: {best.tokens_s:,.0f} output "
        f"tokens/s predicted (prompts of {PROMPT_TOKENS:,}, answers of {OUTPUT_TOKENS}), KV of {best.room:,} tokens"
    )
    others = sorted((way for way in found if way is not best), key=lambda way: -way.tokens_s)
    for way in others[:2]:
        yield f"instead of {way.spread.flags}: {way.tokens_s:,.0f} output tokens/s, KV of {way.room:,} tokens"
    if refused:
        spread, error = refused[0]
        more = f" ({len(refused) - 1} other ways neither)" if len(refused) > 1 else ""
        yield f"{spread.flags} can't be had: {error.what}{more}"
