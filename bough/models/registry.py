"""Architecture name -> the module that implements it. Modules are imported when asked for.

A module offers `make(facts, build)`, which returns a `Model` without weights, and `WEIGHTS`, the mapping of names. Packages
add their own through the entry point group `bough.models`: the name is the architecture, the value such a module.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, NamedTuple

from bough.config.model_facts import ModelFacts, MoeFacts
from bough.core.errors import ConfigError, UnsupportedModel

if TYPE_CHECKING:  # whoever only asks what there is needs no torch
    from torch import nn

    from bough.layers.build import Build
    from bough.weights.mapping import Mapping

ENTRY_POINTS: Final = "bough.models"
ARCHITECTURES: Final[dict[str, str]] = {
    "LlamaForCausalLM": "bough.models.llama",
    "SmolLM3ForCausalLM": "bough.models.llama",
    "MistralForCausalLM": "bough.models.mistral",
    "Qwen2ForCausalLM": "bough.models.qwen2",
    "Qwen3ForCausalLM": "bough.models.qwen3",
    "Gemma2ForCausalLM": "bough.models.gemma2",
    "Gemma3ForCausalLM": "bough.models.gemma3",
    "Phi3ForCausalLM": "bough.models.phi3",
    "MixtralForCausalLM": "bough.models.mixtral",
    "Qwen2MoeForCausalLM": "bough.models.qwen2_moe",
    "Qwen3MoeForCausalLM": "bough.models.qwen3_moe",
}


class Architecture(NamedTuple):
    """How to make a model and fill it."""

    make: Callable[[ModelFacts, Build], nn.Module]
    weights: Mapping


def module_of(name: str) -> str:
    """The module that implements the architecture `name`; another package's replaces a built-in one of the same name.
    Raises `UnsupportedModel` if there is none. Imports nothing."""
    added = _added()
    path = {**ARCHITECTURES, **added}.get(name)
    if path is None:
        raise UnsupportedModel(
            what=f"no implementation of {name}",
            why=f"there are: {', '.join(sorted({*ARCHITECTURES, *added}))}",
            fix=f"choose another model, or install a package with an entry point {name!r} in the group {ENTRY_POINTS!r}",
        )
    return path


def find_architecture(name: str) -> Architecture:
    """The architecture called `name`. Raises `UnsupportedModel`."""
    path = module_of(name)
    try:
        module = import_module(path)
        return Architecture(module.make, module.WEIGHTS)
    except (ImportError, AttributeError) as error:
        if name not in _added():
            raise
        raise UnsupportedModel(
            what=f"the package that implements {name} can't be used",
            why=f"{path}: {error}",
            fix="it must be a module with make(facts, build) and WEIGHTS; reinstall or remove it",
        ) from error


def _added() -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}


def needs_experts(facts: ModelFacts) -> MoeFacts:
    """The mixture of experts of a model that must have one."""
    if facts.moe is None:
        raise ConfigError(what=f"the config of {facts.architecture} names no experts", fix="check num_experts in it")
    return facts.moe
