"""Rotary positions as a config describes them: base, width and the scaling that stretches the context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from bough.core.errors import ConfigError, UnsupportedModel

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]

_NEEDS: Final[dict[RopeKind, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFacts:
    """One way to rotate. Hashable, so that layers that rotate alike share one table."""

    kind: RopeKind
    theta: float
    rotary_dim: int
    """How much of a head is rotated."""
    max_position: int
    """`max_position_embeddings` of the config."""
    original_max_position: int
    """The length the model was trained on before it was stretched."""
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    interleaved: bool = False
    """Neighbouring values of a head make a pair, (2i, 2i + 1); otherwise one of each half, (i, i + rotary_dim / 2)."""
    backwards: bool = False
    """Pairs turn the other way."""

    @property
    def max_context(self) -> int:
        """Longest sequence that makes sense."""
        if self.kind == "yarn":
            return max(self.max_position, round(self.original_max_position * self.factor))
        if self.kind == "dynamic":
            return round(self.max_position * self.factor)
        return self.max_position


def rope_facts(
    config: Mapping[str, Any],
    head_dim: int,
    *,
    default_theta: float,
    layer_type: str,
    kinds: Mapping[str, RopeKind] | None = None,
    rotary_dim: int | None = None,
    share: float = 1.0,
    interleaved: bool = False,
    backwards: bool = False,
    alpha: bool = False,
) -> RopeFacts:
    """The rotation of layers of `layer_type` ("full_attention" or "sliding_attention").

    Understands `rope_parameters` (flat, or one set a layer type) and the older `rope_theta`, `rope_scaling`,
    `rope_local_base_freq`. `kinds`: names of scalings that mean something else in this family.
    `rotary_dim`: how much of a head is rotated, whatever the config's share says; `share`: the share where it says none.
    `alpha`: whether a "dynamic" scaling with an `alpha` means a base that is stretched by it, once and for all (Hunyuan).
    """
    params = _parameters(config, layer_type, default_theta)
    if alpha and params.get("alpha"):
        stretch = float(params["alpha"]) ** (head_dim / (head_dim - 2))
        params = {"rope_theta": float(params["rope_theta"]) * stretch}
    kind = _kind(params, kinds or {})
    for key in _NEEDS[kind]:
        if params.get(key) is None:
            raise ConfigError(what=f"the model's {kind} rope scaling has no {key}", fix="check config.json")
    max_position = int(config.get("max_position_embeddings") or 2048)
    original = int(
        params.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or max_position
    )
    if rotary_dim is None:
        share = float(params.get("partial_rotary_factor") or config.get("partial_rotary_factor") or share)
        rotary_dim = int(head_dim * share)
    attention_factor = params.get("attention_factor")
    facts = RopeFacts(
        kind=kind,
        theta=float(params["rope_theta"]),
        rotary_dim=rotary_dim,
        max_position=max_position,
        original_max_position=original,
        factor=float(params.get("factor") or max_position / original),
        low_freq_factor=float(params.get("low_freq_factor") or 1.0),
        high_freq_factor=float(params.get("high_freq_factor") or 4.0),
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        mscale=float(params.get("mscale") or 0.0),
        mscale_all_dim=float(params.get("mscale_all_dim") or 0.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        truncate=bool(params.get("truncate", True)),
        short_factor=tuple(float(value) for value in params.get("short_factor") or ()),
        long_factor=tuple(float(value) for value in params.get("long_factor") or ()),
        interleaved=interleaved,
        backwards=backwards,
    )
    if kind == "longrope" and not len(facts.short_factor) == len(facts.long_factor) == rotary_dim // 2:
        raise ConfigError(
            what="the model's longrope factors don't fit its heads",
            why=f"{len(facts.short_factor)} short and {len(facts.long_factor)} long ones for {rotary_dim // 2} frequencies",
            fix="check config.json",
        )
    return facts


def _parameters(config: Mapping[str, Any], layer_type: str, default_theta: float) -> dict[str, Any]:
    new = config.get("rope_parameters") or {}
    by_layer = "full_attention" in new or "sliding_attention" in new
    params = dict((new.get(layer_type) or {}) if by_layer else new)
    legacy_theta = config.get("rope_theta")
    if layer_type == "sliding_attention":
        legacy_theta = config.get("rope_local_base_freq")
    else:
        params = {**(config.get("rope_scaling") or {}), **params}
    params["rope_theta"] = params.get("rope_theta") or legacy_theta or default_theta
    return params


def _kind(params: Mapping[str, Any], kinds: Mapping[str, RopeKind]) -> RopeKind:
    name = params.get("rope_type") or params.get("type") or "default"
    name = kinds.get(name, name)
    for kind in get_args(RopeKind):
        if kind == name:
            return kind  # type: ignore[no-any-return]
    raise UnsupportedModel(
        what=f"the model's rope scaling {name!r} is not known", why=f"known: {', '.join(get_args(RopeKind))}"
    )
