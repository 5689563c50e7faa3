"""The encoder of the Universal Speech Model, as configs describe it. Read by the tower and by processors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bough.config.fields import Fields
from bough.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class UsmFacts:
    """Two convolutions over frames and bands of a spectrum, then conformer blocks over tokens that see their neighbours."""

    mels: int
    hidden: int
    channels: tuple[int, int]
    """Of both convolutions..."""
    sizes: tuple[tuple[int, int], tuple[int, int]]
    """...frames and bands that each sees..."""
    strides: tuple[tuple[int, int], tuple[int, int]]
    """...and from how many on it begins anew."""
    group_eps: float
    """Of the norms behind convolutions."""
    depth: int
    num_heads: int
    left: int
    """Tokens before a token that it sees, beside itself..."""
    right: int
    """...and behind it."""
    cap: float
    """Of scores."""
    kernel: int
    """Tokens that the convolution of a block sees: the last ones."""
    half: float
    """What a feed-forward block counts."""
    reduction: int
    """Tokens of which one becomes a position."""
    eps: float
    """Of norms around the convolutions of blocks."""
    clip: float
    """Activations stay within it."""

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def bands(self) -> int:
        """Behind both convolutions."""
        bands = self.mels
        for (_, size), (_, stride) in zip(self.sizes, self.strides, strict=True):
            bands = (bands + 2 - size) // stride + 1
        return bands

    def tokens(self, frames: int) -> int:
        for stride, _ in self.strides:
            frames = (frames - 1) // stride + 1
        return frames

    def positions(self, frames: int) -> int:
        return -(-self.tokens(frames) // self.reduction)

    def num_parameters(self) -> int:
        hidden, (first, second) = self.hidden, self.channels
        convolutions = first * (math.prod(self.sizes[0]) + 1) + second * (first * math.prod(self.sizes[1]) + 1)
        feed_forward = 8 * hidden * hidden + 2 * hidden
        attention = 5 * hidden * hidden + self.head_dim + 2 * hidden
        convolution = 3 * hidden * hidden + self.kernel * hidden + 2 * hidden
        block = 2 * feed_forward + attention + convolution + hidden
        return convolutions + self.bands * second * hidden + self.depth * block

    @property
    def values_per_token(self) -> int:
        """Keys and values of the tokens that a token sees lie beside each other."""
        return (8 + 2 * (self.left + self.right + 1)) * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class UsmSpectrum:
    """How sounds become what the encoder hears: logarithms of magnitudes in bands of the mel scale."""

    mels: int
    rate: int
    """Samples a second."""
    window: int
    """Samples of a frame."""
    hop: int
    """Samples between the beginnings of two frames."""
    fft: int
    """Samples that a frame is padded to."""
    low: float
    high: float
    """Hertz: where the bands begin and end."""
    preemphasis: float
    """Part of the sample before that is taken from each; 0: none."""
    htk: bool
    """The first sample of a frame is emphasised by itself, as HTK does."""
    scale: float
    """What samples are multiplied by."""
    floor: float
    """Least magnitude of a band."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Of each band; empty: it is not normalised."""

    def frames(self, samples: int) -> int:
        """Of a sound of that many samples. One more than a frame has are needed, for the sample before."""
        return max(0, (samples - self.window - 1) // self.hop + 1)


def read_usm_spectrum(settings: Fields) -> UsmSpectrum:
    """`settings`: those of the checkpoint's feature extractor."""
    rate, mels = settings.count("sampling_rate", default=16_000), settings.count("feature_size", default=128)
    window = settings.count(
        "frame_length", default=round(rate * settings.number("frame_length_ms", default=32.0) / 1e3)
    )
    hop = settings.count("hop_length", default=round(rate * settings.number("hop_length_ms", default=10.0) / 1e3))
    fft = 2 ** math.ceil(math.log2(window)) * (2 if settings.flag("fft_overdrive", default=True) else 1)
    return UsmSpectrum(
        mels=mels,
        rate=rate,
        window=window,
        hop=hop,
        fft=fft,
        low=settings.number("min_frequency", default=125.0),
        high=settings.number("max_frequency", default=7600.0),
        preemphasis=settings.number("preemphasis", default=0.97),
        htk=settings.flag("preemphasis_htk_flavor", default=True),
        scale=settings.number("input_scale_factor", default=1.0),
        floor=settings.positive("mel_floor", default=1e-5),
        mean=settings.numbers("per_bin_mean", mels) or (),
        std=settings.numbers("per_bin_stddev", mels) or (),
    )


def read_usm(audio: Fields) -> UsmFacts:
    """`audio`: the encoder's config. Raises `ConfigError` for one that makes no sense."""
    hidden, heads = audio.count("hidden_size", default=1536), audio.count("conf_num_attention_heads", default=8)
    if hidden % heads or hidden % 2:
        raise ConfigError(
            what=f"the encoder of sounds has {heads} heads for {hidden} values",
            why="each has equally many",
            fix="check audio_config in config.json",
        )
    channels = audio.counts("sscp_conv_channel_size", 2) or [128, 32]
    return UsmFacts(
        mels=audio.count("input_feat_size", default=128),
        hidden=hidden,
        channels=(channels[0], channels[1]),
        sizes=_pairs(audio, "sscp_conv_kernel_size", 3),
        strides=_pairs(audio, "sscp_conv_stride_size", 2),
        group_eps=audio.number("sscp_conv_group_norm_eps", default=1e-3),
        depth=audio.count("conf_num_hidden_layers", default=12),
        num_heads=heads,
        left=max(0, audio.size("conf_attention_context_left", default=13) - 1),
        right=audio.size("conf_attention_context_right", default=0),
        cap=audio.positive("conf_attention_logit_cap", default=50.0),
        kernel=audio.count("conf_conv_kernel_size", default=5),
        half=audio.number("conf_residual_weight", default=0.5),
        reduction=audio.count("conf_reduction_factor", default=4),
        eps=audio.number("rms_norm_eps", default=1e-6),
        clip=audio.positive("gradient_clipping", default=1e10),
    )


def _pairs(audio: Fields, key: str, default: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of both convolutions: along frames and along bands."""
    given = audio.any(key) or ((default, default), (default, default))
    try:
        (a, b), (c, d) = given
    except (TypeError, ValueError):
        a = b = c = d = 0
    if not all(isinstance(each, int) and 1 <= each <= 64 for each in (a, b, c, d)):
        raise ConfigError(
            what=f"audio_config.{key} is {str(given)[:60]}",
            why="it says two whole numbers for each of two convolutions",
            fix="check config.json",
        )
    return (a, b), (c, d)
