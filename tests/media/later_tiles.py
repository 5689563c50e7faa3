"""Tiny random checkpoints of further families that see, with transformers' processors of them on Pillow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import transformers
from families import V3_EXPERTS
from pillow_vision import on_pillow
from tile_kinds import HALF, SQUARE, TEXT, VIT, TileFamily, VideoKind
from tiny import SIZES as TEXT_SIZES
from tiny_vision import EOS, IMAGE, VOCAB


def _glm(kind: str) -> Callable[[Any, dict[str, Any]], Any]:
    def made(tokenizer: Any, settings: dict[str, Any]) -> Any:
        module = __import__(f"transformers.models.{kind.lower()}.image_processing_pil_{kind.lower()}", fromlist=["x"])
        tokenizer.image_token, tokenizer.video_token = "<|image|>", "<|video|>"
        tokenizer.image_token_id, tokenizer.video_token_id = IMAGE, 301
        images = getattr(module, f"{kind}ImageProcessorPil")(**settings)
        return getattr(transformers, f"{kind}Processor")(images, tokenizer)

    return made


def _llama4(tokenizer: Any, settings: dict[str, Any]) -> Any:
    images = on_pillow("llama4.image_processing_llama4.Llama4ImageProcessor")(**settings)
    made = transformers.Llama4Processor(images, tokenizer, patch_size=4, pixel_shuffle_ratio=0.5)

    def process(**given: Any) -> dict[str, Any]:
        found = made(**given)
        return {**found, "pixel_values": found["pixel_values"].float()}

    return process


GLM_TEXT = {
    **TEXT_SIZES, "vocab_size": VOCAB, "eos_token_id": EOS,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
GLM = {
    "vision_config": {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 56, "num_heads": 2, "patch_size": 4,
        "image_size": 20, "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
    "image_token_id": IMAGE, "video_token_id": 301, "image_start_token_id": 302, "image_end_token_id": 303,
    "video_start_token_id": 304, "video_end_token_id": 305,
}  # fmt: skip
GLM_SETTINGS = {
    "size": {"shortest_edge": 2 * 8 * 8 * 4, "longest_edge": 2 * 8 * 8 * 30}, "patch_size": 4, "merge_size": 2,
    "temporal_patch_size": 2, **HALF,
}  # fmt: skip
GLM_MARKS = {
    IMAGE: "<|image|>", 301: "<|video|>", 302: "<|begin_of_image|>", 303: "<|end_of_image|>",
    304: "<|begin_of_video|>", 305: "<|end_of_video|>",
}  # fmt: skip
GLM_VIDEOS = {**GLM_SETTINGS, "size": {"shortest_edge": 2 * 8 * 8 * 4, "longest_edge": 8 * 8 * 100}}
GLM_VIDEO = VideoKind(
    "glm4v.video_processing_glm4v.Glm4vVideoProcessor", GLM_VIDEOS, "<|begin_of_video|><|video|><|end_of_video|>"
)
GLM_MARK = "<|begin_of_image|><|image|><|end_of_image|>"
LATER: dict[str, TileFamily] = {
    "glm4v": TileFamily(
        "Glm4v",
        {"text_config": {**GLM_TEXT, "model_type": "glm4v_text"}, **GLM},
        GLM_SETTINGS,
        _glm("Glm4v"),
        GLM_MARKS,
        GLM_MARK,
        GLM_VIDEO,
    ),
    "glm46v": TileFamily(
        "Glm46V",
        {
            "text_config": {**GLM_TEXT, "model_type": "glm4v_text"}, **GLM,
            "vision_config": {**GLM["vision_config"], "model_type": "glm4v_vision"},
        },
        GLM_SETTINGS,
        _glm("Glm46V"),
        GLM_MARKS,
        GLM_MARK,
        replace(GLM_VIDEO, path="glm46v.video_processing_glm46v.Glm46VVideoProcessor"),
    ),
    "glm4v_moe": TileFamily(
        "Glm4vMoe",
        {"text_config": {**GLM_TEXT, **V3_EXPERTS, "model_type": "glm4v_moe_text"}, **GLM},
        GLM_SETTINGS,
        _glm("Glm4v"),
        GLM_MARKS,
        GLM_MARK,
        GLM_VIDEO,
    ),
    "llama4": TileFamily(
        "Llama4",
        {
            "text_config": {
                **TEXT, "model_type": "llama4_text", "intermediate_size_mlp": 72, "num_local_experts": 4,
                "interleave_moe_layer_step": 2, "attention_chunk_size": 64,
            },
            "vision_config": {
                **VIT, "intermediate_size": 128, "projector_input_dim": 40, "projector_output_dim": 40,
                "vision_output_dim": 40,
            },
            "image_token_index": IMAGE, "boi_token_index": 302, "eoi_token_index": 303,
        },
        {"size": SQUARE, "max_patches": 5, **{name: [0.5] * 3 for name in HALF}},
        _llama4,
        {
            IMAGE: "<|patch|>", 301: "<|image|>", 302: "<|image_start|>", 303: "<|image_end|>",
            304: "<|tile_x_separator|>", 305: "<|tile_y_separator|>",
        },
        "<|image|>",
        features=lambda model, given: model.multi_modal_projector(
            model.get_image_features(**given).last_hidden_state.flatten(0, 1)
        ),
    ),
}  # fmt: skip
