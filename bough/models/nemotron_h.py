"""Nemotron-H, Nemotron Nano 2 and 3: layers of one part each, which is Mamba 2, attention without positions, or a
feed-forward block or experts of squared ReLU without gates."""

from __future__ import annotations

from typing import Final

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import FeedForward, Mixer, ModelFacts, Moe, NormFacts
from bough.config.state_reading import mamba2
from bough.core.errors import ConfigError, UnsupportedModel
from bough.models.hf_names import BACKBONE, mamba2 as mamba2_names
from bough.models.makers import one_part
from bough.weights.mapping import Exact, Fuse, Mapping, Outside, Rename

_LETTERS: Final = {"M": "state", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS: Final = {
    "mamba": "state", "linear_attention": "state", "attention": "attention", "full_attention": "attention", "mlp": "mlp",
    "moe": "moe",
}  # fmt: skip


def read(config: Fields) -> ModelFacts:
    kinds = _kinds(config)
    config = config.put(num_hidden_layers=len(kinds))
    eps = config.number("layer_norm_epsilon", default=1e-5)
    bias, width = config.flag("use_bias"), reading.head_dim(config, 128)
    inner = config.count("mamba_num_heads") * config.count("mamba_head_dim")
    state = mamba2(config, inner=inner, norm_eps=eps, in_bias=bias, out_bias=bias)
    attention = reading.gqa(config, width=width, ropes=(None,))[0]
    mixers: dict[str, tuple[Mixer, ...]] = {"state": (state,), "attention": (attention,)}
    dense = reading.dense(
        config, activation_key="mlp_hidden_act", default="relu2", gated=False, bias=config.flag("mlp_bias")
    )  # fmt: skip
    ffns: dict[str, FeedForward] = {"mlp": dense}
    if "moe" in kinds:
        ffns["moe"] = _experts(config)
    return reading.decoder(
        config,
        [mixers.get(kind, ()) for kind in kinds],
        [ffns.get(kind) for kind in kinds],
        norm=NormFacts(eps=eps),
        block_norms=1,
    )


def _experts(config: Fields) -> Moe:
    if config.has("moe_latent_size"):
        raise UnsupportedModel(
            what="Nemotron-H with a moe_latent_size can't be served yet",
            why="its experts read a projection of the stream",
            fix="choose one without, such as nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        )
    if config.flag("mlp_bias"):
        raise UnsupportedModel(
            what="Nemotron-H with experts and mlp_bias can't be served",
            why="its shared expert would have biases, which no published checkpoint has",
            fix="choose a checkpoint without",
        )
    return reading.grouped_sigmoid(
        config,
        shared_intermediate=config.count("moe_shared_expert_intermediate_size"),
        activation=reading.activation(config, "mlp_hidden_act", default="relu2"),
        gated=False,
    )


def _kinds(config: Fields) -> list[str]:
    """By layer, from a pattern of letters or a list of names."""
    pattern = config.any("hybrid_override_pattern")
    if config.any("layers_block_type") is None and isinstance(pattern, str) and pattern:
        unknown = sorted(set(pattern) - set(_LETTERS))
        if unknown:
            raise ConfigError(
                what=f"the model's hybrid_override_pattern has {', '.join(unknown)}",
                why=f"known are {', '.join(_LETTERS)}",
                fix="check config.json",
            )
        return [_LETTERS[each] for each in pattern]
    stated = config.any("layers_block_type")
    if not isinstance(stated, list) or not stated:
        raise ConfigError(
            what="the model's config has no hybrid_override_pattern and no layers_block_type",
            why="they say what each layer is",
            fix="check config.json",
        )
    return [_KINDS[each] for each in config.words("layers_block_type", tuple(_KINDS), len(stated)) or ()]


WEIGHTS = Mapping(
    *BACKBONE,
    *mamba2_names("backbone.layers.*.mixer", "layers.*.part"),
    Fuse(
        "layers.*.part.qkv",
        q="backbone.layers.*.mixer.q_proj",
        k="backbone.layers.*.mixer.k_proj",
        v="backbone.layers.*.mixer.v_proj",
    ),
    Rename("backbone.layers.*.mixer.o_proj", "layers.*.part.out"),
    Rename("backbone.layers.*.mixer.up_proj", "layers.*.part.up"),
    Rename("backbone.layers.*.mixer.down_proj", "layers.*.part.down"),
    Rename("backbone.layers.*.mixer.gate", "layers.*.part.router"),
    Exact("backbone.layers.*.mixer.gate.e_score_correction_bias", "layers.*.part.choose.bias"),
    Rename("backbone.layers.*.mixer.experts.*.up_proj", "layers.*.part.experts.*.up"),
    Rename("backbone.layers.*.mixer.experts.*.down_proj", "layers.*.part.experts.*.down"),
    Rename("backbone.layers.*.mixer.shared_experts.up_proj", "layers.*.part.shared.up"),
    Rename("backbone.layers.*.mixer.shared_experts.down_proj", "layers.*.part.shared.down"),
    Outside("mtp"),
)
make = one_part
