"""Tiny random checkpoints of further families that see, with transformers' processors of them on Pillow."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from families import LATENT_SIZES, V3_EXPERTS, WINDOWS
from pillow_vision import on_pillow
from safetensors.torch import save_file
from tile_kinds import HALF, SQUARE, TEXT, VIT, TileFamily, VideoKind
from tiny import SIZES as TEXT_SIZES
from tiny_vision import DELTA, EOS, IMAGE, VOCAB


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


def _kimi(tokenizer: Any, settings: dict[str, Any]) -> Any:
    images = on_pillow("kimi_k25.image_processing_kimi_k25.Kimi_K25ImageProcessor")(**settings)
    return on_pillow("kimi_k25.processing_kimi_k25.Kimi_K25Processor")(images, tokenizer)


def _save_kimi(reference: Any, folder: Path) -> None:
    """By the names and in the config of `KimiK25ForConditionalGeneration`, as it is published: queries, keys and values are
    one matrix, and neighbouring values of a head the pairs that are rotated."""
    names = {
        "model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.",
        "model.vision_tower.layers.": "vision_tower.encoder.blocks.",
        "model.vision_tower.final": "vision_tower.encoder.final",
        "model.vision_tower.": "vision_tower.", "pos_emb.position_embeddings": "pos_emb.weight",
        "model.mm_projector.pre_norm": "mm_projector.pre_norm", "model.mm_projector.in_proj": "mm_projector.proj.0",
        "model.mm_projector.out_proj": "mm_projector.proj.2", ".norm1.": ".norm0.", ".norm2.": ".norm1.",
        ".mlp.fc1.": ".mlp.fc0.", ".mlp.fc2.": ".mlp.fc1.", ".attn.proj.": ".wo.", ".attn.q_proj.": ".wqkv.",
    }  # fmt: skip
    tensors = dict(reference.state_dict())
    made = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            stem = name.replace("model.language_model.", "language_model.model.").rpartition(".")[0]
            for number, expert in enumerate(tensor):
                parts = zip(("gate", "up"), expert.chunk(2), strict=True) if "gate_up" in name else [("down", expert)]
                made |= {f"{stem}.{number}.{part}_proj.weight": each.clone() for part, each in parts}
            continue
        if ".attn.k_proj." in name or ".attn.v_proj." in name:
            continue
        if ".attn.q_proj." in name:
            heads = reference.config.vision_config.num_attention_heads
            q, k, v = (tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv")
            paired = [each.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2) for each in (q, k)]
            tensor = torch.cat([*paired, v])
        for old, new in names.items():
            name = name.replace(old, new)
        made[name] = tensor.clone()
    save_file(made, folder / "model.safetensors")
    vision, text = reference.config.vision_config, reference.config.text_config.to_dict()
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "tie_word_embeddings": False,
        "text_config": {**text, "model_type": "kimi_k2"}, "media_placeholder_token_id": IMAGE,
        "vision_config": {
            "vt_hidden_size": vision.hidden_size, "vt_intermediate_size": vision.intermediate_size,
            "vt_num_hidden_layers": vision.num_hidden_layers, "vt_num_attention_heads": vision.num_attention_heads,
            "patch_size": vision.patch_size, "init_pos_emb_height": vision.pos_emb_height,
            "init_pos_emb_width": vision.pos_emb_width, "merge_kernel_size": [2, 2],
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def _minicpmv(tokenizer: Any, settings: dict[str, Any]) -> Any:
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

    tokenizer.image_token, tokenizer.video_token = "<|image_pad|>", "<|video_pad|>"
    tokenizer.image_token_id, tokenizer.video_token_id = IMAGE, 301
    for name in ("image", "slice", "image_id"):
        setattr(tokenizer, f"{name}_start_token", f"<{name}>")
        setattr(tokenizer, f"{name}_end_token", f"</{name}>")
    images = MiniCPMV4_6ImageProcessorPil(**settings)
    made = transformers.MiniCPMV4_6Processor.__new__(transformers.MiniCPMV4_6Processor)
    made.video_processor = images  # it is asked for its settings only
    made.__init__(images, images, tokenizer)
    return made


def _idefics2(tokenizer: Any, settings: dict[str, Any]) -> Any:
    from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil

    tokenizer.image_boundary_token, tokenizer.image_token = "<fake_token_around_image>", "<image>"
    tokenizer.image_token_id = IMAGE
    return transformers.Idefics2Processor(Idefics2ImageProcessorPil(**settings), tokenizer, image_seq_len=5)


def _idefics2_family(splits: bool) -> TileFamily:
    return TileFamily(
        "Idefics2",
        {
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**VIT, "image_size": 28}, "image_token_id": IMAGE, "tie_word_embeddings": False,
            "perceiver_config": {
                "hidden_size": 48, "resampler_n_latents": 5, "resampler_depth": 2, "resampler_n_heads": 4,
                "resampler_head_dim": 8, "num_key_value_heads": 2,
            },
        },
        {"size": {"shortest_edge": 10, "longest_edge": 30}, "do_image_splitting": splits, **HALF},
        _idefics2,
        {IMAGE: "<image>", 258: "<fake_token_around_image>", 259: "<end_of_utterance>"},
    )  # fmt: skip


def _cohere2(tokenizer: Any, settings: dict[str, Any]) -> Any:
    tokenizer.boi_token, tokenizer.eoi_token, tokenizer.image_token = (
        "<|START_OF_IMG|>",
        "<|END_OF_IMG|>",
        "<|IMG_PATCH|>",
    )
    tokenizer.img_line_break_token, tokenizer.image_token_id = "<|IMG_LINE_BREAK|>", IMAGE
    images = on_pillow("cohere2_vision.image_processing_cohere2_vision.Cohere2VisionImageProcessor")(**settings)
    images.patch_size = 2
    return transformers.Cohere2VisionProcessor(images, tokenizer)


def _lfm2_vl(tokenizer: Any, settings: dict[str, Any]) -> Any:
    images = on_pillow("lfm2_vl.image_processing_lfm2_vl.Lfm2VlImageProcessor")(**settings)
    return transformers.Lfm2VlProcessor(images, tokenizer)


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
KIMI_SETTINGS = {"size": {"max_height": 12, "max_width": 12}, "max_patches": 60, "patch_size": 4, **HALF}
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
    "minicpmv": TileFamily(
        "MiniCPMV4_6",
        {
            "text_config": {**TEXT, **DELTA, "model_type": "qwen3_5_text"},
            "vision_config": {**VIT, "image_size": 28, "insert_layer_id": 1}, "insert_layer_id": 1,
            "image_token_id": IMAGE, "video_token_id": 301,
        },
        {"max_slice_nums": 5, "scale_resolution": 24, "patch_size": 4, **HALF},
        _minicpmv,
        {
            IMAGE: "<|image_pad|>", 301: "<|video_pad|>", 258: "<image>", 259: "</image>", 260: "<slice>", 261: "</slice>",
            262: "<image_id>", 263: "</image_id>",
        },
        "<|image_pad|>",
        VideoKind(
            "minicpmv4_6.video_processing_minicpmv4_6.MiniCPMV4_6VideoProcessor",
            {"max_slice_nums": 2, "scale_resolution": 24, "patch_size": 4, "max_num_frames": 4, **HALF},
            "<|video_pad|>",
        ),
    ),
    "cohere2_vision": TileFamily(
        "Cohere2Vision",
        {
            "text_config": {**TEXT_SIZES, **WINDOWS, "vocab_size": VOCAB, "eos_token_id": EOS, "model_type": "cohere2"},
            "vision_config": {**VIT, "model_type": "siglip_vision_model", "vision_use_head": False},
            "image_token_id": IMAGE, "alignment_intermediate_size": 56,
        },
        {"size": SQUARE, "max_patches": 5, **HALF},
        _cohere2,
        {IMAGE: "<|IMG_PATCH|>", 258: "<|START_OF_IMG|>", 259: "<|END_OF_IMG|>", 260: "<|IMG_LINE_BREAK|>"},
        "<|IMG_PATCH|>",
    ),
    "lfm2_vl": TileFamily(
        "Lfm2Vl",
        {
            "text_config": {
                **TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv", "conv"],
                "block_multiple_of": 8, "num_hidden_layers": 4,
            },
            "vision_config": {**VIT, "model_type": "siglip2_vision_model", "num_patches": 25, "vision_use_head": False},
            "image_token_id": IMAGE, "projector_hidden_size": 40, "tie_word_embeddings": True,
        },
        {
            "tile_size": 16, "min_image_tokens": 2, "max_image_tokens": 8, "encoder_patch_size": 4, "max_tiles": 5,
            "max_pixels_tolerance": 1.5, **HALF,
        },
        _lfm2_vl,
        {
            IMAGE: "<image>", 258: "<|image_start|>", 259: "<|image_end|>", 260: "<|img_thumbnail|>",
            **{261 + 5 * row + column: f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(5) for column in range(5)},
        },
    ),
    "idefics2": _idefics2_family(False),
    "idefics2-quarters": _idefics2_family(True),
    "kimi_k25": TileFamily(
        "Kimi_K25",
        {
            "text_config": {
                **TEXT_SIZES, "vocab_size": VOCAB, "eos_token_id": EOS, **V3_EXPERTS, **LATENT_SIZES, "n_group": 1,
                "topk_group": 1, "model_type": "deepseek_v3",
            },
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 2,
                "patch_size": 4, "pos_emb_height": 5, "pos_emb_width": 5, "pos_emb_time": 4,
            },
            "image_token_id": IMAGE, "video_token_id": 301, "projection_hidden_size": 32, "tie_word_embeddings": False,
        },
        KIMI_SETTINGS,
        _kimi,
        {
            IMAGE: "<|media_pad|>", 301: "<|kimi_k25_video_placeholder|>", 302: "<|media_begin|>",
            303: "<|media_content|>", 304: "<|media_end|>",
        },
        "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        VideoKind(
            "kimi_k25.video_processing_kimi_k25.Kimi_K25VideoProcessor",
            {**KIMI_SETTINGS, "max_patches": 40, "temporal_patch_size": 3},
            "<|kimi_k25_video_placeholder|>",
        ),
        _save_kimi,
        {
            "media_proc_cfg": {
                "in_patch_limit": 60, "patch_limit_on_one_side": 12, "in_patch_limit_each_frame": 40, "patch_size": 4,
                "sample_fps": 2.0, "temporal_merge_kernel_size": 3, **HALF,
            }
        },
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
