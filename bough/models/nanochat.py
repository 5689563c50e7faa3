"""nanochat: norms without weights before everything, also of embeddings; heads are rotated backwards, then normed; a
feed-forward of squared ReLU and capped logits."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import HeadNorms, ModelFacts, NormFacts
from bough.models.gemma2 import softcap
from bough.models.hf_names import ATTENTION, ENDS, in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Mapping


def read(config: Fields) -> ModelFacts:
    norm = NormFacts(eps=config.number("rms_norm_eps", default=1e-6), weight=False)
    bias = config.flag("attention_bias")
    attention = reading.gqa(
        config,
        ropes=reading.same_rope(config, reading.head_dim(config), backwards=True),
        head_norms=HeadNorms(norm=norm, after_rope=True),
        qkv_bias=bias,
        out_bias=bias,
    )
    return reading.decoder(
        config,
        attention,
        [reading.dense(config, default="relu2", gated=False)] * len(attention),
        norm=norm,
        embed_norm=True,
        logit_softcap=softcap(config, "final_logit_softcapping", 15.0),
    )


WEIGHTS = Mapping(*ENDS, *ATTENTION, *in_layers({"mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down"}))
make = pre_norm
