"""A tiny random checkpoint of Gemma 3n, which needs no timm: weights are drawn by their names, and what transformers makes
of images with timm's tower was recorded (`write_gemma3n_golden.py`). All else of transformers' model is computed."""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from prompts import noise
from safetensors.torch import save_file
from seeing import CPU
from test_sound import sound
from tiny import SIZES
from tiny_vision import EOS, VOCAB, make_tokenizer
from torch.nn.functional import pad
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.gemma3n import modeling_gemma3n

from bough.config.hf import Checkpoint, open_checkpoint
from bough.core.media import Features
from bough.layers.decoder import Decoder
from bough.models.load import build_model
from bough.multimodal.families import processor_of
from bough.multimodal.processor import Prepared, Processed, Processor
from bough.tokenizer import Tokenizer
from bough.tokenizer.load import load_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "gemma3n.json"
BOI, BOA, EOI, IMAGE_ID, EOA, AUDIO_ID = 298, 299, 308, 309, 312, 313
MARKS = {
    EOS: "<|endoftext|>", BOI: "<start_of_image>", BOA: "<start_of_audio>", EOI: "<end_of_image>",
    IMAGE_ID: "<image_soft_token>", EOA: "<end_of_audio>", AUDIO_ID: "<audio_soft_token>",
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "text_config": {
        **SIZES, "vocab_size": VOCAB, "eos_token_id": EOS, "head_dim": 16, "num_hidden_layers": 6, "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2, "num_kv_shared_layers": 3,
        "sliding_window": 9, "intermediate_size": [80] * 6, "activation_sparsity_pattern": [0.9, 0.8, 0.0, 0.0, 0.7, 0.0],
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": EOI, "tie_word_embeddings": True,
    },
    "vision_config": {
        "vocab_offset": EOI, "vocab_size": EOA - EOI, "hidden_size": 2048,
        "model_args": {"channel_multiplier": 1 / 32, "msfa_output_resolution": 3},
    },
    "audio_config": {
        "vocab_offset": EOA, "vocab_size": VOCAB - EOA, "hidden_size": 32, "input_feat_size": 20,
        "conf_attention_chunk_size": 4, "conf_attention_context_left": 6, "conf_num_attention_heads": 4,
        "conf_num_hidden_layers": 2, "conf_conv_kernel_size": 3, "conf_reduction_factor": 2,
        "sscp_conv_channel_size": [8, 4], "conf_attention_logit_cap": 5.0,
    },
    "audio_soft_tokens_per_image": 12, "vision_soft_tokens_per_image": 9, "boi_token_id": BOI, "eoi_token_id": EOI,
    "image_token_id": IMAGE_ID, "boa_token_id": BOA, "eoa_token_id": EOA, "audio_token_id": AUDIO_ID,
}  # fmt: skip
EXTRACTOR = {"feature_size": 20, "min_frequency": 60.0, "per_bin_mean": [0.5] * 20, "per_bin_stddev": [1.5] * 20}
SETTINGS = {
    **EXTRACTOR, "sampling_rate": 16_000, "frame_length": 512, "hop_length": 160, "size": {"height": 96, "width": 96},
    "do_normalize": False, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2,
}  # fmt: skip
"""As published: those of both kinds of media in one file."""
IMAGES = [Image.fromarray(noise(*shape)) for shape in ((24, 40), (120, 90), (96, 96))]
SOUNDS = [sound(0.97), sound(0.31, seed=1), sound(0.02, seed=2)]


def drawn(name: str, shape: Iterable[int]) -> torch.Tensor:
    """The weights of a tensor of the checkpoint."""
    shape = tuple(shape)
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    if len(shape) == 1:
        return torch.from_numpy(0.3 * values + (0 if name.endswith(("bias", "per_dim_scale")) else 1))
    scale = 0.5 if "embed_tokens" in name else np.prod(shape[1:]) ** -0.5
    return torch.from_numpy(values * np.float32(scale))


def fill(model: Any) -> None:
    """Gives transformers' model the weights that its parameters' names stand for, and lets it hear sounds one by one: those
    of a batch would be filled up with silence that is heard."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(drawn(name, parameter.shape))
    hear = model.model.get_audio_features

    def one_by_one(features: torch.Tensor, silent: torch.Tensor, **options: Any) -> Any:
        lengths = (~silent).sum(1).tolist()
        found = [
            hear(each[None, :length], mask[None, :length], **options)
            for each, mask, length in zip(features, silent, lengths, strict=True)
        ]
        most = max(each.pooler_output.shape[1] for each in found)
        pads = [most - each.pooler_output.shape[1] for each in found]
        first = found[0]
        first.pooler_output, first.audio_mel_mask = (
            torch.cat([pad(each.pooler_output, (0, 0, 0, more)) for each, more in zip(found, pads, strict=True)]),
            torch.cat(
                [pad(each.audio_mel_mask, (0, more), value=True) for each, more in zip(found, pads, strict=True)]
            ),
        )
        return first

    model.model.get_audio_features = one_by_one


def config() -> transformers.Gemma3nConfig:
    return transformers.Gemma3nConfig(**CONFIG, attn_implementation="eager")


class _NoTimm:
    """In place of transformers' `AutoModel`: a tower that sees is left out."""

    @staticmethod
    def from_config(config: Any) -> torch.nn.Module:
        if isinstance(config, transformers.Gemma3nVisionConfig):
            return torch.nn.Identity()
        return transformers.AutoModel.from_config(config)


@cache
def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDEN.read_text())
    return found


def seen(pixel_values: torch.Tensor, **_: Any) -> BaseModelOutputWithPooling:
    """What was recorded of images, in place of `get_image_features`. `pixel_values`: their numbers."""
    found = torch.tensor(golden()["features"])[pixel_values.long().flatten()]
    return BaseModelOutputWithPooling(pooler_output=found)


@dataclass(frozen=True)
class TinyGemma3n:
    """A model of ours, and what it was made from."""

    folder: Path
    checkpoint: Checkpoint
    reference: Any
    """Takes numbers of images as their pixel values."""
    model: Decoder
    processor: Processor
    tokenizer: Tokenizer

    def image(self, number: int) -> tuple[Prepared, np.ndarray]:
        return _prepared("image", number, self.processor.image(IMAGES[number], {}))

    def sound(self, number: int) -> tuple[Prepared, np.ndarray]:
        return _prepared("audio", number, self.processor.audio(SOUNDS[number], {}))


def _prepared(kind: Any, number: int, made: tuple[Any, Any]) -> tuple[Prepared, np.ndarray]:
    array, items = np.array(made[0]), made[1]
    digest = f"{kind} {number}".encode().ljust(32, b".")
    where = Features(path=f"{kind}-{number}", digest=digest, dtype=array.dtype.name, shape=array.shape)
    processed = Processed(dtype=where.dtype, shape=array.shape, items=items)
    return Prepared(kind=kind, digest=digest, processed=processed, features=where), array


@cache
def load_gemma3n() -> TinyGemma3n:
    folder = Path(tempfile.mkdtemp(prefix="bough-tiny-"))
    auto, modeling_gemma3n.AutoModel = modeling_gemma3n.AutoModel, _NoTimm
    try:
        reference = transformers.Gemma3nForConditionalGeneration(config()).eval()
    finally:
        modeling_gemma3n.AutoModel = auto
    fill(reference)
    reference.model.get_image_features = seen
    reference.config.architectures = ["Gemma3nForConditionalGeneration"]
    reference.config.save_pretrained(folder)
    tensors = {name: each.detach().clone() for name, each in reference.named_parameters()}
    tensors |= {name: drawn(name, shape) for name, shape in golden()["tensors"].items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    make_tokenizer(folder, MARKS)
    checkpoint = open_checkpoint(str(folder))
    model = build_model(checkpoint, dtype=torch.float32, device=CPU, context_length=512)
    processor = processor_of(checkpoint.config)
    assert isinstance(model, Decoder)
    assert processor is not None
    return TinyGemma3n(folder, checkpoint, reference, model, processor, load_tokenizer(folder))


def heard(numbers: Iterable[int]) -> dict[str, torch.Tensor]:
    """What transformers takes of sounds, each by itself."""
    extractor = transformers.Gemma3nAudioFeatureExtractor(**EXTRACTOR)
    found = []
    for number in numbers:
        samples = np.pad(SOUNDS[number], (0, max(0, 513 - len(SOUNDS[number]))))  # it takes no shorter ones
        found.append(extractor(samples, return_tensors="pt"))
    most = max(each["input_features"].shape[1] for each in found)
    pads = [most - each["input_features"].shape[1] for each in found]
    features = [pad(each["input_features"], (0, 0, 0, more)) for each, more in zip(found, pads, strict=True)]
    masks = [pad(each["input_features_mask"], (0, more)) for each, more in zip(found, pads, strict=True)]
    return {"input_features": torch.cat(features).float(), "input_features_mask": torch.cat(masks)}
