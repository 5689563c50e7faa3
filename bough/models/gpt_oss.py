"""gpt-oss: a sink beside every head's scores, windows in every other layer, and experts with biases and clamped gates."""

from __future__ import annotations

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ClampedGate, ModelFacts
from bough.models.hf_names import ATTENTION, ENDS, NORMS, in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Exact, Mapping, Stacked


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config, 64)
    bias = config.flag("attention_bias", default=True)
    attention = reading.gqa(
        config,
        width=width,
        windows=reading.windows(config, lambda layer: layer % 2 == 0, default=128),
        ropes=reading.same_rope(config, width, theta=150_000.0, stated=True),
        sinks=True,
        qkv_bias=bias,
        out_bias=bias,
    )
    gate = ClampedGate(
        alpha=config.number("swiglu_alpha", default=1.702), limit=config.number("swiglu_limit", default=7.0)
    )
    experts = reading.moe(config, "num_local_experts", renormalise=True, router_bias=True, clamped=gate)
    norm = reading.rms_norm(config, default=1e-5)
    return reading.decoder(config, attention, [experts] * len(attention), norm=norm)


_EXPERTS = "model.layers.*.mlp.experts"
_TO = "layers.*.mlp.experts"
WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *ATTENTION,
    Exact("model.layers.*.self_attn.sinks", "layers.*.attn.sinks.weight"),
    *in_layers({"mlp.router": "mlp.router"}),
    Stacked(f"{_EXPERTS}.gate_up_proj", _TO, parts=("gate", "up"), inputs_first=True, interleaved=True),
    Stacked(f"{_EXPERTS}.gate_up_proj_bias", _TO, parts=("gate", "up"), interleaved=True, last="bias"),
    Stacked(f"{_EXPERTS}.down_proj", _TO, parts=("down",), inputs_first=True),
    Stacked(f"{_EXPERTS}.gate_up_proj", _TO, parts=("gate", "up"), interleaved=True, mxfp4=True),
    Stacked(f"{_EXPERTS}.down_proj", _TO, parts=("down",), mxfp4=True),
    Stacked(f"{_EXPERTS}.down_proj_bias", _TO, parts=("down",), last="bias"),
)
make = pre_norm
