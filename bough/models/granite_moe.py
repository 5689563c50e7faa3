"""Granite 3 with experts (1B-A400M, 3B-A800M), perhaps beside an expert that sees every token."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Gqa, ModelFacts
from bough.models.granite import attention_of, multipliers
from bough.models.hf_names import ATTENTION, ENDS, NORMS, in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping, Split, Stacked


def read(config: Fields) -> ModelFacts:
    return with_experts(config, attention_of(config))


def with_experts(config: Fields, attention: list[Gqa]) -> ModelFacts:
    shared = config.size("shared_intermediate_size", default=0)
    experts = reading.moe(
        config, "num_local_experts", renormalise=True, shared_intermediate=shared, shared_gated=False
    )  # fmt: skip
    return reading.decoder(
        config, attention, [experts] * len(attention), norm=reading.rms_norm(config), **multipliers(config)
    )  # fmt: skip


WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *ATTENTION,
    *in_layers({"block_sparse_moe.router.layer": "mlp.router", "shared_mlp.output_linear": "mlp.shared.down"}),
    Stacked("model.layers.*.block_sparse_moe.input_linear", "layers.*.mlp.experts", parts=("gate", "up")),
    Stacked("model.layers.*.block_sparse_moe.output_linear", "layers.*.mlp.experts", parts=("down",)),
    Split("model.layers.*.shared_mlp.input_linear", "layers.*.mlp.shared.gate_up", parts=("gate", "up")),
)
make = pre_norm
