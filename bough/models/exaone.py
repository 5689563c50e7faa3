"""EXAONE 3 and 3.5, EXAONE Deep: Llama by names of their own."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Fuse, Ignore, Mapping, Rename


def read(config: Fields) -> ModelFacts:
    config = config.also(
        num_hidden_layers="num_layers", rms_norm_eps="layer_norm_epsilon", hidden_act="activation_function"
    )  # fmt: skip
    width = reading.head_dim(config)
    attention = reading.gqa(config, width=width, ropes=reading.same_rope(config, width))
    norm = reading.rms_norm(config, default=1e-5)
    return reading.decoder(config, attention, [reading.dense(config)] * len(attention), norm=norm)


_ATTENTION = "transformer.h.*.attn.attention"
WEIGHTS = Mapping(
    Rename("transformer.wte", "embed.tokens"),
    Rename("transformer.ln_f", "norm"),
    Rename("lm_head", "head"),
    Fuse("layers.*.attn.qkv", q=f"{_ATTENTION}.q_proj", k=f"{_ATTENTION}.k_proj", v=f"{_ATTENTION}.v_proj"),
    Fuse("layers.*.mlp.gate_up", gate="transformer.h.*.mlp.c_fc_0", up="transformer.h.*.mlp.c_fc_1"),
    *in_layers(
        {"ln_1": "attn_norm", "attn.attention.out_proj": "attn.out", "ln_2": "mlp_norm", "mlp.c_proj": "mlp.down"},
        "transformer.h",
    ),
    Ignore("transformer.h.*.attn.attention.rotary"),
    Ignore("transformer.rotary"),
)
make = pre_norm
