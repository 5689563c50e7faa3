"""Vision transformers over tiles, as configs of families describe them. Read by towers and by processors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from bough.config import reading
from bough.config.anyres import NEXT, ONEVISION
from bough.config.fields import Fields
from bough.config.image_facts import CLIP_MEAN, CLIP_STD, HALF, image_facts, processor_fields
from bough.config.model_facts import Dense, NormFacts
from bough.config.tower_facts import NaflexFacts, TowerBlockFacts, VitFacts
from bough.core.errors import ConfigError

CLIP_LARGE: Final[dict[str, Any]] = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "patch_size": 14, "image_size": 336,
}  # fmt: skip
"""Default for configs without these fields."""

_INTERNVL: Final[dict[str, Any]] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "patch_size": 14, "image_size": 448, "hidden_act": "gelu",
}  # fmt: skip

IMAGENET: Final = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

_IDEFICS3: Final[dict[str, Any]] = {
    "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16, "patch_size": 32,
    "image_size": 224,
}  # fmt: skip

_LLAMA4: Final[dict[str, Any]] = {
    "hidden_size": 768, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16,
    "patch_size": 14, "image_size": 448, "hidden_act": "gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip

_COHERE2: Final[dict[str, Any]] = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 27,
    "num_attention_heads": 12, "image_size": 512,
}  # fmt: skip

LANCZOS: Final = 1
BILINEAR: Final = 2

LONGEST: Final = 4 * 364
"""Default edge of a resized image."""


def one_size(vision: Fields, name: str, default: int) -> int:
    """A size that may be given as a pair. Raises `ConfigError` if its parts differ."""
    given = vision.any(name)
    if isinstance(given, list):
        if len(given) != 2 or given[0] != given[1]:
            raise ConfigError(what=f"{name} is {given}", why="tiles and patches must be squares", fix="serve another")
        return vision.put(**{name: given[0]}).count(name)
    return vision.count(name, default=default)


def read_vit(
    config: Fields,
    *,
    layer: int = -1,
    mean: tuple[float, ...] = CLIP_MEAN,
    std: tuple[float, ...] = CLIP_STD,
    resample: int = 3,
    **defaults: Any,
) -> VitFacts:
    """The tower of `vision_config`. `layer`: where features are taken, counted from the end: -1 behind the last block and
    normed, -2 behind the one before. `defaults`: of the family's config. Raises `ConfigError`."""
    vision = config.inner("vision_config")
    vision = vision.put(**{name: value for name, value in defaults.items() if not vision.has(name)})
    clip = vision.any("model_type") == "clip_vision_model"
    hidden, heads = vision.count("hidden_size", default=768), vision.count("num_attention_heads", default=12)
    patch = one_size(vision, "patch_size", 32 if clip else 16)
    side = one_size(vision, "image_size", 224) // patch
    norm = NormFacts(eps=vision.number("layer_norm_eps", default=1e-5 if clip else 1e-6), kind="layer", bias=True)
    depth = vision.count("num_hidden_layers", default=12)
    activation = vision.choice(reading.ACTIVATIONS, "hidden_act", default="quick_gelu" if clip else "gelu_pytorch_tanh")
    return VitFacts(
        block=TowerBlockFacts(
            hidden=hidden,
            num_heads=heads,
            norm=norm,
            mlp=Dense(
                intermediate=vision.count("intermediate_size", default=3072), activation=activation, gated=False, bias=True
            ),
        ),
        depth=depth,
        used=depth + 1 + layer if layer < 0 else layer,
        patch=patch,
        side=side,
        image=image_facts(processor_fields(config), mean=mean, std=std, resample=resample),
        channels=vision.count("num_channels", default=3),
        patch_bias=not clip,
        class_token=clip,
        pre_norm=norm if clip else None,
        post_norm=norm,
        post_used=layer == -1 and not clip,
    )  # fmt: skip


def llava_vit(config: Fields) -> VitFacts:
    """Raises `ConfigError` for what is not served."""
    layer = config.any("vision_feature_layer")
    layer = -2 if layer is None else layer
    if not isinstance(layer, int) or isinstance(layer, bool):
        raise ConfigError(
            what="vision_feature_layer lists several layers", why="features of one are taken", fix="serve another"
        )
    facts = read_vit(config, layer=layer, **CLIP_LARGE)
    if facts.class_token and config.any("vision_feature_select_strategy") == "full":
        raise ConfigError(
            what="vision_feature_select_strategy is full", why="the class token is left out", fix="serve another"
        )
    return facts


def internvl_vit(config: Fields) -> VitFacts:
    vision = config.inner("vision_config")
    if vision.flag("use_qk_norm") or vision.any("norm_type") == "rms_norm":
        raise ConfigError(
            what="the tower norms its heads", why="only towers of 300M parameters are served", fix="serve a smaller one"
        )
    if config.any("vision_feature_layer") not in (None, -1):
        raise ConfigError(what="vision_feature_layer is not -1", why="the last one is taken", fix="serve another")
    facts = read_vit(config, mean=IMAGENET[0], std=IMAGENET[1], **_INTERNVL)
    block = replace(facts.block, scaled=True, qkv_bias=vision.flag("attention_bias"))
    mean_pooled = vision.flag("use_mean_pooling", default=True)
    return replace(
        facts,
        block=block,
        class_token=True,
        post_norm=None if mean_pooled else facts.post_norm,
        post_used=not mean_pooled,
    )


def clip_vit(config: Fields) -> VitFacts:
    """The vision encoder of CLIP itself: all tokens are normalised."""
    return replace(read_vit(config, model_type="clip_vision_model"), post_used=True)


def siglip_vit(config: Fields) -> VitFacts:
    return read_vit(config, mean=HALF, std=HALF, model_type="siglip_vision_model")


def siglip2_naflex(config: Fields) -> NaflexFacts:
    """SigLIP 2's vision encoder over images that keep their aspect ratio."""
    vit = read_vit(config, mean=HALF, std=HALF, resample=BILINEAR, model_type="siglip2_vision_model")
    side = math.isqrt(config.inner("vision_config").count("num_patches", default=256))
    return NaflexFacts(
        block=vit.block,
        depth=vit.depth,
        patch=vit.patch,
        side=side,
        most_patches=processor_fields(config).count("max_num_patches", default=256),
        image=vit.image,
        channels=vit.channels,
    )


def ratio(config: Fields) -> int:
    """Patches along a side of a position."""
    return round(1 / config.positive("downsample_ratio", default=0.5))


def idefics3_vit(config: Fields) -> VitFacts:
    return read_vit(config, mean=HALF, std=HALF, resample=LANCZOS, **_IDEFICS3)


def cohere2_vit(config: Fields) -> VitFacts:
    return read_vit(config, **_COHERE2)


def is_smolvlm(config: Fields) -> bool:
    """Whether it is SmolVLM 2, which takes videos, and not Idefics 3."""
    return bool(config.any("model_type") == "smolvlm")


def llama4_vit(config: Fields) -> VitFacts:
    """Llama 4's vision encoder: 2D rotary positions, and the class token after the patches."""
    vision = config.inner("vision_config")
    theta = vision.inner("rope_parameters").positive("rope_theta", default=vision.positive("rope_theta", default=1e4))
    facts = read_vit(config, mean=HALF, std=HALF, resample=BILINEAR, **_LLAMA4)
    return replace(
        facts,
        block=replace(facts.block, interleaved=True),
        patch_bias=False,
        class_token=True,
        class_last=True,
        pre_norm=facts.block.norm,
        theta=theta,
        coarse_pixels=True,
    )


def shuffled_by(config: Fields) -> int:
    """Patches along a side of a position of Llama 4."""
    return round(1 / config.inner("vision_config").positive("pixel_shuffle_ratio", default=0.5))


def gemma3_vit(config: Fields) -> VitFacts:
    return read_vit(config, mean=HALF, std=HALF, resample=BILINEAR, model_type="siglip_vision_model")


def pooled_by(config: Fields, vit: VitFacts) -> int:
    """Patches along a side of a position. Raises `ConfigError` if tiles can't be cut so."""
    positions = config.count("mm_tokens_per_image", default=256)
    along = math.isqrt(positions)
    if along * along != positions or vit.side % along:
        raise ConfigError(
            what=f"an image of {vit.side} x {vit.side} patches can't have {positions} positions",
            why="each is the mean of a square of patches",
            fix="check mm_tokens_per_image in config.json",
        )
    return vit.side // along


def is_onevision(config: Fields) -> bool:
    return bool(config.any("model_type") == "llava_onevision")


def usual_canvases(config: Fields) -> Sequence[tuple[int, int]]:
    return ONEVISION if is_onevision(config) else NEXT


def anyres_vit(config: Fields) -> VitFacts:
    """LLaVA-NeXT's, and OneVision's, which takes features of SigLIP behind the last block."""
    if not is_onevision(config):
        return llava_vit(config)
    if config.any("vision_feature_layer") not in (None, -1):
        raise ConfigError(what="vision_feature_layer is not -1", why="the last one is taken", fix="serve another")
    defaults = {"patch_size": 14, "image_size": 384, "model_type": "siglip_vision_model"}
    return replace(read_vit(config, **defaults), post_used=False)  # type: ignore[arg-type]
