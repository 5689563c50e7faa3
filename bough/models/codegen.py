"""CodeGen: GPT-J's block; queries, values and keys lie in four groups, one for each of the chips it was trained on."""

from __future__ import annotations

from bough.models.gptj import make, read
from bough.models.hf_names import in_layers
from bough.weights.mapping import Ignore, Mapping, Rename, Split

__all__ = ["WEIGHTS", "make", "read"]

WEIGHTS = Mapping(
    Rename("transformer.wte", "embed.tokens"),
    Rename("transformer.ln_f", "norm"),
    Rename("lm_head", "head"),
    Split("transformer.h.*.attn.qkv_proj", "layers.*.attn.qkv", parts=("q", "v", "k"), groups=4),
    *in_layers(
        {"ln_1": "attn_norm", "attn.out_proj": "attn.out", "mlp.fc_in": "mlp.up", "mlp.fc_out": "mlp.down"},
        "transformer.h",
    ),
    Ignore("transformer.h.*.attn"),
)
