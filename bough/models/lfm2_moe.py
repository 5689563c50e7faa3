"""LFM2 with experts behind its first layers, chosen by a sigmoid and a bias."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts, Scored
from bough.models.hf_names import in_layers
from bough.models.lfm2 import NAMES, decoder
from bough.models.makers import pre_norm
from bough.weights.mapping import Exact, Mapping


def read(config: Fields) -> ModelFacts:
    experts = reading.moe(
        config,
        "num_experts",
        renormalise=config.flag("norm_topk_prob", default=True),
        scored=Scored(bias="flat" if config.flag("use_expert_bias", default=True) else ""),
        scale=config.number("routed_scaling_factor", default=1.0),
    )
    return decoder(config, reading.dense_first(config.also(first_k_dense_replace="num_dense_layers"), experts, 2))


WEIGHTS = Mapping(
    *NAMES,
    *in_layers(
        {
            "feed_forward.gate": "mlp.router",
            "feed_forward.experts.*.w1": "mlp.experts.*.gate",
            "feed_forward.experts.*.w3": "mlp.experts.*.up",
            "feed_forward.experts.*.w2": "mlp.experts.*.down",
        }
    ),
    Exact("model.layers.*.feed_forward.expert_bias", "layers.*.mlp.choose.bias"),
)
make = pre_norm
