"""Helpers shared by the readers of model configs: attention, windows, rotary positions and feed-forward blocks. A
reader states what is special about its family; these functions read the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from bough.config.fields import Fields
from bough.config.model_facts import (
    Activation,
    Dense,
    FeedForward,
    Gqa,
    Indexer,
    LayerFacts,
    Mixer,
    Mla,
    ModelFacts,
    Moe,
    NormFacts,
    Scored,
    Sparse,
)
from bough.config.rope_facts import RopeFacts, rope_facts
from bough.core.errors import ConfigError

ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
Windows = tuple[int | None, ...]
"""Per layer: number of tokens that a query sees; None: all."""
Ropes = tuple[RopeFacts | None, ...]
"""Per layer: rotary positions; None: none."""


def decoder(
    fields: Fields,
    mixers: Sequence[Mixer | tuple[Mixer, ...]],
    ffns: Sequence[FeedForward | None],
    *,
    norm: NormFacts,
    kv_from: Sequence[int | None] | None = None,
    **extra: Any,
) -> ModelFacts:
    """A decoder with one mixer (or a tuple of several, or of none) and one feed-forward block (or none) a layer. `kv_from`:
    by layer, as in `LayerFacts`. `extra`: further fields of `ModelFacts`."""
    every = [each if isinstance(each, tuple) else (each,) for each in mixers]
    if "max_context" not in extra:
        extra["max_context"] = max_context(fields, [mixer for each in every for mixer in each])
    sources = kv_from or [None] * len(mixers)
    return ModelFacts(
        architecture=fields.architecture(),
        hidden=fields.count("hidden_size"),
        vocab=fields.count("vocab_size"),
        norm=norm,
        layers=tuple(
            LayerFacts(mixers=each, ffn=ffn, kv_from=source)
            for each, ffn, source in zip(every, ffns, sources, strict=True)
        ),
        config=fields.raw,
        **{"tie_embeddings": fields.flag("tie_word_embeddings"), **extra},
    )


_MOST_LAYERS: Final = 10_000
"""Raises `ConfigError` for more layers than any model has: the facts are lists of layers, and would fill memory."""


def num_layers(fields: Fields) -> int:
    count = fields.count("num_hidden_layers")
    if count > _MOST_LAYERS:
        raise ConfigError(
            what=f"the model's config has {count} num_hidden_layers",
            why=f"more than {_MOST_LAYERS} make no sense",
            fix="check config.json",
        )
    return count


def rms_norm(fields: Fields, *, offset: float = 0.0, default: float = 1e-6) -> NormFacts:
    """A norm by the root mean square. `default`: its epsilon where the config names none."""
    return NormFacts(eps=fields.number("rms_norm_eps", default=default), offset=offset)


def layer_norm(fields: Fields, *keys: str, bias: bool = True, offset: float = 0.0, default: float = 1e-5) -> NormFacts:
    """A norm by mean and deviation. `keys`: what may hold its epsilon, which is `default` where none does."""
    return NormFacts(eps=fields.number(*keys, default=default), kind="layer", bias=bias, offset=offset)


def head_dim(fields: Fields, default: int | None = None) -> int:
    """The head dimension; by default the hidden size divided by the number of heads."""
    if default is None:
        default = max(fields.count("hidden_size") // fields.count("num_attention_heads"), 1)
    return fields.count("head_dim", default=default)


def gqa(
    fields: Fields, *, windows: Windows | None = None, ropes: Ropes, width: int | None = None, **extra: Any
) -> list[Gqa]:
    """Attention of every layer. `width`: of a head. `extra`: further fields of `Gqa`, the same in all layers."""
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(
            what=f"the model's config has {heads} attention heads over {kv_heads} key-value heads",
            why="each key-value head must serve the same number of heads",
            fix="check num_attention_heads and num_key_value_heads",
        )
    width = width or head_dim(fields)
    same = {"scale": 1.0 / math.sqrt(width), "causal": is_causal(fields), **extra}
    return [
        Gqa(num_heads=heads, num_kv_heads=kv_heads, head_dim=width, window=window, rope=rope, **same)
        for window, rope in zip(windows or (None,) * len(ropes), ropes, strict=True)
    ]


def mla(fields: Fields, *, rotated: bool = True, interleaved: bool = True, eps: float = 1e-6) -> list[Mla]:
    """Multi-head latent attention (MLA), the same in every layer, with DeepSeek's names. `rotated`: whether positions
    are. `eps`: of norms, where the config names none."""
    if "q_lora_rank" not in fields.raw:
        raise ConfigError(
            what="the model's config has no q_lora_rank",
            why="null would mean that queries are made from the stream",
            fix="check config.json",
        )
    nope, turned = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim")
    rope = None
    scale = (nope + turned) ** -0.5
    if rotated:
        rope = rope_facts(
            fields,
            turned,
            default_theta=10_000.0,
            layer_type="full_attention",
            rotary_dim=turned,
            interleaved=fields.flag("rope_interleave", default=interleaved),
        )
        if rope.kind == "yarn" and rope.mscale_all_dim and rope.factor > 1:
            # Stretched contexts blur attention: scores grow by the square of what cosines would have.
            scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    one = Mla(
        num_heads=fields.count("num_attention_heads"),
        q_rank=fields.count("q_lora_rank") if fields.has("q_lora_rank") else None,
        kv_rank=fields.count("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=turned,
        v_dim=fields.count("v_head_dim"),
        scale=scale,
        norm=rms_norm(fields, default=eps),
        rope=rope,
        bias=fields.flag("attention_bias"),
    )
    return [one] * num_layers(fields)


def sparse(
    fields: Fields, mixers: Sequence[Mla], indexers: Sequence[bool], *, heads: int, interleaved: bool
) -> list[Mla]:
    """MLA with sparse attention: queries attend only to the tokens that an indexer chooses. `indexers`: by layer,
    whether it has one, or takes the choice of the layer before. `heads`: of an indexer, where the config names none.
    `interleaved`: how it rotates."""
    indexer = Indexer(
        num_heads=fields.count("index_n_heads", default=heads),
        head_dim=fields.count("index_head_dim", default=128),
        interleaved=interleaved,
    )
    topk = fields.count("index_topk", default=2048)
    if not indexers[0]:
        raise ConfigError(
            what="the model's config gives its first layer no indexer",
            why="there is no choice of a layer before that it could share",
            fix="check indexer_types in config.json",
        )
    if indexer.head_dim < mixers[0].rope_dim:
        raise ConfigError(
            what=f"the model's config has an index_head_dim of {indexer.head_dim}",
            why=f"the first {mixers[0].rope_dim} numbers (qk_rope_head_dim) are rotated",
            fix="check config.json",
        )
    return [
        replace(mixer, sparse=Sparse(topk=topk, indexer=indexer if own else None))
        for mixer, own in zip(mixers, indexers, strict=True)
    ]


def is_causal(fields: Fields) -> bool:
    """Whether attention is causal: False for decoders that were trained with bidirectional attention (some
    embedders)."""
    return not fields.flag("use_bidirectional_attention") and fields.any("is_causal") is not False


def windows(
    fields: Fields,
    slides: Callable[[int], bool],
    *,
    default: int | None = None,
    opt_in: bool = False,
    layer_types: bool = True,
) -> Windows:
    """The window of each layer: `sliding_window` in those that `layer_types` or, without it, `slides` name.

    `default`: the window where the config doesn't mention it; null means that there is none. `opt_in`: it counts only
    beside a true `use_sliding_window`. `layer_types`: whether the family reads that list.
    """
    layers = range(num_layers(fields))
    window = fields.size("sliding_window", default=0 if "sliding_window" in fields.raw else default or 0) or None
    if window and fields.flag("use_bidirectional_attention"):
        window = window // 2 + 1  # Gemma: what one side sees of a window over both
    if opt_in and not fields.flag("use_sliding_window"):
        window = None
    kinds = checked_layer_types(fields, ("full_attention", "sliding_attention")) if layer_types else None
    if kinds is not None:
        return tuple(window if kinds[layer] == "sliding_attention" else None for layer in layers)
    return tuple(window if window is not None and slides(layer) else None for layer in layers)


def checked_layer_types(fields: Fields, known: Sequence[str]) -> list[str] | None:
    """The config's `layer_types`; None: it has none. Raises `UnsupportedModel` for kinds that are not `known`."""
    return fields.words("layer_types", known, num_layers(fields))


def shared_kv(fields: Fields, kinds: Sequence[str], *, default: int) -> list[int | None]:
    """By layer: the one whose KV it reads. The last `num_kv_shared_layers` read that of the last layer before them of their
    kind, by `kinds`."""
    first = len(kinds) - fields.size("num_kv_shared_layers", default=default)
    sources = {kind: layer for layer, kind in enumerate(kinds[: max(first, 0)])}
    missing = sorted(set(kinds[max(first, 0) :]) - set(sources))
    if missing:
        raise ConfigError(
            what=f"the model's config has {len(kinds) - first} num_kv_shared_layers of {len(kinds)} layers",
            why=f"no layer of the kind {missing[0]} comes before them, whose KV they could read",
            fix="check num_kv_shared_layers and layer_types",
        )
    return [None if layer < first else sources[kind] for layer, kind in enumerate(kinds)]


def every_layer(_layer: int) -> bool:
    return True


def no_layer(_layer: int) -> bool:
    return False


def state_rope(fields: Fields) -> None:
    """Raises `ConfigError` if the config doesn't say how positions are rotated, and all models of its family stretch it."""
    if not fields.has("rope_parameters") and not fields.has("rope_scaling"):
        raise ConfigError(
            what="the model's config has no rope_parameters and no rope_scaling",
            why="models of its family stretch their contexts, each in a way of its own",
            fix="check config.json",
        )


def same_rope(fields: Fields, width: int, *, theta: float = 10_000.0, stated: bool = False, **options: Any) -> Ropes:
    """The same rotary positions in all layers. `width`: of a head; `theta`: the base where the config names none.
    `stated`: the config must say how contexts are stretched."""
    if stated:
        state_rope(fields)
    facts = rope_facts(fields, width, default_theta=theta, layer_type="full_attention", **options)
    return (facts,) * num_layers(fields)


def ropes_by_window(
    fields: Fields, width: int, windows: Windows, *, theta: float = 10_000.0, theta_local: float, **options: Any
) -> Ropes:
    """Layers with a window have their own rotary positions."""
    wide = rope_facts(fields, width, default_theta=theta, layer_type="full_attention", **options)
    local = rope_facts(fields, width, default_theta=theta_local, layer_type="sliding_attention", **options)
    return tuple(wide if window is None else local for window in windows)


def only_in_windows(ropes: Ropes, windows: Windows) -> Ropes:
    """The same, without rotary positions in layers without a window."""
    return tuple(None if window is None else rope for rope, window in zip(ropes, windows, strict=True))


def activation(fields: Fields, *keys: str, default: str = "silu") -> Activation:
    """The function inside feed-forward blocks. `keys`: what may hold its name."""
    return fields.choice(ACTIVATIONS, *(keys or ("hidden_act",)), default=default)


def dense(fields: Fields, *, activation_key: str = "hidden_act", default: str = "silu", **extra: Any) -> Dense:
    """The feed-forward block of dense layers. `default`: the activation where the config names none. `extra`: further
    fields of `Dense`."""
    return Dense(
        intermediate=fields.count("intermediate_size"),
        activation=activation(fields, activation_key, default=default),
        **extra,
    )


def moe(fields: Fields, *count_keys: str, renormalise: bool, **extra: Any) -> Moe:
    """The mixture of experts. `count_keys`: what may hold the number of experts. `extra`: further fields of `Moe`."""
    return Moe(
        num_experts=fields.count(*count_keys),
        experts_per_token=fields.count("num_experts_per_tok", "moe_k"),
        intermediate=fields.count("moe_intermediate_size", "intermediate_size"),
        renormalise=renormalise,
        **{"activation": activation(fields), **extra},
    )


def dense_first(fields: Fields, experts: Moe, default: int = 0) -> list[FeedForward]:
    """Dense in the first `first_k_dense_replace` layers, experts in the others."""
    return [experts if each else dense(fields) for each in sparse_layers(fields, default)]


def sparse_layers(fields: Fields, default: int = 0) -> list[bool]:
    """By layer: whether it has experts. Those of `mlp_layer_types`, or all but the first `first_k_dense_replace`."""
    count = num_layers(fields)
    kinds = fields.words("mlp_layer_types", ("dense", "sparse"), count)
    first = fields.size("first_k_dense_replace", default=default)
    return [kinds[layer] == "sparse" if kinds else layer >= first for layer in range(count)]


def grouped_sigmoid(fields: Fields, **extra: Any) -> Moe:
    """DeepSeek V3's experts: scores by a sigmoid, a bias that only chooses, groups, and shared experts without a gate."""
    shared = fields.size("n_shared_experts", default=0)
    scored = Scored(
        bias="flat",
        groups=fields.count("n_group", default=1),
        kept_groups=fields.count("topk_group", default=1),
    )
    made: dict[str, Any] = {
        "renormalise": fields.flag("norm_topk_prob", default=True),
        "scored": scored,
        "scale": fields.number("routed_scaling_factor", default=1.0),
        "shared_intermediate": shared * fields.count("moe_intermediate_size"),
        "shared_gated": False,
    }
    return moe(fields, "n_routed_experts", "num_local_experts", "num_experts", **{**made, **extra})


def max_context(fields: Fields, mixers: Sequence[Mixer]) -> int:
    """As long as the rotary positions reach; else the number of positions that the config states."""
    reach = [mixer.rope.max_context for mixer in mixers if mixer.rope is not None]
    return max(reach) if reach else fields.count("max_position_embeddings")
