"""What models that also see have in common: a language model as a part, and a tower beside it.

The config is that of the text (`config.hf.with_text_config`). The language model's tensors are called as those of the text
model, below a prefix that differs between generations of checkpoints; the tower's are below one of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.config.fields import Fields
from bough.config.media_facts import TowerFacts
from bough.config.model_facts import ModelFacts
from bough.core.errors import ConfigError
from bough.weights.mapping import Mapping, Rule, renamed

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.decoder import Decoder
    from bough.layers.tower import Tower

TOWER: Final = "tower."
"""What the names of a tower's slots begin with."""
BODIES: Final = (("model.language_model.", ""), ("language_model.model.", "language_model."), ("model.", ""))
"""Prefixes of the text model's tensors, and of its head's: as transformers writes them now, and as it did before."""
ADAPTER: Final = ".lora_"
"""Part of the names of adapters' slots."""
Part = tuple[Sequence[Rule], Sequence[str]]
"""Rules, and the prefixes that their names may have."""


def seeing_weights(
    text: Mapping,
    tower: Sequence[Rule],
    prefixes: Sequence[str],
    *more: Part,
    bodies: Sequence[tuple[str, str]] = BODIES,
) -> Mapping:
    """The rules of a text model and of a tower for a model made of both. `tower`: with names below one of `prefixes`;
    `more`: further parts; `bodies`: as `BODIES`."""
    rules: list[Rule] = []
    for body, head in bodies:
        rules += [_below(rule, body, head) for rule in text.rules]
    for part, names in ((tower, prefixes), *more):
        for prefix in names:
            rules += [renamed(rule, lambda name, prefix=prefix: prefix + name) for rule in part]  # type: ignore[misc]
    return Mapping(*(rule for at, rule in enumerate(rules) if rule not in rules[:at]))


def _below(rule: Rule, body: str, head: str) -> Rule:
    return renamed(rule, lambda name: head + name if name.startswith("lm_head") else body + name.removeprefix("model."))


def with_tower(
    make: Callable[[ModelFacts, Build], Decoder], tower: Callable[[ModelFacts, Build], Tower]
) -> Callable[[ModelFacts, Build], Decoder]:
    """Makes the language model and, where the facts have one and this rank has the first layers, its tower."""

    def made(facts: ModelFacts, build: Build) -> Decoder:
        decoder = make(facts, build)
        if facts.tower is not None and decoder.pp.rank == 0:
            decoder.tower = tower(facts, build)
        return decoder

    return made


def is_of_adapter(slot: str) -> bool:
    """Whether a slot is one of an adapter."""
    return ADAPTER in slot


def tower_of(config: Fields, tower: TowerFacts) -> TowerFacts | None:
    """The tower's facts, unless the language model is served alone (--language-model-only)."""
    return None if config.flag("language_model_only") else tower


def deepstacked(facts: ModelFacts, layers: int) -> ModelFacts:
    """The facts of a model that gets further features after each of its first `layers` layers."""
    if layers >= facts.num_layers:
        raise ConfigError(
            what=f"the tower has features for {layers} layers, the model has {facts.num_layers}",
            why="they are added after a layer that is not the last",
            fix="check deepstack_visual_indexes in config.json",
        )
    return replace(facts, deepstack=layers)
