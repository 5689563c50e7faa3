"""The layers behind a model's last one that its checkpoint brings along to draft with (MTP, NextN).

Each family keeps them under names of its own; what they are made of is a block of the model, a product that joins a state
with an embedding, and three norms.
"""

from __future__ import annotations

from collections.abc import Mapping as Lookup
from typing import Final, NamedTuple

from bough.core.errors import ConfigError
from bough.weights.mapping import Mapping, Rename

_PARTS: Final = ("embed_norm", "hidden_norm", "fc", "norm")


class NextnNames(NamedTuple):
    """Where a family keeps layer i of those that draft, behind n others. `{layer}` stands for n + i, `{number}` for i."""

    block: str
    """What the names of its block's tensors begin with."""
    parts: Lookup[str, str]
    """Whole name of each other part -> what it is."""
    skipped: tuple[str, ...] = ()
    """Copies of what the model has itself, and what is not needed."""


_DEEPSEEK: Final = NextnNames(
    "model.layers.{layer}.",
    {
        "model.layers.{layer}.enorm": "embed_norm",
        "model.layers.{layer}.hnorm": "hidden_norm",
        "model.layers.{layer}.eh_proj": "fc",
        "model.layers.{layer}.shared_head.norm": "norm",
    },
    ("model.layers.{layer}.shared_head.head", "model.layers.{layer}.embed_tokens"),
)
_BAILING: Final = NextnNames(
    "model.layers.{layer}.",
    {
        "model.layers.{layer}.enorm": "embed_norm",
        "model.layers.{layer}.hnorm": "hidden_norm",
        "model.layers.{layer}.eh_proj": "fc",
        "model.layers.{layer}.final_layernorm": "norm",
    },
)
_MIMO: Final = NextnNames(
    "model.mtp_layers.{number}.",
    {
        "model.mtp_layers.{number}.token_layernorm": "embed_norm",
        "model.mtp_layers.{number}.hidden_layernorm": "hidden_norm",
        "model.mtp_layers.{number}.input_proj": "fc",
        "model.mtp_layers.{number}.final_layernorm": "norm",
    },
)
_QWEN_NEXT: Final = NextnNames(
    "mtp.layers.{number}.",
    {
        "mtp.pre_fc_norm_embedding": "embed_norm",
        "mtp.pre_fc_norm_hidden": "hidden_norm",
        "mtp.fc": "fc",
        "mtp.norm": "norm",
    },
)
FAMILIES: Final[Lookup[str, NextnNames]] = {
    "BailingMoeV2ForCausalLM": _BAILING,
    "DeepseekV32ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Glm4MoeForCausalLM": _DEEPSEEK,
    "Glm4MoeLiteForCausalLM": _DEEPSEEK,
    "GlmMoeDsaForCausalLM": _DEEPSEEK,
    "MiMoForCausalLM": _MIMO,
    "Qwen3NextForCausalLM": _QWEN_NEXT,
    "Qwen3_5ForCausalLM": _QWEN_NEXT,
    "Qwen3_5ForConditionalGeneration": _QWEN_NEXT,
    "Qwen3_5MoeForCausalLM": _QWEN_NEXT,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_NEXT,
}
"""By the model's architecture."""


def names_of(architecture: str) -> NextnNames:
    """Raises `ConfigError` for a family without such layers."""
    found = FAMILIES.get(architecture)
    if found is None:
        raise ConfigError(
            what=f"{architecture} has no layers that draft",
            why=f"there are such layers in: {', '.join(sorted(FAMILIES))}",
            fix="choose another --speculative-algorithm",
            param="speculative_algorithm",
        )
    return found


def weights_of(model: Mapping) -> Mapping:
    """Rules for a head whose blocks are named like those of `model`."""
    return Mapping(*model.rules, *(Rename(f"nextn.{part}", part) for part in _PARTS))


def canonical(name: str, names: NextnNames, num_layers: int, number: int) -> str | None:
    """The name of a tensor as `weights_of` has it, where it belongs to head `number` behind `num_layers`; else None."""
    layer = num_layers + number

    def at(pattern: str) -> str:
        return pattern.format(layer=layer, number=number)

    stem, _, last = name.rpartition(".")
    if stem in map(at, names.skipped):
        return None
    for whole, part in names.parts.items():
        if stem == at(whole):
            return f"nextn.{part}.{last}"
    prefix = at(names.block)
    return f"model.layers.{layer}.{name.removeprefix(prefix)}" if name.startswith(prefix) else None
