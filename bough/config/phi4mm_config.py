"""Configs of Phi-4-multimodal's own checkpoint (`Phi4MMForCausalLM`), in the words of transformers' class, and what both say
of adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from bough.config.adapter_folders import ADAPTER_WEIGHTS, folder_of, read_folders
from bough.core.errors import ConfigError

OWN: Final = "Phi4MMForCausalLM"
BUILT_IN: Final = "Phi4MultimodalForCausalLM"
ADAPTERS: Final = ("vision", "speech")
"""In the order of their numbers."""


def from_phi4mm(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The config as transformers would write it, with `vision_lora` and `speech_lora` where there are such adapters; other
    configs are returned unchanged. Raises `ConfigError`."""
    names = config.get("architectures")
    if names == [BUILT_IN]:
        return {**config, **{f"{name}_lora": found for name, found in read_folders(path, ADAPTERS).items()}}
    if names != [OWN]:
        return config
    layers, audio = config.get("embd_layer"), (config.get("audio_processor") or {}).get("config")
    if not isinstance(layers, dict) or not isinstance(audio, dict):
        raise ConfigError(
            what="config.json has no embd_layer or audio_processor", why=f"{OWN} has both", fix="download it again"
        )
    image, sound = layers.get("image_embd_layer") or {}, layers.get("audio_embd_layer") or {}
    bias = audio.get("relative_attention_bias_args") or {}
    return {
        **config,
        "vision_config": {"crop_size": image.get("crop_size", 448), **(config.get("vision_config") or {})},
        "audio_config": {
            **audio,
            "hidden_size": audio.get("attention_dim", 1024),
            "num_attention_heads": audio.get("attention_heads", 16),
            "intermediate_size": audio.get("linear_units", 1536),
            "nemo_conv_channels": (audio.get("nemo_conv_settings") or {}).get("conv_channels", 1024),
            "bias_max_distance": bias.get("t5_bias_max_distance", 1000),
            "bias_symmetric": bias.get("t5_bias_symmetric", False),
            "downsample_rate": sound.get("downsample_rate", 1),
        },
    }


def adapter_files(config: dict[str, Any], path: Path) -> tuple[tuple[str, Path], ...]:
    """Names and files of adapters that lie in folders beside the checkpoint's own."""
    if config.get("architectures") != [BUILT_IN]:
        return ()
    return tuple((name, folder_of(path, name) / ADAPTER_WEIGHTS) for name in ADAPTERS if folder_of(path, name).is_dir())
