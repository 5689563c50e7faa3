"""Helpers shared by the readers of configs with Mamba-like layers."""

from __future__ import annotations

import math
from typing import Any, Final

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts, NormFacts
from bough.config.state_facts import Mamba, Mamba2, StateMixer
from bough.core.errors import ConfigError

_SILU: Final = {"silu": None, "swish": None}
KINDS: Final = {"mamba": "state", "linear_attention": "state", "attention": "attention", "full_attention": "attention"}
"""Names of kinds of layers in configs, old and new."""
UNBOUNDED_CONTEXT: Final = 131_072
"""Context length if a config states none; the model itself has no limit."""


def mamba2(fields: Fields, *, inner: int | None = None, norm_eps: float | None, **extra: Any) -> Mamba2:
    """A layer of Mamba 2, under any of the names that families give its sizes. `inner`: inputs of all heads, if the
    config states them. `extra`: further fields of `Mamba2`."""
    check_silu(fields, "mamba_hidden_act", "hidden_act")
    heads = fields.count("mamba_n_heads", "mamba_num_heads", "num_heads")
    groups = fields.count("mamba_n_groups", "n_groups", default=1)
    width_keys = ("mamba_d_head", "mamba_head_dim", "head_dim")
    stated = fields.any(*width_keys) not in (None, "auto")
    if inner is None:
        inner = fields.count("mamba_expand", "expand", default=2) * fields.count("hidden_size")
    width = fields.count(*width_keys) if stated else inner // heads
    if width * heads != inner:
        raise ConfigError(
            what=f"the model's config has {heads} Mamba heads of {width} inputs, which are not {inner}",
            why="a layer's inputs are those of all of its heads",
            fix="check the number of heads, their width, and by how much layers expand the model's width",
        )
    if heads % groups:
        raise ConfigError(
            what=f"the model's config has {heads} Mamba heads in {groups} groups",
            why="each group must have the same number of heads",
            fix="check the number of heads and of groups",
        )
    return Mamba2(
        num_heads=heads,
        head_dim=width,
        num_groups=groups,
        state_dim=fields.count("mamba_d_state", "ssm_state_size", "state_size"),
        conv_width=fields.count("mamba_d_conv", "conv_kernel", default=4),
        conv_bias=fields.flag("mamba_conv_bias", "use_conv_bias", default=True),
        step_limits=_step_limits(fields),
        norm_eps=norm_eps,
        **extra,
    )


def mamba(fields: Fields, *, inner: int | None = None, **extra: Any) -> Mamba:
    """A layer of Mamba, under any of the names that families give its sizes. `inner`: its channels, if the config states
    them. `extra`: further fields of `Mamba`."""
    check_silu(fields, "hidden_act")
    hidden = fields.count("hidden_size")
    if inner is None:
        inner = fields.count("mamba_expand", "expand", default=2) * hidden
    rank_keys = ("mamba_dt_rank", "time_step_rank")
    stated = fields.any(*rank_keys) not in (None, "auto")
    return Mamba(
        inner=inner,
        state_dim=fields.count("mamba_d_state", "state_size", default=16),
        step_rank=fields.count(*rank_keys) if stated else -(-hidden // 16),
        conv_width=fields.count("mamba_d_conv", "conv_kernel", default=4),
        conv_bias=fields.flag("mamba_conv_bias", "use_conv_bias", default=True),
        **extra,
    )


def pure(fields: Fields, state: StateMixer, **extra: Any) -> ModelFacts:
    """A model of nothing but such layers, with Mamba's names. `extra`: further fields of `ModelFacts`."""
    count = reading.num_layers(fields)
    return reading.decoder(
        fields,
        [state] * count,
        [None] * count,
        norm=NormFacts(eps=fields.number("layer_norm_epsilon", default=1e-5)),
        block_norms=1,
        max_context=fields.count("max_position_embeddings", default=UNBOUNDED_CONTEXT),
        **extra,
    )


def check_silu(fields: Fields, *keys: str) -> None:
    """Raises `UnsupportedModel` if another function than SiLU follows the convolution."""
    fields.choice(_SILU, *keys, default="silu")


def _step_limits(fields: Fields) -> tuple[float, float] | None:
    """Limits of the step sizes; None: they are only positive."""
    stated = fields.any("time_step_limit", "mamba_dt_limit")
    if stated is None:
        return None
    limits = [_number(each) for each in stated] if isinstance(stated, list | tuple) else []
    if len(limits) != 2 or None in limits:
        raise ConfigError(
            what=f"the model's time_step_limit {stated!r} makes no sense",
            why="it must be two numbers, of which the second may be infinite",
            fix="check config.json",
        )
    low, high = (each for each in limits if each is not None)
    return None if low <= 0.0 and high == math.inf else (low, high)


def _number(value: object) -> float | None:
    """A number, perhaps an infinite one as transformers writes it: {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        value = value.get("__float__")
    if value in ("Infinity", "inf"):
        return math.inf
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
