"""What BERT's relatives say in their config beyond what decoders do: learned positions, segments, a plain feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from bough.core.errors import UnsupportedModel

PlainActivation = Literal["gelu", "gelu_tanh", "relu", "silu"]

_ACTIVATIONS: Final[dict[str, PlainActivation]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_ROBERTAS: Final = frozenset({"roberta", "xlm-roberta", "camembert"})
ENCODER_TYPES: Final = frozenset({"bert", *_ROBERTAS})
"""Values of `model_type` that are encoders of this kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFacts:
    """The ends and the feed-forward of a BERT-like encoder."""

    activation: PlainActivation
    num_positions: int
    """Rows of the position table..."""
    first_position: int
    """...and the one that a text's first token takes (RoBERTa counts from its padding id on)."""
    num_segments: int
    """Rows of the segment table ("token types")."""
    norm_eps: float

    @property
    def max_context(self) -> int:
        return self.num_positions - self.first_position


def encoder_facts(config: Mapping[str, Any]) -> EncoderFacts | None:
    """None if the config is not that of such an encoder. Raises `UnsupportedModel` for variants that can't be computed."""
    model_type = config.get("model_type")
    if model_type not in ENCODER_TYPES:
        return None
    kind = config.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise UnsupportedModel(
            what=f"the model's positions are {kind!r}",
            why="of this family only absolute positions can be computed",
            fix="choose a checkpoint with absolute positions",
        )
    name = str(config.get("hidden_act") or "gelu")
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            what=f"the model's activation {name!r} is not known", why=f"known: {', '.join(sorted(_ACTIVATIONS))}"
        )
    padding = config.get("pad_token_id")
    return EncoderFacts(
        activation=_ACTIVATIONS[name],
        num_positions=int(config.get("max_position_embeddings") or 512),
        first_position=(1 if padding is None else int(padding)) + 1 if model_type in _ROBERTAS else 0,
        num_segments=int(config.get("type_vocab_size") or 2),
        norm_eps=float(config.get("layer_norm_eps") or 1e-12),
    )
