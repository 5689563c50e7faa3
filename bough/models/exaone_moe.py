"""K-EXAONE: EXAONE 4's attention in Llama's block, and experts chosen as DeepSeek V3 chooses them."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.exaone4 import attention_of
from bough.models.hf_names import ATTENTION, ENDS, EXPERTS, FEED_FORWARD, HEAD_NORMS, NORMS, SHARED_EXPERTS
from bough.models.makers import pre_norm
from bough.weights.mapping import Exact, Mapping, Outside


def read(config: Fields) -> ModelFacts:
    config = config.also(n_shared_experts="num_shared_experts")
    experts = reading.grouped_sigmoid(config, scale=config.number("routed_scaling_factor", default=2.5))
    ffns = reading.dense_first(config, experts, default=1)
    return reading.decoder(config, attention_of(config), ffns, norm=reading.rms_norm(config, default=1e-5))


WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *ATTENTION,
    *HEAD_NORMS,
    *FEED_FORWARD,
    *EXPERTS,
    *SHARED_EXPERTS,
    Exact("model.layers.*.mlp.e_score_correction_bias", "layers.*.mlp.choose.bias"),
    Outside("mtp."),
)
make = pre_norm
