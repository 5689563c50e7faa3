"""Sensible ways to distribute a model over a number of GPUs, which `bough simulate` compares and `--auto-parallel`
chooses from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bough.config.layout import Layout
from bough.config.model_facts import Mla, ModelFacts, Moe
from bough.config.shares import largest_share
from bough.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Spread:
    """Replicas of an engine, each spread over ranks."""

    layout: Layout
    replicas: int = 1

    @property
    def ranks(self) -> int:
        return self.layout.size * self.replicas

    @property
    def flags(self) -> str:
        """As command-line flags, without those that are 1."""
        layout = self.layout
        named = {
            "--tp-size": layout.tp, "--pp-size": layout.pp, "--attn-dp-size": layout.dp, "--attn-cp-size": layout.cp,
            "--ep-size": layout.ep, "--dp-size": self.replicas,
        }  # fmt: skip
        typed = [f"{name} {size}" for name, size in named.items() if size > 1]
        if layout.whole_shared and layout.ep > 1:
            typed.append("--moe-a2a-backend alltoall")
        return " ".join(typed) or "--tp-size 1"


def spreads(facts: ModelFacts, ranks: int, per_machine: int) -> list[Spread]:
    """The ways for exactly `ranks` GPUs, `per_machine` on each machine. Tensor parallelism stays within a machine;
    machines are combined by stages, replicas, or experts."""
    return [each for each in _tried(facts, ranks, per_machine) if _is_possible(facts, each.layout)]


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2


def _tried(facts: ModelFacts, ranks: int, per_machine: int) -> Iterator[Spread]:
    for tp in _powers(min(ranks, per_machine)):
        for pp in _powers(ranks // tp):
            if ranks % (tp * pp) == 0:
                yield Spread(Layout(tp=tp, pp=pp), ranks // (tp * pp))
    if not any(isinstance(layer.ffn, Moe) for layer in facts.layers):
        return
    latents = any(isinstance(mixer, Mla) for mixer in facts.mixers)
    for tp in _powers(ranks):
        if tp == 1 or ranks % tp:
            continue
        for heads in _powers(min(tp, per_machine)):
            if heads == 1 or not latents or heads <= 2:  # latents are whole on every rank that splits heads
                layout = Layout(tp=tp, dp=tp // heads, ep=tp, whole_shared=tp > heads)
                yield Spread(layout, ranks // tp)


def _is_possible(facts: ModelFacts, layout: Layout) -> bool:
    try:
        largest_share(facts, layout)
    except ConfigError:
        return False
    return True
