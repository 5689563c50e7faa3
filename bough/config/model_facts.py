"""What a checkpoint's config says about the model, in one vocabulary: what plans are made and models are built from.

Config files of different ages and families name the same things differently or leave out what was their class's default;
`model_facts` reads all of them into one `ModelFacts`. Models never look at raw keys that a fact covers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from bough.config.encoder_facts import EncoderFacts, encoder_facts
from bough.config.rope_facts import RopeFacts, rope_facts
from bough.core.errors import ConfigError, UnsupportedModel

Activation = Literal["silu", "gelu_tanh"]
WindowRule = Literal["none", "all", "even layers", "but every nth", "from max_window_layers", "nope layers"]

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeFacts:
    """The mixture of experts."""

    num_experts: int
    experts_per_token: int
    intermediate: int
    """Width inside one expert."""
    shared_intermediate: int
    """Width inside the expert that sees every token; 0: there is none."""
    renormalise: bool
    """Whether the chosen experts' weights are made to sum to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A language model: a decoder, or an encoder of BERT's kind."""

    architecture: str
    model_type: str
    num_layers: int
    hidden: int
    intermediate: int
    """Width inside the dense feed-forward block."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    activation: Activation
    """Of gated feed-forward blocks."""
    tie_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    windows: tuple[int | None, ...]
    """By layer: how many tokens a query sees, its own included; None: all."""
    ropes: tuple[RopeFacts | None, ...]
    """By layer: how positions are rotated; None: not at all."""
    max_context: int
    moe: MoeFacts | None
    sparse_layers: tuple[bool, ...]
    """By layer: whether its feed-forward block is the mixture of experts."""
    bidirectional: bool = False
    """Every token sees every other, so a text can only be computed in one piece."""
    encoder: EncoderFacts | None = None
    """What only encoders of BERT's kind have."""
    config: Mapping[str, Any]
    """The config as it was read, for architectures with facts of their own."""

    def num_parameters(self) -> int:
        """Weights of the model, by arithmetic on its shapes; biases and norms of heads are too few to count."""
        attention = self.hidden * self.head_dim * 2 * (self.num_heads + self.num_kv_heads) + 2 * self.hidden
        dense = (3 if self.encoder is None else 2) * self.hidden * self.intermediate
        total = self.vocab * self.hidden * (1 if self.tie_embeddings else 2) + self.hidden
        for sparse in self.sparse_layers:
            total += attention
            if sparse and self.moe is not None:
                total += 3 * self.hidden * self.moe.intermediate * self.moe.num_experts
                total += self.hidden * (self.moe.num_experts + 3 * self.moe.shared_intermediate)
                total += self.hidden if self.moe.shared_intermediate else 0
            else:
                total += dense
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What a family's config files may leave unsaid."""

    theta: float = 10_000.0
    theta_local: float | None = None
    """For families that rotate windowed layers with a base of their own."""
    tied: bool = False
    qkv_bias: bool | str = "attention_bias"
    """The value, or the key that holds it."""
    out_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    windows: WindowRule = "none"
    window_is_opt_in: bool = False
    """Whether `sliding_window` counts only beside a true `use_sliding_window`."""
    layer_types: bool = True
    """Whether the family reads `layer_types`."""
    activation_key: str = "hidden_act"
    head_dim: int | None = None
    num_experts_key: str = "num_experts"
    renormalise: bool | str = "norm_topk_prob"


_PLAIN: Final = _Family()
_FAMILIES: Final[dict[str, _Family]] = {
    "llama": _Family(mlp_bias="mlp_bias", layer_types=False),
    "smollm3": _Family(theta=2_000_000.0, tied=True, mlp_bias="mlp_bias", windows="nope layers", window_is_opt_in=True),
    "mistral": _Family(qkv_bias=False, out_bias=False, windows="all"),
    "qwen2": _Family(qkv_bias=True, out_bias=False, windows="from max_window_layers", window_is_opt_in=True),
    "qwen3": _Family(windows="from max_window_layers", window_is_opt_in=True, head_dim=128),
    "gemma2": _Family(tied=True, windows="even layers", activation_key="hidden_activation", head_dim=256),
    "gemma3_text": _Family(
        theta=1_000_000.0,
        theta_local=10_000.0,
        tied=True,
        windows="but every nth",
        activation_key="hidden_activation",
        head_dim=256,
    ),
    "bert": _Family(tied=True, qkv_bias=True, out_bias=True, mlp_bias=True),
    "roberta": _Family(tied=True, qkv_bias=True, out_bias=True, mlp_bias=True),
    "xlm-roberta": _Family(tied=True, qkv_bias=True, out_bias=True, mlp_bias=True),
    "camembert": _Family(tied=True, qkv_bias=True, out_bias=True, mlp_bias=True),
    "phi3": _Family(qkv_bias=False, out_bias=False, windows="all"),
    "mixtral": _Family(
        theta=1_000_000.0,
        qkv_bias=False,
        out_bias=False,
        windows="all",
        num_experts_key="num_local_experts",
        renormalise=True,
    ),
    "qwen2_moe": _Family(qkv_bias="qkv_bias", out_bias=False, windows="even layers", window_is_opt_in=True),
    "qwen3_moe": _Family(windows="all", window_is_opt_in=True, layer_types=False),
}


def model_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Reads a config in Hugging Face's form. Raises ConfigError naming what is missing or makes no sense."""
    model_type = str(config.get("model_type") or "")
    family = _FAMILIES.get(model_type, _PLAIN)
    encoder = encoder_facts(config)
    num_layers = _count(config, "num_hidden_layers")
    hidden = _count(config, "hidden_size")
    num_heads = _count(config, "num_attention_heads")
    num_kv_heads = _count(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            what=f"the model's config has {num_heads} attention heads over {num_kv_heads} key-value heads",
            why="each key-value head must serve the same number of heads",
            fix="check num_attention_heads and num_key_value_heads",
        )
    head_dim = _count(config, "head_dim", family.head_dim or max(hidden // num_heads, 1))
    moe = _moe(config, family)
    has_rope = _rope_layers(config, model_type, num_layers) if encoder is None else (False,) * num_layers
    windows = _windows(config, family, has_rope)
    ropes = _ropes(config, family, head_dim, windows, has_rope)
    return ModelFacts(
        architecture=_architecture(config),
        model_type=model_type,
        num_layers=num_layers,
        hidden=hidden,
        intermediate=_count(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab=_count(config, "vocab_size"),
        norm_eps=float(config.get("rms_norm_eps") or 1e-6) if encoder is None else encoder.norm_eps,
        activation=_activation(config, family) if encoder is None else "gelu_tanh",
        tie_embeddings=bool(config.get("tie_word_embeddings", family.tied)),
        qkv_bias=_flag(config, family.qkv_bias, default=model_type == "qwen2_moe"),
        out_bias=_flag(config, family.out_bias),
        mlp_bias=_flag(config, family.mlp_bias),
        attention_scale=_attention_scale(config, model_type, head_dim),
        attention_softcap=_softcap(config, "attn_logit_softcapping", 50.0 if model_type == "gemma2" else None),
        logit_softcap=_softcap(config, "final_logit_softcapping", 30.0 if model_type == "gemma2" else None),
        windows=windows,
        ropes=ropes,
        max_context=_max_context(config, ropes) if encoder is None else encoder.max_context,
        moe=moe,
        sparse_layers=_sparse_layers(config, moe, num_layers),
        bidirectional=encoder is not None or _bidirectional(config),
        encoder=encoder,
        config=config,
    )


def _bidirectional(config: Mapping[str, Any]) -> bool:
    """Whether a decoder's checkpoint was trained to look both ways (embedders made of decoders are)."""
    return bool(config.get("use_bidirectional_attention")) or config.get("is_causal") is False


def _max_context(config: Mapping[str, Any], ropes: tuple[RopeFacts | None, ...]) -> int:
    return max((rope.max_context for rope in ropes if rope), default=_count(config, "max_position_embeddings"))


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    raise UnsupportedModel(
        what="the model's config names no architecture",
        why='config.json has no "architectures" list',
        fix="""add it, for example with --json-model-override-args '{"architectures": ["LlamaForCausalLM"]}'""",
    )


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, int) and value > 0:
        return value
    raise ConfigError(
        what=f"the model's config has {'no' if value is None else 'a senseless'} {key}",
        why="" if value is None else f"it is {value!r} and must be a positive whole number",
        fix="check config.json, or set it with --json-model-override-args",
    )


def _flag(config: Mapping[str, Any], rule: bool | str, default: bool = False) -> bool:
    return rule if isinstance(rule, bool) else bool(config.get(rule, default))


def _softcap(config: Mapping[str, Any], key: str, default: float | None) -> float | None:
    value = config.get(key, default)
    return float(value) if value else None


def _activation(config: Mapping[str, Any], family: _Family) -> Activation:
    default = "gelu_pytorch_tanh" if family.activation_key == "hidden_activation" else "silu"
    name = config.get(family.activation_key) or default
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            what=f"the model's activation {name!r} is not known", why=f"known: {', '.join(sorted(_ACTIVATIONS))}"
        )
    return _ACTIVATIONS[name]


def _attention_scale(config: Mapping[str, Any], model_type: str, head_dim: int) -> float:
    default = 256 if model_type.startswith("gemma") else head_dim
    return 1.0 / math.sqrt(float(config.get("query_pre_attn_scalar") or default))


def _rope_layers(config: Mapping[str, Any], model_type: str, num_layers: int) -> tuple[bool, ...]:
    """By layer: whether positions are rotated (SmolLM3 leaves every fourth layer without)."""
    flags = config.get("no_rope_layers")
    if model_type != "smollm3":
        return (True,) * num_layers
    if flags:
        return tuple(bool(flag) for flag in flags[:num_layers])
    interval = _count(config, "no_rope_layer_interval", 4)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def _windows(config: Mapping[str, Any], family: _Family, has_rope: tuple[bool, ...]) -> tuple[int | None, ...]:
    layers = range(len(has_rope))
    window = config.get("sliding_window")
    if window and config.get("use_bidirectional_attention"):
        window = window // 2 + 1  # Gemma: what one side sees of a window over both
    if not window or (family.window_is_opt_in and not config.get("use_sliding_window", False)):
        window = None
    kinds = config.get("layer_types") if family.layer_types else None
    if kinds:
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown or len(kinds) < len(has_rope):
            raise UnsupportedModel(
                what="the model's layer_types can't be served",
                why=f"unknown: {', '.join(unknown)}" if unknown else f"{len(kinds)} for {len(has_rope)} layers",
            )
        return tuple(window if kinds[layer] == "sliding_attention" else None for layer in layers)
    if window is None or family.windows == "none":
        return (None,) * len(has_rope)
    every = _count(config, "sliding_window_pattern", 6) if family.windows == "but every nth" else 0
    first = config.get("max_window_layers") or 0
    rules: dict[str, Callable[[int], bool]] = {
        "all": lambda layer: True,
        "even layers": lambda layer: layer % 2 == 0,
        "but every nth": lambda layer: (layer + 1) % every != 0,
        "from max_window_layers": lambda layer: layer >= first,
        "nope layers": lambda layer: not has_rope[layer],
    }
    slides = rules[family.windows]
    return tuple(window if slides(layer) else None for layer in layers)


def _ropes(
    config: Mapping[str, Any],
    family: _Family,
    head_dim: int,
    windows: tuple[int | None, ...],
    has_rope: tuple[bool, ...],
) -> tuple[RopeFacts | None, ...]:
    wide = rope_facts(config, head_dim, default_theta=family.theta, layer_type="full_attention")
    local = wide
    if family.theta_local is not None:
        local = rope_facts(config, head_dim, default_theta=family.theta_local, layer_type="sliding_attention")
    return tuple(
        (wide if window is None else local) if rotated else None
        for window, rotated in zip(windows, has_rope, strict=True)
    )


def _moe(config: Mapping[str, Any], family: _Family) -> MoeFacts | None:
    num_experts = config.get(family.num_experts_key) or config.get("num_local_experts") or 0
    if not num_experts:
        return None
    return MoeFacts(
        num_experts=int(num_experts),
        experts_per_token=_count(config, "num_experts_per_tok"),
        intermediate=_count(config, "moe_intermediate_size", _count(config, "intermediate_size")),
        shared_intermediate=int(config.get("shared_expert_intermediate_size") or 0),
        renormalise=_flag(config, family.renormalise),
    )


def _sparse_layers(config: Mapping[str, Any], moe: MoeFacts | None, num_layers: int) -> tuple[bool, ...]:
    if moe is None:
        return (False,) * num_layers
    dense = set(config.get("mlp_only_layers") or ())
    step = _count(config, "decoder_sparse_step", 1)
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
