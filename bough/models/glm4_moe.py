"""GLM-4.5, 4.6 and 4.7: dense layers first, then experts chosen as DeepSeek V3 chooses them;
half of each head is rotated."""

from __future__ import annotations

from typing import Any

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import HeadNorms, ModelFacts
from bough.models.hf_names import ATTENTION, CHOICE_BIAS, ENDS, EXPERTS, FEED_FORWARD, HEAD_NORMS, NORMS, SHARED_EXPERTS
from bough.models.makers import pre_norm
from bough.weights.mapping import Beyond, Mapping


def read(config: Fields, *, bias: bool = False, **rope: Any) -> ModelFacts:
    """`bias`: whether queries, keys and values have one, where the config does not say; `rope`: as `reading.same_rope`."""
    width = reading.head_dim(config)
    norm = reading.rms_norm(config, default=1e-5)
    attention = reading.gqa(
        config,
        width=width,
        ropes=reading.same_rope(config, width, share=0.5, **rope),
        qkv_bias=config.flag("attention_bias", default=bias),
        head_norms=HeadNorms(norm=norm) if config.flag("use_qk_norm") else None,
    )
    ffns = reading.dense_first(config, reading.grouped_sigmoid(config), default=1)
    return reading.decoder(config, attention, ffns, norm=norm)


WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *ATTENTION,
    *HEAD_NORMS,
    *FEED_FORWARD,
    *EXPERTS,
    *CHOICE_BIAS,
    *SHARED_EXPERTS,
    Beyond("model.layers"),
)
make = pre_norm
