"""How Gemma 3n sees and hears, as its config describes it. Read by the towers and by the processor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bough.config.fields import Fields
from bough.config.image_facts import ImageFacts, image_facts, processor_fields
from bough.config.media_facts import TowerFacts
from bough.config.mobilenet import MobileNetFacts, read_mobilenet
from bough.config.usm import UsmFacts, UsmSpectrum, read_usm, read_usm_spectrum
from bough.core.errors import ConfigError

BILINEAR: Final = 2
"""Pillow's number of the filter, as configs name it."""
_ZEROS: Final = (0.0, 0.0, 0.0)
_ONES: Final = (1.0, 1.0, 1.0)
_SAMPLES: Final = 480_000
"""Of a sound at most, as the model was trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaVocabFacts:
    """Tokens of a tower's own, such as those that end an image: their vectors are made as those of its positions are."""

    first: int
    """Id of the first..."""
    count: int
    """...and how many follow it, itself included."""
    width: int
    eps: float
    """Of the norms before and behind the product that brings vectors to the language model's width."""

    def num_parameters(self, out: int) -> int:
        """`out`: width of the language model."""
        return self.count * self.width + 2 * self.width + self.width * out


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3nMedia:
    """Both towers."""

    seeing: MobileNetFacts
    image: ImageFacts
    image_vocab: MediaVocabFacts
    hearing: UsmFacts
    spectrum: UsmSpectrum
    sound_vocab: MediaVocabFacts
    image_positions: int
    sound_positions: int
    """Of every sound: those that it is too short for are filled with the last token of the vocabulary."""
    filler: int
    """Number of that token among those of `sound_vocab`."""

    @property
    def samples(self) -> int:
        """Of a sound, at most."""
        frames = self.sound_positions * self.hearing.reduction
        for stride, _ in self.hearing.strides:
            frames *= stride
        return min(_SAMPLES, self.spectrum.window + 1 + (frames - 1) * self.spectrum.hop)

    def tower(self, width: int) -> TowerFacts:
        """What planning needs to know. `width`: of the language model."""
        vocabularies = self.image_vocab.num_parameters(width) + self.sound_vocab.num_parameters(width)
        return TowerFacts(
            kinds=("image", "audio"),
            num_parameters=self.seeing.num_parameters() + self.hearing.num_parameters() + vocabularies,
            width=width,
            tokens_per_position=max(1, self.seeing.tokens // self.image_positions, self.hearing.reduction),
            values_per_token=max(self.seeing.values_per_token, self.hearing.values_per_token),
            max_positions=max(self.image_positions, self.sound_positions),
        )


def read_gemma3n_media(config: Fields) -> Gemma3nMedia:
    """Raises `ConfigError` for what is not served."""
    vision, audio = config.inner("vision_config"), config.inner("audio_config")
    settings, sounds = processor_fields(config), processor_fields(config, "feature_extractor")
    if not sounds.has("hop_length"):
        sounds = settings  # older files keep both kinds of settings in one place
    size = settings.inner("size")
    height, width = size.count("height", default=768), size.count("width", default=768)
    seeing, hearing, spectrum = read_mobilenet(vision, height), read_usm(audio), read_usm_spectrum(sounds)
    positions = config.count("vision_soft_tokens_per_image", default=256)
    if height != width or positions != seeing.side**2 or spectrum.mels != hearing.mels:
        raise ConfigError(
            what=f"images of {width} x {height} pixels have {positions} positions, and sounds {spectrum.mels} bands",
            why=f"the tower sees squares, which leave {seeing.side**2} positions, and hears {hearing.mels} bands",
            fix="check config.json and preprocessor_config.json",
        )
    images, spoken = _vocabulary(vision, 262_144, 2048), _vocabulary(audio, 262_272, 1536)
    filler = config.count("vocab_size", default=262_400) - 1 - spoken.first
    if spoken.first != images.first + images.count or not 0 <= filler < spoken.count:
        raise ConfigError(
            what=f"tokens of images begin at {images.first}, those of sounds at {spoken.first}",
            why="the last tokens of the vocabulary are those of images, then those of sounds",
            fix="check vocab_offset and vocab_size of vision_config and audio_config in config.json",
        )
    return Gemma3nMedia(
        seeing=seeing,
        image=image_facts(
            settings.put(do_normalize=settings.flag("do_normalize")), mean=_ZEROS, std=_ONES, resample=BILINEAR
        ),
        image_vocab=images,
        hearing=hearing,
        spectrum=spectrum,
        sound_vocab=spoken,
        image_positions=positions,
        sound_positions=config.count("audio_soft_tokens_per_image", default=188),
        filler=filler,
    )


def _vocabulary(part: Fields, first: int, width: int) -> MediaVocabFacts:
    return MediaVocabFacts(
        first=part.count("vocab_offset", default=first),
        count=part.count("vocab_size", default=128),
        width=part.count("hidden_size", default=width),
        eps=part.number("rms_norm_eps", default=1e-6),
    )
