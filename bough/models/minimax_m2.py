"""MiniMax M2: full attention with norms of all heads together, half of each head rotated;
experts by a sigmoid and a bias."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import HeadNorms, ModelFacts, Scored
from bough.models.hf_names import ATTENTION, BLOCK_SPARSE_EXPERTS, ENDS, HEAD_NORMS, NORMS
from bough.models.makers import pre_norm
from bough.weights.mapping import Exact, Mapping


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config, 128)
    norm = reading.rms_norm(config)
    turned = config.count("rotary_dim") if config.has("rotary_dim") else None
    attention = reading.gqa(
        config,
        width=width,
        ropes=reading.same_rope(config, width, theta=5_000_000.0, rotary_dim=turned, share=0.5),
        head_norms=HeadNorms(norm=norm, over="all heads"),
    )
    experts = reading.moe(config, "num_local_experts", renormalise=True, scored=Scored(bias="flat"))
    return reading.decoder(config, attention, [experts] * len(attention), norm=norm)


WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *ATTENTION,
    *HEAD_NORMS,
    *BLOCK_SPARSE_EXPERTS,
    Exact("model.layers.*.block_sparse_moe.e_score_correction_bias", "layers.*.mlp.choose.bias"),
)
make = pre_norm
