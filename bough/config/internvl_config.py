"""Translates configs of InternVL's own checkpoints (`InternVLChatModel`) to the fields of transformers' class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from bough.core.errors import ConfigError

OWN: Final = "InternVLChatModel"
_PLACEHOLDER: Final = "<IMG_CONTEXT>"
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MOST_BYTES: Final = 64 * 2**20


def from_own(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The config as transformers would write it; other configs are returned unchanged. Raises `ConfigError`."""
    if config.get("architectures") != [OWN]:
        return config
    text, vision = config.get("llm_config"), config.get("vision_config")
    if not isinstance(text, dict) or not isinstance(vision, dict):
        raise ConfigError(
            what="config.json has no llm_config or vision_config", why=f"{OWN} has both", fix="download it again"
        )
    side = config.get("force_image_size") or vision.get("image_size", 448)
    settings = {
        "size": {"height": side, "width": side}, "image_mean": list(_MEAN), "image_std": list(_STD), "resample": 3,
        "crop_to_patches": bool(config.get("dynamic_image_size", True)),
        "min_patches": config.get("min_dynamic_patch", 1), "max_patches": config.get("max_dynamic_patch", 12),
    }  # fmt: skip
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "text_config": text,
        "vision_config": {
            **vision,
            "image_size": side,
            "attention_bias": vision.get("qkv_bias", True),
            "use_qk_norm": vision.get("qk_normalization", False),
        },
        "image_token_id": _placeholder_id(path),
        "downsample_ratio": config.get("downsample_ratio", 0.5),
        "vision_feature_layer": config.get("select_layer", -1),
        "tie_word_embeddings": text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)),
        "processor_config": {"image_processor": settings},
    }


def _placeholder_id(path: Path) -> int:
    """The id of the placeholder token, which only the tokenizer's files contain."""
    for name in ("added_tokens.json", "tokenizer_config.json", "tokenizer.json"):
        file = path / name
        if not file.is_file() or file.stat().st_size > _MOST_BYTES:
            continue
        try:
            found = _find(json.loads(file.read_bytes()))
        except ValueError:
            continue
        if found is not None:
            return found
    raise ConfigError(
        what=f"the checkpoint's tokenizer has no {_PLACEHOLDER}",
        why="it stands for an image's positions in prompts",
        fix="download the checkpoint again, with its tokenizer",
    )


def _find(given: Any) -> int | None:
    """Searches the possible forms of a tokenizer's files for a token's id."""
    if not isinstance(given, dict):
        return None
    if isinstance(given.get(_PLACEHOLDER), int):
        return int(given[_PLACEHOLDER])
    for number, token in (given.get("added_tokens_decoder") or {}).items():
        if isinstance(token, dict) and token.get("content") == _PLACEHOLDER:
            return int(number)
    for token in given.get("added_tokens") or []:
        if isinstance(token, dict) and token.get("content") == _PLACEHOLDER:
            return int(token["id"])
    return None
