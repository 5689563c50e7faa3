"""Tiny random checkpoints of families whose towers see tiles, with transformers' processors of them on Pillow."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from later_tiles import LATER
from PIL import Image
from pillow_vision import on_pillow
from seeing import CPU
from tile_kinds import HALF, PINPOINTS, SQUARE, TEXT, VIT, TileFamily, VideoKind
from tiny import shake
from tiny_vision import EOS, IMAGE, VOCAB, make_tokenizer
from transformers import PreTrainedModel
from transformers.processing_utils import ProcessorMixin

from bough.config.hf import Checkpoint, open_checkpoint
from bough.layers.decoder import Decoder
from bough.models.load import build_model
from bough.multimodal.families import processor_of
from bough.multimodal.frames import number_in_words
from bough.multimodal.processor import Processor
from bough.tokenizer import Tokenizer
from bough.tokenizer.load import load_tokenizer


def _llava(tokenizer: Any, settings: dict[str, Any]) -> Any:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    return transformers.LlavaProcessor(
        CLIPImageProcessorPil(**settings), tokenizer, patch_size=4, vision_feature_select_strategy="default",
        image_token="<image>", num_additional_image_tokens=1,
    )  # fmt: skip


def _next(kind: str) -> Callable[[Any, dict[str, Any]], Any]:
    def made(tokenizer: Any, settings: dict[str, Any]) -> Any:
        name = {"LlavaNext": "llava_next", "LlavaOnevision": "llava_onevision"}[kind]
        module = __import__(f"transformers.models.{name}.image_processing_pil_{name}", fromlist=["x"])
        images = getattr(module, f"{kind}ImageProcessorPil")(**settings)
        if kind == "LlavaNext":
            return transformers.LlavaNextProcessor(
                images, tokenizer, patch_size=4, vision_feature_select_strategy="default", image_token="<image>",
                num_additional_image_tokens=1,
            )  # fmt: skip
        return transformers.LlavaOnevisionProcessor(
            images, tokenizer, None, num_image_tokens=16, vision_feature_select_strategy="full",
            vision_aspect_ratio="anyres_max_2",
        )  # fmt: skip

    return made


def _internvl(tokenizer: Any, settings: dict[str, Any]) -> Any:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    tokenizer.start_image_token, tokenizer.end_image_token = "<img>", "</img>"
    tokenizer.context_image_token, tokenizer.video_token = "<IMG_CONTEXT>", "<video>"
    for name in ("start_image", "end_image", "context_image"):
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(getattr(tokenizer, f"{name}_token")))
    return transformers.InternVLProcessor(GotOcr2ImageProcessorPil(**settings), tokenizer, image_seq_length=4)


def _idefics3(kind: str) -> Callable[[Any, dict[str, Any]], Any]:
    def made(tokenizer: Any, settings: dict[str, Any]) -> Any:
        module = __import__(f"transformers.models.{kind.lower()}.image_processing_pil_{kind.lower()}", fromlist=["x"])
        images = getattr(module, f"{kind}ImageProcessorPil")(**settings)
        if kind == "SmolVLM":
            from transformers.models.smolvlm import processing_smolvlm

            processing_smolvlm.num2words = number_in_words  # that package need not be installed
            tokenizer.fake_image_token, tokenizer.image_token = "<fake_token_around_image>", "<image>"
            tokenizer.global_image_token = "<global-img>"
            for name in ("fake_image", "image", "global_image"):
                found = tokenizer.convert_tokens_to_ids(getattr(tokenizer, f"{name}_token"))
                setattr(tokenizer, f"{name}_token_id", found)
            return transformers.SmolVLMProcessor(images, tokenizer, None, image_seq_len=4)
        return transformers.Idefics3Processor(images, tokenizer, image_seq_len=4)

    return made


def _gemma3(tokenizer: Any, settings: dict[str, Any]) -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer.boi_token, tokenizer.eoi_token, tokenizer.image_token = "<start_of_image>", "<end_of_image>", "<soft>"
    tokenizer.boi_token_id, tokenizer.image_token_id = 258, IMAGE
    return transformers.Gemma3Processor(Gemma3ImageProcessorPil(**settings), tokenizer, image_seq_length=4)


def _gemma4(tokenizer: Any, settings: dict[str, Any]) -> Any:
    """Pixels by transformers; its `Gemma4Processor` wants a video processor, which needs torchvision, so that its rule is
    written here: marks before and behind an image's placeholders."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    processor = Gemma4ImageProcessorPil(**settings)

    def process(text: list[str], images: list[Image.Image], return_tensors: str) -> dict[str, Any]:
        found = dict(processor(images=images, return_tensors=return_tensors))
        first, *rest = text[0].split("<|image|>")
        for count, after in zip(found.pop("num_soft_tokens_per_image"), rest, strict=True):
            first += "<|image>" + "<|image|>" * int(count) + "<image|>" + after
        made = tokenizer([first], return_tensors=return_tensors)
        return {**made, **found, "mm_token_type_ids": (made["input_ids"] == IMAGE).int()}

    return process


def _pixtral(merge: int) -> Callable[[Any, dict[str, Any]], Any]:
    """Pixels by transformers; its `PixtralProcessor` can't be imported without torchvision, so that its rule is written
    here: a mark behind each row, another behind the last."""

    def made(tokenizer: Any, settings: dict[str, Any]) -> Any:
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

        processor, side = PixtralImageProcessorPil(**settings), 4 * merge

        def process(text: list[str], images: list[Image.Image], return_tensors: str) -> dict[str, Any]:
            found = processor(images=images, patch_size={"height": side, "width": side}, return_tensors=return_tensors)
            first, *rest = text[0].split("[IMG]")
            for (height, width), after in zip(found["image_sizes"], rest, strict=True):
                rows = ["[IMG]" * (int(width) // side)] * (int(height) // side)
                first += "[IMG_BREAK]".join(rows) + "[IMG_END]" + after
            return {**tokenizer([first], return_tensors=return_tensors), **found}

        return process

    return made


PIXTRAL = {
    "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 48, "model_type": "pixtral", "hidden_act": "silu",
}  # fmt: skip
PIXTRAL_MARKS = {IMAGE: "[IMG]", 258: "[IMG_BREAK]", 259: "[IMG_END]"}
IDEFICS = {
    258: "<fake_token_around_image>", 259: "<end_of_utterance>", 260: "<global-img>", IMAGE: "<image>",
    **{261 + 3 * row + column: f"<row_{row + 1}_col_{column + 1}>" for row in range(3) for column in range(3)},
}  # fmt: skip
IDEFICS_SETTINGS = {**HALF, "size": {"longest_edge": 44}, "max_image_size": {"longest_edge": 16}}
GEMMA4 = {
    **TEXT, "model_type": "gemma4_text", "sliding_window": 9, "global_head_dim": 32, "vocab_size_per_layer_input": VOCAB,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA4_VISION = {
    "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 160,
}  # fmt: skip
GEMMA4_TOKENS = {"tie_word_embeddings": False, "image_token_id": IMAGE, "boi_token_id": 258, "eoi_token_id": 259}
GEMMA4_MARKS = {IMAGE: "<|image|>", 258: "<|image>", 259: "<image|>"}
GEMMA4_SETTINGS = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
TILE_FAMILIES: dict[str, TileFamily] = {
    "llava": TileFamily(
        "Llava",
        {
            "text_config": {**TEXT, "model_type": "llama"}, "vision_config": {**VIT, "model_type": "clip_vision_model"},
            "image_token_index": IMAGE, "image_seq_length": 16,
        },
        {"size": {"shortest_edge": 16}, "crop_size": SQUARE, **HALF},
        _llava,
        {IMAGE: "<image>"},
    ),
    "gemma3": TileFamily(
        "Gemma3",
        {
            "text_config": {
                **TEXT, "model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "query_pre_attn_scalar": 16,
            },
            "vision_config": {**VIT, "model_type": "siglip_vision_model", "vision_use_head": False},
            "mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": 258, "eoi_token_index": 259,
        },
        {"size": SQUARE, **HALF},
        _gemma3,
        {IMAGE: "<soft>", 258: "<start_of_image>", 259: "<end_of_image>"},
        "<start_of_image>",
    ),
    "gemma4": TileFamily(
        "Gemma4",
        {
            "text_config": {**GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
            "vision_config": GEMMA4_VISION, **GEMMA4_TOKENS,
        },
        GEMMA4_SETTINGS,
        _gemma4,
        GEMMA4_MARKS,
        "<|image|>",
    ),
    "gemma4-both-ways": TileFamily(
        "Gemma4",
        {
            "text_config": {
                **GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
                "use_bidirectional_attention": "vision",
            },
            "vision_config": {**GEMMA4_VISION, "use_clipped_linears": True, "standardize": True}, **GEMMA4_TOKENS,
        },
        GEMMA4_SETTINGS,
        _gemma4,
        GEMMA4_MARKS,
        "<|image|>",
    ),
    "llava_next": TileFamily(
        "LlavaNext",
        {
            "text_config": {**TEXT, "model_type": "mistral"}, "vision_config": {**VIT, "model_type": "clip_vision_model"},
            "image_token_index": IMAGE, "image_grid_pinpoints": PINPOINTS,
        },
        {"size": {"shortest_edge": 16}, "crop_size": SQUARE, "image_grid_pinpoints": PINPOINTS, **HALF},
        _next("LlavaNext"),
        {IMAGE: "<image>"},
    ),
    "onevision": TileFamily(
        "LlavaOnevision",
        {
            "text_config": {**TEXT, "model_type": "qwen2"}, "image_token_index": IMAGE, "video_token_index": 301,
            "vision_config": {**VIT, "model_type": "siglip_vision_model", "vision_use_head": False},
            "image_grid_pinpoints": PINPOINTS, "vision_aspect_ratio": "anyres_max_2",
        },
        {"size": SQUARE, "image_grid_pinpoints": PINPOINTS, **HALF},
        _next("LlavaOnevision"),
        {IMAGE: "<image>", 301: "<video>"},
        video=VideoKind(
            "llava_onevision.video_processing_llava_onevision.LlavaOnevisionVideoProcessor",
            {"size": SQUARE, "num_frames": 3, **HALF},
        ),
    ),
    "pixtral": TileFamily(
        "Llava",
        {
            "text_config": {**TEXT, "model_type": "mistral"}, "vision_config": PIXTRAL, "image_token_index": IMAGE,
            "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        },
        {"size": {"longest_edge": 32}, "patch_size": {"height": 4, "width": 4}, **HALF},
        _pixtral(1),
        PIXTRAL_MARKS,
        "[IMG]",
    ),
    "mistral3": TileFamily(
        "Mistral3",
        {
            "text_config": {**TEXT, "model_type": "mistral"}, "vision_config": PIXTRAL, "image_token_index": IMAGE,
            "spatial_merge_size": 2,
        },
        {"size": {"longest_edge": 40}, "patch_size": {"height": 4, "width": 4}, **HALF},
        _pixtral(2),
        PIXTRAL_MARKS,
        "[IMG]",
    ),
    "internvl": TileFamily(
        "InternVL",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {
                **VIT, "patch_size": [4, 4], "image_size": [16, 16], "layer_scale_init_value": 0.7, "attention_bias": True,
            },
            "image_token_id": IMAGE, "image_seq_length": 4,
        },
        {"size": SQUARE, "crop_to_patches": True, "max_patches": 5, **HALF},
        _internvl,
        {IMAGE: "<IMG_CONTEXT>", 259: "<img>", 260: "</img>", 261: "<video>"},
        "<IMG_CONTEXT>",
        VideoKind(
            "internvl.video_processing_internvl.InternVLVideoProcessor", {"size": SQUARE, "num_frames": 3, **HALF}
        ),
    ),
    "idefics3": TileFamily(
        "Idefics3",
        {
            "text_config": {**TEXT, "model_type": "llama"}, "vision_config": VIT, "image_token_id": IMAGE,
            "scale_factor": 2, "tie_word_embeddings": False,
        },
        IDEFICS_SETTINGS,
        _idefics3("Idefics3"),
        IDEFICS,
    ),
    "smolvlm": TileFamily(
        "SmolVLM",
        {
            "text_config": {**TEXT, "model_type": "llama"}, "vision_config": VIT, "image_token_id": IMAGE,
            "scale_factor": 2, "tie_word_embeddings": False,
        },
        IDEFICS_SETTINGS,
        _idefics3("SmolVLM"),
        IDEFICS,
        video=VideoKind(
            "smolvlm.video_processing_smolvlm.SmolVLMVideoProcessor",
            {
                "max_image_size": {"longest_edge": 16}, **HALF,
                "video_sampling": {"max_frames": 4, "fps": 1, "video_size": {"longest_edge": 24}},
            },
        ),
    ),
    **LATER,
}  # fmt: skip


@dataclass(frozen=True)
class Tiled:
    """A model of ours, and what it was made from."""

    family: TileFamily
    folder: Path
    checkpoint: Checkpoint
    reference: PreTrainedModel
    model: Decoder
    processor: Processor
    tokenizer: Tokenizer

    def theirs(self, text: str, images: Sequence[Any], **videos: Any) -> dict[str, Any]:
        """What transformers' processor makes of a text, images and videos."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder)
        check = ProcessorMixin.check_argument_for_proper_class
        ProcessorMixin.check_argument_for_proper_class = lambda *_: None
        try:
            made = self.family.theirs(tokenizer, self.family.processor)
            if self.family.video is not None and videos:
                made.video_processor = on_pillow(self.family.video.path)(**self.family.video.settings)
            given = {"images": list(images)} if images else {}
            found: dict[str, Any] = dict(made(text=[text], return_tensors="pt", **given, **videos))
        finally:
            ProcessorMixin.check_argument_for_proper_class = check
        return found


@cache
def load_tiled(name: str) -> Tiled:
    family = TILE_FAMILIES[name]
    folder = Path(tempfile.mkdtemp(prefix="bough-tiny-"))
    config = getattr(transformers, f"{family.prefix}Config")(**family.config, attn_implementation="eager")
    torch.manual_seed(sum(name.encode()))
    reference = getattr(transformers, f"{family.prefix}ForConditionalGeneration")(config).eval()
    shake(reference)
    if family.save is None:
        reference.save_pretrained(folder)
    else:
        family.save(reference, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(family.files or family.processor))
    if family.video is not None:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(family.video.settings))
    make_tokenizer(folder, {EOS: "<|endoftext|>", **family.special})
    checkpoint = open_checkpoint(str(folder))
    model = build_model(checkpoint, dtype=torch.float32, device=CPU, context_length=512)
    processor = processor_of(checkpoint.config)
    assert isinstance(model, Decoder)
    assert processor is not None
    return Tiled(family, folder, checkpoint, reference, model, processor, load_tokenizer(folder))
