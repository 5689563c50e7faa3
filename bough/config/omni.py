"""Audio encoders of Qwen's Omni models, as their configs describe them. Read by towers and by processors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bough.config import reading
from bough.config.audio import NORM, POOLED, read_hearing
from bough.config.fields import Fields
from bough.config.image_facts import processor_fields
from bough.config.media_facts import TowerFacts
from bough.config.model_facts import Activation
from bough.config.tower_facts import TowerBlockFacts
from bough.core.errors import ConfigError

_KERNEL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniHearing:
    """An encoder over *segments* of audio, which do not attend to one another; convolutions run over chunks of a
    segment."""

    block: TowerBlockFacts
    depth: int
    mels: int
    rate: int
    window: int
    hop: int
    seconds: float
    """Maximum length of the audio, in seconds."""
    chunk: int
    """Frames of the spectrum per chunk, on which convolutions run."""
    segment: int
    """Frames of a segment: a multiple of `chunk`."""
    out: int
    """Width of the language model."""
    channels: int = 0
    """Channels of three 2D convolutions over frames and bands (Qwen3-Omni); 0: two convolutions over frames, and pairs
    of tokens become one position (Qwen2.5-Omni)."""
    activation: Activation = "gelu"
    """Activation between the last two linear layers (Qwen3-Omni)."""

    @property
    def bands(self) -> int:
        """Bands of the spectrum after three convolutions."""
        return shrunk(self.mels, 3)

    def tokens(self, frames: int) -> int:
        """Tokens of the encoder for a segment, or for the shorter last one."""
        if not self.channels:
            return shrunk(frames, 1)
        whole, rest = divmod(frames, self.chunk)
        return whole * shrunk(self.chunk, 3) + shrunk(rest, 3)

    def positions(self, frames: int) -> int:
        return self.tokens(frames) // (1 if self.channels else POOLED)

    def num_parameters(self) -> int:
        hidden, channels = self.block.hidden, self.channels
        total = self.depth * self.block.num_parameters() + NORM.num_parameters(hidden) + (hidden + 1) * self.out
        if not channels:
            return total + _KERNEL * (self.mels + hidden) * hidden + 2 * hidden
        convolutions = _KERNEL**2 * channels * (1 + 2 * channels) + 3 * channels
        return total + convolutions + channels * self.bands * hidden + (hidden + 1) * hidden

    def tower(self) -> TowerFacts:
        """What planning needs to know."""
        return TowerFacts(
            kinds=("audio",),
            num_parameters=self.num_parameters(),
            width=self.out,
            tokens_per_position=1 if self.channels else POOLED,
            values_per_token=self.block.values_per_token + self.channels * self.mels,
            max_positions=self.positions(self.segment),
        )

    def beside(self, seeing: TowerFacts) -> TowerFacts:
        """The facts of this encoder and a vision encoder together."""
        mine = self.tower()
        return replace(
            seeing,
            kinds=(*seeing.kinds, *mine.kinds),
            num_parameters=seeing.num_parameters + mine.num_parameters,
            values_per_token=max(seeing.values_per_token, mine.values_per_token),
            max_positions=max(seeing.max_positions, mine.max_positions),
        )


def shrunk(size: int, convolutions: int) -> int:
    """Size after convolutions with stride 2."""
    for _ in range(convolutions):
        size = (size - 1) // 2 + 1
    return size


def read_omni_hearing(config: Fields, kind: str) -> OmniHearing:
    """`kind`: "2.5" or "3". Raises `ConfigError` for a config that makes no sense."""
    audio, hearing = config.inner("audio_config"), read_hearing(config)
    settings = processor_fields(config, "feature_extractor")
    if not settings.has("hop_length"):
        settings = processor_fields(config)
    chunk = 2 * audio.count("n_window", default=100 if kind == "2.5" else 50)
    segment = chunk if kind == "2.5" else audio.count("n_window_infer", default=800)
    if segment % chunk or (kind == "2.5" and chunk % 4):
        raise ConfigError(
            what=f"the tower hears {segment} frames of sound at once, in chunks of {chunk}",
            why="chunks must be as long as a whole number of positions, and segments as whole chunks",
            fix="check audio_config in config.json",
        )
    return OmniHearing(
        block=replace(hearing.block, k_bias=kind == "3"),
        depth=hearing.depth,
        mels=hearing.mels,
        rate=hearing.rate,
        window=hearing.window,
        hop=hearing.hop,
        seconds=settings.number("chunk_length", default=300.0),
        chunk=chunk,
        segment=segment,
        out=audio.count("output_dim", default=3584),
        channels=audio.count("downsample_hidden_size", default=480) if kind == "3" else 0,
        activation=audio.choice(reading.ACTIVATIONS, "activation_function", default="gelu"),
    )
