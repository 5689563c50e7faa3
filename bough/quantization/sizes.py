"""How much memory quantised weights take, from the configuration and headers alone. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from bough.config.hf import Checkpoint
from bough.config.model_facts import ModelFacts, Moe
from bough.quantization.formats import (
    Awq,
    BitsAndBytes4,
    BitsAndBytes8,
    Eight,
    Four,
    Gptq,
    Online,
    PackedInts,
    WeightFormat,
)
from bough.quantization.names import kv_scale_of, tensor_name
from bough.quantization.read import LayerKind, Rules

_EXAMPLES: dict[LayerKind, str] = {
    "linear": "model.layers.1.self_attn.o_proj",
    "expert": "model.layers.1.mlp.experts.0.down_proj",
    "head": "lm_head",
    "embedding": "model.embed_tokens",
}
"""Layers that are asked for, for a whole kind of them, where no tensors say more."""


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Of a whole model."""

    dense_params: int
    """Weights that are kept as floats."""
    packed_bytes: int = 0
    packed_params: int = 0
    """Weights that are kept quantised, and their number."""


def bits_per_weight(form: WeightFormat) -> float:
    """Of memory, scales included."""
    match form:
        case Eight():
            return (4 if form.bits <= 4 else 8) + (32 / (form.block[0] * form.block[1]) if form.block else 0)
        case Awq() | PackedInts() | Gptq():
            bits = 4 if isinstance(form, Awq) or form.bits <= 4 else 8
            return bits + (24 / form.group if form.group > 0 else 0)
        case Four():
            return 4.5 if form.scales == "mx" else 5
        case BitsAndBytes4():
            return 4.5
        case BitsAndBytes8():
            return 8
        case Online():
            return {"int4": 4 + 40 / form.group, "mxfp4": 4.5, "mxfp8": 8.5}.get(form.to, 8.0)


def weight_sizes(checkpoint: Checkpoint, facts: ModelFacts, rules: Rules) -> WeightSizes:
    """What the weights take if they are kept as `rules` say."""
    if checkpoint.kind != "safetensors" or isinstance(rules.of(_EXAMPLES["linear"], "linear"), Online):
        return _by_arithmetic(facts, rules)
    dense = packed_bytes = packed = 0
    for name, stored in checkpoint.tensors.items():
        if kv_scale_of(name) is not None:
            continue
        layer, _, last = tensor_name(name).rpartition(".")
        kind = _kind_of(layer)
        form = rules.of(layer, kind)
        count = 1
        for size in stored.shape:
            count *= size
        if form is None or last.endswith("bias") or ".lora_" in layer:
            dense += count
            continue
        if last in ("weight", "qweight", "weight_packed") or last.endswith("blocks"):
            weights = round(stored.nbytes * 8 / _stored_bits(form))
            packed += weights
            packed_bytes += weights * _kept_bits(form) // 8
        else:
            packed_bytes += stored.nbytes
    return WeightSizes(dense, packed_bytes, packed)


def _stored_bits(form: WeightFormat) -> float:
    """Bits of a weight in a file, scales not counted."""
    match form:
        case PackedInts() | Gptq():
            return form.bits
        case Awq() | Four() | BitsAndBytes4():
            return 4
    return 8


def _kept_bits(form: WeightFormat) -> int:
    """Bits of a weight in memory, scales not counted."""
    small = form.bits <= 4 if isinstance(form, Eight) else _stored_bits(form) <= 4
    return 4 if small else 8


def _kind_of(layer: str) -> LayerKind:
    if layer.endswith("lm_head"):
        return "head"
    if ".experts." in layer or layer.endswith(".experts"):
        return "expert"
    return "embedding" if "embed" in layer.rsplit(".", 1)[-1] else "linear"


def _by_arithmetic(facts: ModelFacts, rules: Rules) -> WeightSizes:
    """From the model's shapes: of a configuration alone, or of floats that will be quantised."""
    table = facts.vocab * facts.hidden
    moes = [layer.ffn for layer in facts.layers if isinstance(layer.ffn, Moe)]
    experts = sum(3 * facts.hidden * moe.intermediate * moe.num_experts for moe in moes)
    head = 0 if facts.tie_embeddings else table
    counts: dict[LayerKind, int] = {
        "embedding": table,
        "head": head,
        "expert": experts,
        "linear": max(0, facts.num_parameters() - table - head - experts - facts.adapter_parameters),
    }
    dense, packed = facts.adapter_parameters, 0
    packed_bytes = 0.0
    for kind, count in counts.items():
        form = rules.of(_EXAMPLES[kind], kind)
        if form is None:
            dense += count
        else:
            packed += count
            packed_bytes += count * bits_per_weight(form) / 8
    return WeightSizes(dense, round(packed_bytes), packed)
