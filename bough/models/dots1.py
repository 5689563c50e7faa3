"""dots.llm1: Qwen3's attention and experts chosen as DeepSeek V3 chooses them."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import HeadNorms, ModelFacts
from bough.models.hf_names import ATTENTION, CHOICE_BIAS, ENDS, EXPERTS, FEED_FORWARD, HEAD_NORMS, NORMS, SHARED_EXPERTS
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config)
    norm = reading.rms_norm(config)
    bias = config.flag("attention_bias")
    first = config.size("max_window_layers", default=62)
    attention = reading.gqa(
        config,
        width=width,
        windows=reading.windows(config, lambda layer: layer >= first, default=4096),
        ropes=reading.same_rope(config, width),
        head_norms=HeadNorms(norm=norm),
        qkv_bias=bias,
        out_bias=bias,
    )
    experts = reading.grouped_sigmoid(config, renormalise=config.flag("norm_topk_prob"))
    return reading.decoder(config, attention, reading.dense_first(config, experts), norm=norm)


WEIGHTS = Mapping(
    *ENDS, *NORMS, *ATTENTION, *HEAD_NORMS, *FEED_FORWARD, *EXPERTS, *CHOICE_BIAS, *SHARED_EXPERTS
)  # fmt: skip
make = pre_norm
