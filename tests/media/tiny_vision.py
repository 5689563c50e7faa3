"""Tiny random checkpoints of models that see, made with transformers' own classes, and their processors' settings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tiny import EXPERTS, SIZES as TEXT_SIZES, shake
from transformers import PreTrainedModel

VOCAB = 320
EOS, SAID, IMAGE, VIDEO, START, END = 256, 257, 300, 301, 302, 303
"""Ids of the end, of the mark between turns, of placeholders and of the marks around them; smaller ones are bytes."""
SPECIAL = {
    EOS: "<|endoftext|>", SAID: "<|im_end|>", 258: "<|im_start|>", IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>",
    START: "<|vision_start|>", END: "<|vision_end|>",
}  # fmt: skip
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
SIZES = {**TEXT_SIZES, "vocab_size": VOCAB, "eos_token_id": EOS}
TEXT = {**SIZES, "head_dim": 16}
PIXELS = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 8 * 8 * 4, "max_pixels": 8 * 8 * 60}


VIDEOS = {"min_pixels": 8 * 8 * 4, "max_pixels": 8 * 8 * 60}
WHOLE = {"size": {"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 60 * 8}}
"""Pixels of all frames together."""


@dataclass(frozen=True)
class Family:
    """How a tiny model of a family is made."""

    prefix: str
    text: dict[str, Any]
    vision: dict[str, Any]
    processor: dict[str, Any]
    tokens: dict[str, Any]
    video: dict[str, Any] | None = None


VISION = {
    "depth": 3,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
TURNS = {**SECTIONS, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
DEEP = {
    **VISION, "hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 56, "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}  # fmt: skip
FLAT = {name: value for name, value in DEEP.items() if name != "deepstack_visual_indexes"}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {**TURNS, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}  # fmt: skip
"""Layers that keep states; half of a head is rotated."""
FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family(
        "Qwen2VL",
        {**SIZES, "rope_parameters": SECTIONS},
        {**VISION, "embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2},
        PIXELS,
        TOKENS,
        VIDEOS,
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VL",
        {**SIZES, "rope_parameters": SECTIONS},
        {
            **VISION, "hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 56, "window_size": 16,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 1,
        },
        PIXELS,
        TOKENS,
        VIDEOS,
    ),
    "qwen3_vl": Family("Qwen3VL", {**TEXT, "rope_parameters": TURNS}, DEEP, PIXELS, TOKENS, WHOLE),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoe", {**TEXT, **EXPERTS, "rope_parameters": TURNS}, DEEP, PIXELS, TOKENS
    ),
    "qwen3_5": Family("Qwen3_5", {**TEXT, **DELTA}, FLAT, PIXELS, TOKENS, WHOLE),
    "qwen3_5_moe": Family(
        "Qwen3_5Moe", {**TEXT, **DELTA, **EXPERTS, "shared_expert_intermediate_size": 24}, FLAT, PIXELS, TOKENS
    ),
}  # fmt: skip


def make_seeing(name: str, folder: Path) -> PreTrainedModel:
    """Saves a checkpoint of a family, with its processor's settings, and returns the model it was saved from, in fp32."""
    family = FAMILIES[name]
    config = getattr(transformers, f"{family.prefix}Config")(
        text_config=family.text, vision_config=family.vision, attn_implementation="eager", **family.tokens
    )
    torch.manual_seed(sum(name.encode()))
    model = getattr(transformers, f"{family.prefix}ForConditionalGeneration")(config).eval()
    shake(model)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(family.processor))
    if family.video:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(family.video))
    return model


TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{ message.content }}{% else %}"
    "{%- for part in message.content %}"
    "{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer(folder: Path, special: dict[int, str] = SPECIAL) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of single bytes and special tokens, with a chat template in Qwen's manner, saved to `folder`."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(alphabet)}
    vocab |= {f"<|unused_{number}|>": number for number in range(256, VOCAB) if number not in special}
    vocab |= {token: number for number, token in special.items()}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(list(special.values()))
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=special[EOS], pad_token=special[EOS], chat_template=TEMPLATE
    )
    made.save_pretrained(folder)
    return made
