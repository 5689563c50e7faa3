"""StarCoder and SantaCoder: GPT-2 whose heads share one key and value."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.core.errors import UnsupportedModel
from bough.models.gpt2 import ENDS, NORMS, with_attention
from bough.models.hf_names import in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Ignore, Mapping, Split


def read(config: Fields) -> ModelFacts:
    config = config.also(hidden_size="n_embd", num_attention_heads="n_head", num_hidden_layers="n_layer")
    if not config.flag("multi_query", default=True):
        raise UnsupportedModel(what="a GPTBigCode model without multi_query", why="no released checkpoint is one")
    activation = config.any("activation_function") or "gelu_pytorch_tanh"
    config = config.put(num_key_value_heads=1, activation_function=activation)
    ropes = (None,) * reading.num_layers(config)
    return with_attention(config, reading.gqa(config, ropes=ropes, qkv_bias=True, out_bias=True))


WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    Split("transformer.h.*.attn.c_attn", "layers.*.attn.qkv", parts=("q", "k", "v")),
    *in_layers({"attn.c_proj": "attn.out", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}, "transformer.h"),
    Ignore("transformer.h.*.attn"),
)
make = pre_norm
