"""How Phi-4-multimodal sees and hears, as configs describe it, and its adapters. Read by towers and by processors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from bough.config.adapter_facts import AdapterFacts
from bough.config.fields import Fields
from bough.config.image_facts import HALF, processor_fields
from bough.config.media_facts import TowerFacts
from bough.config.model_facts import NormFacts
from bough.config.omni import shrunk
from bough.config.phi4mm_config import ADAPTERS
from bough.config.tower_facts import VitFacts
from bough.config.vit import read_vit
from bough.core.errors import ConfigError

POOL: Final = 2
"""Patches along a side of a position."""
NORM: Final = NormFacts(eps=1e-5, kind="layer", bias=True)
"""Of what hears."""
CHUNK: Final = 500
"""Tokens of a sound that see one another."""
SECONDS: Final = 1800.0
"""Of a sound at most, as its authors summarise them."""
ALONE: Final = 0
BESIDE_IMAGES: Final = 1
"""The second number of a sound's grid: whether there are images in its prompt, too."""
_KERNEL: Final = 3
"""Of the convolutions that shrink a spectrum."""
_SIGLIP: Final[dict[str, Any]] = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "patch_size": 14, "image_size": 448, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
"""What configs don't say, since it is the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformerFacts:
    """An encoder of sound: convolutions that shrink a spectrum in time and in bands, then blocks of a feed-forward part,
    attention, a convolution and another feed-forward part."""

    hidden: int
    num_heads: int
    intermediate: int
    depth: int
    mels: int
    shrinks: int
    """Convolutions, each of which halves the frames and the bands."""
    channels: int
    """Of those convolutions."""
    kernel: int
    """Tokens that a block's convolution sees: its own and those before it."""
    multiplier: int
    """Channels of that convolution, for each value of a token."""
    distances: int
    """Tokens before and behind that have a learned bias of their own."""
    rate: int
    window: int
    hop: int

    @property
    def frames_per_token(self) -> int:
        return int(2**self.shrinks)

    @property
    def bands(self) -> int:
        return shrunk(self.mels, self.shrinks)

    def tokens(self, frames: int) -> int:
        """Tokens for this number of frames of a spectrum. Each is a position."""
        return -(-frames // self.frames_per_token)

    @property
    def most_tokens(self) -> int:
        return self.tokens(int(SECONDS * self.rate) // self.hop)

    def num_parameters(self) -> int:
        hidden, channels, inner = self.hidden, self.channels, self.intermediate
        wide = hidden * self.multiplier
        norm = NORM.num_parameters(hidden)
        feed_forward = norm + (hidden + 1) * 2 * inner + (inner + 1) * hidden
        attention = 4 * (hidden + 1) * hidden
        gates = (hidden + 1) * 2 * hidden + 2 * hidden
        convolution = norm + gates + (self.kernel + 1) * wide + (wide + 1) * hidden + (hidden + 1) * hidden
        block = 2 * feed_forward + attention + convolution + 2 * norm
        first = (_KERNEL**2 + 1) * channels
        further = (self.shrinks - 1) * ((_KERNEL**2 + 1) * channels + (channels + 1) * channels)
        start = 2 * self.mels + first + further + (channels * self.bands + 1) * hidden
        return start + 2 * self.distances * self.num_heads + self.depth * block


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi4Facts:
    """Both towers."""

    vit: VitFacts
    hearing: ConformerFacts
    most_tiles: int
    """Of an image, beside the whole of it."""
    out: int
    """Width of the language model."""
    image_token: int
    audio_token: int
    adapters: tuple[AdapterFacts, ...]

    @property
    def tile(self) -> int:
        """Pixels along a side of a tile."""
        return self.vit.side * self.vit.patch

    @property
    def pooled(self) -> int:
        """Positions along a side of a tile."""
        return self.vit.side // POOL

    def positions(self, rows: int, columns: int) -> int:
        """Of an image with these rows and columns of patches: a mark ends each row, another one stands before the whole
        image, whose rows end in marks, too."""
        rows, columns = -(-rows // POOL), -(-columns // POOL)
        return rows * (columns + 1) + 1 + self.pooled * (self.pooled + 1)

    def adapter(self, name: str) -> int:
        """The number of an adapter; 0: the checkpoint has none of this name."""
        return next((at for at, each in enumerate(self.adapters, 1) if each.name == name), 0)

    def tower(self) -> TowerFacts:
        """What planning needs to know."""
        ear, seeing = self.hearing, self.vit.block.hidden
        projectors = (seeing + 1) * self.out + 2 * (ear.hidden + 1) * self.out + 3 * (self.out + 1) * self.out
        marks = 2 * seeing
        most = max(self.positions(rows * self.vit.side, self.most_tiles // rows * self.vit.side)
                   for rows in range(1, self.most_tiles + 1))  # fmt: skip
        patches = (self.most_tiles + 1) * self.vit.tokens
        largest = max(most, ear.most_tokens)
        heard = 3 * ear.hidden + max(5 * ear.hidden, 4 * ear.intermediate)
        return TowerFacts(
            kinds=("image", "audio"),
            num_parameters=self.vit.num_parameters() + ear.num_parameters() + projectors + marks,
            width=self.out,
            tokens_per_position=-(-max(patches, ear.most_tokens) // largest),
            values_per_token=max(self.vit.values_per_token, heard),
            max_positions=largest,
        )


def read_phi4mm(config: Fields) -> Phi4Facts:
    """Raises `ConfigError` for what is not served."""
    vision, audio, settings = config.inner("vision_config"), config.inner("audio_config"), processor_fields(config)
    layer = vision.any("feature_layer")
    vit = read_vit(config, layer=-2 if layer is None else int(layer), mean=HALF, std=HALF, **_SIGLIP)
    if vit.side % POOL:
        raise ConfigError(
            what=f"tiles have {vit.side} x {vit.side} patches",
            why=f"squares of {POOL} x {POOL} of them become positions",
            fix="check vision_config in config.json",
        )
    return Phi4Facts(
        vit=vit,
        hearing=_hearing(config, audio),
        most_tiles=settings.count("dynamic_hd", default=36),
        out=config.count("hidden_size"),
        image_token=vision.count("image_token_id", default=200_010),
        audio_token=audio.count("audio_token_id", default=200_011),
        adapters=_adapters(config),
    )


def _hearing(config: Fields, audio: Fields) -> ConformerFacts:
    settings = processor_fields(config, "audio_processor")
    if not settings.has("hop_length"):
        settings = processor_fields(config, "feature_extractor")
    for name, least in (("chunk_size", 1), ("downsample_rate", 2)):
        if audio.has(name) and audio.number(name) >= least:
            raise ConfigError(
                what=f"audio_config has {name} {audio.any(name)}",
                why="sounds are heard as a whole, each token a position",
                fix="serve another checkpoint",
            )
    if audio.flag("bias_symmetric"):
        raise ConfigError(
            what="audio_config has bias_symmetric",
            why="tokens before and behind differ",
            fix="serve another checkpoint",
        )
    hidden = audio.count("hidden_size", default=1024)
    for name in ("ext_pw_out_channel", "depthwise_separable_out_channel", "depthwise_seperable_out_channel"):
        if audio.count(name, default=hidden) != hidden:
            raise ConfigError(
                what=f"audio_config has {name} {audio.any(name)}", why=f"tokens are {hidden} wide", fix="serve another"
            )
    for name, known in (("activation", "swish"), ("conv_activation", "swish"), ("conv_glu_type", "swish"),
                        ("nemo_activation", "relu")):  # fmt: skip
        audio.choice({known: known} | ({"silu": "silu"} if known == "swish" else {}), name, default=known)
    reduction = audio.count("time_reduction", default=8)
    if reduction & (reduction - 1) or reduction < 2:
        raise ConfigError(
            what=f"time_reduction is {reduction}", why="convolutions halve the frames", fix="choose a power of two"
        )
    return ConformerFacts(
        hidden=hidden,
        num_heads=audio.count("num_attention_heads", default=16),
        intermediate=audio.count("intermediate_size", default=1536),
        depth=audio.count("num_blocks", default=24),
        mels=audio.count("input_size", default=80),
        shrinks=reduction.bit_length() - 1,
        channels=audio.count("nemo_conv_channels", default=1024),
        kernel=audio.count("kernel_size", default=3),
        multiplier=audio.count("depthwise_multiplier", default=1),
        distances=audio.count("bias_max_distance", default=1000),
        rate=settings.count("sampling_rate", default=16_000),
        window=settings.count("win_length", default=400),
        hop=settings.count("hop_length", default=160),
    )


def _adapters(config: Fields) -> tuple[AdapterFacts, ...]:
    found = []
    for name in ADAPTERS:
        given = config.inner(f"{name}_lora")
        if given.raw:
            rank = given.count("r")
            found.append(AdapterFacts(name=name, rank=rank, scale=given.positive("lora_alpha") / rank))
    return tuple(found)
