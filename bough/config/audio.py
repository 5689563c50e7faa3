"""Audio encoders as configs describe them: Whisper's encoder, and the projector after it in models that contain it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bough.config import reading
from bough.config.fields import Fields
from bough.config.image_facts import processor_fields
from bough.config.media_facts import TowerFacts
from bough.config.model_facts import Dense, NormFacts
from bough.config.tower_facts import TowerBlockFacts

NORM: Final = NormFacts(eps=1e-5, kind="layer", bias=True)
POOLED: Final = 2
"""Tokens of Qwen2-Audio's encoder that become one position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HearingFacts:
    """An encoder like Whisper's. Two frames of the spectrum become one of its tokens."""

    block: TowerBlockFacts
    depth: int
    mels: int
    positions: int
    """Number of learned positions, which is the maximum number of tokens."""
    rate: int
    """Samples per second."""
    window: int
    """Number of samples from which the spectrum of one frame is computed."""
    hop: int
    """Samples between the beginnings of two frames."""

    @property
    def frames(self) -> int:
        """Maximum number of frames of the spectrum."""
        return 2 * self.positions

    @property
    def seconds(self) -> float:
        return self.frames * self.hop / self.rate

    def tower(self, width: int, projector: int = 0, *, merged: int = 1, required: bool = False) -> TowerFacts:
        """The facts for the memory plan. `projector`: parameters of the projector after the encoder; `merged`: tokens
        that become one position; `required`: as `TowerFacts.required`."""
        hidden = self.block.hidden
        convolutions = 3 * self.mels * hidden + hidden + 3 * hidden * hidden + hidden
        own = convolutions + self.positions * hidden + NORM.num_parameters(hidden)
        return TowerFacts(
            kinds=("audio",),
            num_parameters=own + self.depth * self.block.num_parameters() + projector,
            width=width,
            tokens_per_position=merged,
            values_per_token=self.block.values_per_token + 2 * self.mels,
            max_positions=max(1, self.positions // merged),
            required=required,
        )


def merged_tokens(facts: HearingFacts) -> int:
    """Tokens of Voxtral's encoder that become one position: as many as are as wide as its feed-forward blocks inside."""
    return max(1, facts.block.mlp.intermediate // facts.block.hidden)


def read_hearing(config: Fields) -> HearingFacts:
    """The encoder of `audio_config`; without one, that of the config itself."""
    audio = config.inner("audio_config") if config.has("audio_config") else config
    settings = processor_fields(config, "feature_extractor")
    if not settings.has("hop_length"):
        settings = processor_fields(config)  # older files keep them where an image processor's would be
    hidden = audio.count("d_model", "hidden_size", default=1280)
    mlp = Dense(
        intermediate=audio.count("encoder_ffn_dim", "intermediate_size", default=5120),
        activation=audio.choice(reading.ACTIVATIONS, "activation_function", default="gelu"),
        gated=False,
        bias=True,
    )
    heads = audio.count("encoder_attention_heads", "num_attention_heads", default=20)
    return HearingFacts(
        block=TowerBlockFacts(hidden=hidden, num_heads=heads, norm=NORM, mlp=mlp, k_bias=False),
        depth=audio.count("encoder_layers", "num_hidden_layers", default=32),
        mels=audio.count("num_mel_bins", default=128),
        positions=audio.count("max_source_positions", default=1500),
        rate=settings.count("sampling_rate", default=16_000),
        window=settings.count("n_fft", default=400),
        hop=settings.count("hop_length", default=160),
    )
