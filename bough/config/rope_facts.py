"""Rotary positions as a config describes them: base, width and the scaling that stretches the context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from bough.config.fields import Fields
from bough.core.errors import ConfigError, UnsupportedModel

_SHARE: Final = "partial_rotary_factor"
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]

_NEEDS: Final[dict[RopeKind, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFacts:
    """Parameters of rotary positions. Hashable, so that layers with equal parameters share one table."""

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
    share: float = 1.0
    """For "proportional": the share of pairs that are rotated, with the frequencies they would have if all were."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    interleaved: bool = False
    """Adjacent values of a head form a pair, (2i, 2i + 1); otherwise one value of each half, (i, i + rotary_dim /
    2)."""
    backwards: bool = False
    """Pairs are rotated in the opposite direction."""
    sections: tuple[int, ...] = ()
    """Number of frequencies for each axis of a position (mrope: time, height, width); empty: positions have one
    axis."""
    sections_take_turns: bool = False
    """Axes alternate from one frequency to the next while each has any left; otherwise sections are contiguous."""

    @property
    def max_context(self) -> int:
        """Longest sequence that makes sense."""
        if self.kind == "yarn":
            return max(self.max_position, round(self.original_max_position * self.factor))
        if self.kind == "dynamic":
            return round(self.max_position * self.factor)
        return self.max_position


def rope_facts(
    fields: Fields,
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
    sections: tuple[int, ...] = (),
    sections_take_turns: bool = False,
) -> RopeFacts:
    """The rotation of layers of `layer_type` ("full_attention" or "sliding_attention").

    Understands `rope_parameters` (flat, or one set a layer type) and the older `rope_theta`, `rope_scaling`,
    `rope_local_base_freq`. `kinds`: names of scalings that mean something else in this family.
    `rotary_dim`: how much of a head is rotated, whatever the config's share says; `share`: the share where it says none.
    `alpha`: whether a "dynamic" scaling with an `alpha` means a base that is stretched by it, once and for all (Hunyuan).
    `sections`: those of positions with several axes, where the config's `mrope_section` does not say.
    """
    params = _parameters(fields, layer_type, default_theta)
    if alpha and params.has("alpha"):
        stretch = params.positive("alpha") ** (head_dim / max(head_dim - 2, 1))
        params = Fields({"rope_theta": params.positive("rope_theta") * stretch})
    kind = _kind(params, kinds or {})
    for key in _NEEDS[kind]:
        if not params.has(key):
            raise ConfigError(what=f"the model's {kind} rope scaling has no {key}", fix="check config.json")
    max_position = fields.count("max_position_embeddings")
    original = params.whole(
        "original_max_position_embeddings",
        default=fields.whole("original_max_position_embeddings", default=max_position),
    )
    share = params.positive(_SHARE, default=fields.positive(_SHARE, default=share))
    if rotary_dim is None:
        rotary_dim = head_dim if kind == "proportional" else int(head_dim * share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ConfigError(
            what=f"{rotary_dim} values of the model's heads can't be rotated in pairs",
            why=f"heads have {head_dim} values, of which partial_rotary_factor (perhaps in rope_parameters) or rotary_dim "
            "says how many are rotated",
            fix="check config.json",
        )
    facts = RopeFacts(
        kind=kind,
        theta=params.positive("rope_theta"),
        rotary_dim=rotary_dim,
        max_position=max_position,
        original_max_position=original,
        factor=params.positive("factor", default=max_position / original),
        low_freq_factor=params.number("low_freq_factor", default=1.0),
        high_freq_factor=params.number("high_freq_factor", default=4.0),
        beta_fast=params.positive("beta_fast", default=32.0),
        beta_slow=params.positive("beta_slow", default=1.0),
        mscale=params.number("mscale", default=0.0),
        mscale_all_dim=params.number("mscale_all_dim", default=0.0),
        attention_factor=params.number("attention_factor") if params.has("attention_factor") else None,
        truncate=params.flag("truncate", default=True),
        share=share if kind == "proportional" else 1.0,
        short_factor=params.numbers("short_factor") or (),
        long_factor=params.numbers("long_factor") or (),
        interleaved=interleaved,
        backwards=backwards,
        sections=_sections(params, sections) if sections else (),
        sections_take_turns=sections_take_turns,
    )
    if facts.sections and sum(facts.sections) != rotary_dim // 2:
        raise ConfigError(
            what=f"the model's mrope_section is {list(facts.sections)}",
            why=f"its heads have {rotary_dim // 2} frequencies",
            fix="check config.json",
        )
    if kind == "longrope" and not len(facts.short_factor) == len(facts.long_factor) == rotary_dim // 2:
        raise ConfigError(
            what="the model's longrope factors don't fit its heads",
            why=f"{len(facts.short_factor)} short_factor and {len(facts.long_factor)} long_factor for {rotary_dim // 2} "
            "frequencies",
            fix="check config.json",
        )
    if kind in ("llama3", "yarn") and (facts.low_freq_factor == facts.high_freq_factor or facts.theta <= 1):
        raise ConfigError(
            what=f"the model's {kind} rope scaling makes no sense",
            why=f"low_freq_factor {facts.low_freq_factor}, high_freq_factor {facts.high_freq_factor}, "
            f"rope_theta {facts.theta}",
            fix="check config.json",
        )
    return facts


def _parameters(fields: Fields, layer_type: str, default_theta: float) -> Fields:
    new = fields.inner("rope_parameters")
    by_layer = new.has("full_attention") or new.has("sliding_attention")
    params = dict((new.inner(layer_type) if by_layer else new).raw)
    legacy = "rope_local_base_freq" if layer_type == "sliding_attention" else "rope_theta"
    if layer_type != "sliding_attention":
        params = {**fields.inner("rope_scaling").raw, **params}
    theta = Fields(params).positive("rope_theta", default=fields.positive(legacy, default=default_theta))
    return Fields({**params, "rope_theta": theta})


def _sections(params: Fields, default: tuple[int, ...]) -> tuple[int, ...]:
    """The frequencies of each axis of a position: `mrope_section`, or `default` if it is missing."""
    return tuple(params.counts("mrope_section", len(default)) or default)


def _kind(params: Fields, kinds: Mapping[str, RopeKind]) -> RopeKind:
    name = params.any("rope_type", "type") or "default"
    name = kinds.get(name, name) if isinstance(name, str) else name
    for kind in get_args(RopeKind):
        if kind == name:
            return kind  # type: ignore[no-any-return]
    raise UnsupportedModel(
        what=f"the model's rope scaling (rope_type in rope_parameters or rope_scaling) {name!r} is not known",
        why=f"known: {', '.join(get_args(RopeKind))}",
    )
