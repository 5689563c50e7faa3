"""A tiny Phi-4-multimodal with random adapters: as transformers writes it, with adapters in PEFT's folders, and as the
original checkpoint has it, with adapters in its own files. Transformers' answers come of weights with one adapter merged."""

from __future__ import annotations

import json
import re
import tempfile
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from PIL import Image
from pillow_vision import on_pillow
from prompts import Prompt
from safetensors.torch import save_file
from seeing import CPU
from tiny import SIZES, shake
from tiny_vision import EOS, IMAGE, VOCAB, make_tokenizer
from torch import Tensor
from transformers import PreTrainedModel
from transformers.processing_utils import ProcessorMixin

from bough.config.hf import Checkpoint, open_checkpoint
from bough.core.media import Features
from bough.layers.decoder import Decoder
from bough.models.load import build_model
from bough.multimodal.families import processor_of
from bough.multimodal.placing import Placer
from bough.multimodal.processor import Prepared, Processed, Processor
from bough.tokenizer import Tokenizer
from bough.tokenizer.load import load_tokenizer

AUDIO = 301
TILE, POOLED = 24, 3
ADAPTERS = {"vision": (5, 9.0), "speech": (7, 5.0)}
"""Ranks and alphas."""
MATRICES = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
SETTINGS: dict[str, Any] = {
    "size": {"height": TILE, "width": TILE}, "patch_size": 4, "dynamic_hd": 5, "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}  # fmt: skip
AUDIO_SIZES = {"num_blocks": 2, "ext_pw_out_channel": 24, "kernel_size": 3}
CONFIG: dict[str, Any] = {
    **SIZES, "vocab_size": VOCAB, "eos_token_id": EOS, "max_position_embeddings": 1024,
    "original_max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.1, 1.2],
        "long_factor": [1.5, 2.0, 2.5], "original_max_position_embeddings": 512,
    },
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
        "image_size": TILE, "crop_size": TILE, "image_token_id": IMAGE,
    },
    "audio_config": {
        **AUDIO_SIZES, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2,
        "depthwise_separable_out_channel": 24, "nemo_conv_channels": 8, "bias_max_distance": 20, "audio_token_id": AUDIO,
    },
}  # fmt: skip
Form = Literal["built in", "own"]


@dataclass(frozen=True)
class Phi4:
    folder: Path
    checkpoint: Checkpoint
    references: dict[str, PreTrainedModel]
    """By adapter; "": without."""
    model: Decoder
    processor: Processor
    tokenizer: Tokenizer

    def theirs(self, text: str, images: list[Image.Image], sounds: list[np.ndarray]) -> dict[str, Any]:
        """What transformers' processor makes of a prompt."""
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(self.folder)
        tokenizer.image_token, tokenizer.image_token_id = "<|image|>", IMAGE
        tokenizer.audio_token, tokenizer.audio_token_id = "<|audio|>", AUDIO
        check = ProcessorMixin.check_argument_for_proper_class
        ProcessorMixin.check_argument_for_proper_class = lambda *_: None
        try:
            seen = _image_processor()
            heard = transformers.Phi4MultimodalFeatureExtractor()
            made = transformers.Phi4MultimodalProcessor(seen, heard, tokenizer)
            given: dict[str, Any] = {"images": images} if images else {}
            if sounds:
                given |= {"audio": sounds, "sampling_rate": 16_000}
            found: dict[str, Any] = dict(made(text=[text], return_tensors="pt", **given))
        finally:
            ProcessorMixin.check_argument_for_proper_class = check
        found.pop("attention_mask", None)
        return found


def _image_processor() -> Any:
    """transformers' own counts positions for tiles of 32 x 32 patches, whatever its settings say."""
    base = on_pillow("phi4_multimodal.image_processing_phi4_multimodal.Phi4MultimodalImageProcessor")

    class Counting(base):  # type: ignore[misc, valid-type]
        def _preprocess(self, *args: Any, **options: Any) -> Any:
            made = super()._preprocess(*args, **options)
            whole = POOLED * (POOLED + 1)
            made["num_img_tokens"] = [count - 16 * 17 + whole for count in made["num_img_tokens"]]
            return made

    return Counting(**SETTINGS)


@cache
def load_phi4(form: Form = "built in") -> Phi4:
    folder = Path(tempfile.mkdtemp(prefix="bough-tiny-"))
    config = transformers.Phi4MultimodalConfig(**CONFIG, attn_implementation="eager")
    torch.manual_seed(11)
    reference = transformers.Phi4MultimodalForCausalLM(config).eval()
    shake(reference)
    with torch.no_grad():  # as large as trained ones, not as they are drawn
        for weight in reference.model.embed_tokens_extend.image_embed.img_processor.encoder.parameters():
            weight *= 0.2
    ear = reference.model.embed_tokens_extend.audio_embed.encoder.encoder_embedding
    ear.global_mean.normal_(8.0, 1.0)
    ear.global_invstd.uniform_(0.1, 0.3)
    adapters = {name: _random_adapter(reference, *sizes) for name, sizes in ADAPTERS.items()}
    references = {name: _merged(reference, name, adapters[name]) for name in adapters}
    if form == "built in":
        reference.save_pretrained(folder)
        for name, tensors in adapters.items():
            _save_peft(folder / f"{name}-lora", name, tensors)
    else:
        _save_own(reference, adapters, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    make_tokenizer(folder, {EOS: "<|endoftext|>", IMAGE: "<|image|>", AUDIO: "<|audio|>"})
    checkpoint = open_checkpoint(str(folder))
    model = build_model(checkpoint, dtype=torch.float32, device=CPU, context_length=512)
    processor = processor_of(checkpoint.config)
    assert isinstance(model, Decoder)
    assert processor is not None
    return Phi4(folder, checkpoint, {"": reference, **references}, model, processor, load_tokenizer(folder))


def _random_adapter(reference: Any, rank: int, _: float) -> dict[str, Tensor]:
    """By name of the matrix and "A" or "B"."""
    made = {}
    for number, layer in enumerate(reference.model.layers):
        for name in MATRICES:
            weight = layer.get_submodule(name).weight
            stem = f"model.layers.{number}.{name}.lora"
            made[f"{stem}_A"] = torch.randn(rank, weight.shape[1]) * weight.shape[1] ** -0.5
            made[f"{stem}_B"] = torch.randn(weight.shape[0], rank) * 0.3
    return made


def _merged(reference: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    made = deepcopy(reference)
    rank, alpha = ADAPTERS[name]
    for number, layer in enumerate(made.model.layers):
        for matrix in MATRICES:
            stem = f"model.layers.{number}.{matrix}.lora"
            with torch.no_grad():
                layer.get_submodule(matrix).weight += tensors[f"{stem}_B"] @ tensors[f"{stem}_A"] * (alpha / rank)
    return made


def _save_peft(folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    folder.mkdir()
    rank, alpha = ADAPTERS[name]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    named = {f"base_model.model.{key}.weight": tensor for key, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")


def _save_own(reference: Any, adapters: dict[str, dict[str, Tensor]], folder: Path) -> None:
    """By the names and in the config of `Phi4MMForCausalLM`."""
    names = {
        r"(feed_forward_(?:in|out))\.gate_up_proj": r"\1.net.0.linear", r"(feed_forward_(?:in|out))\.down_proj": r"\1.net.2",
        r"(encoders\.\d+\.self_attn)\.([qkv])_proj": r"\1.linear_\2",
        r"(encoders\.\d+\.self_attn)\.o_proj": r"\1.linear_out",
        r"img_projection_up": "img_projection.0", r"img_projection_down": "img_projection.2",
        r"global_img_feature_extensor": "glb_GN", r"sub_img_feature_extensor": "sub_GN",
        r"up_proj_for_speech": "audio_projection.speech.0", r"down_proj_for_speech": "audio_projection.speech.2",
        r"up_proj_for_vision_speech": "audio_projection.vision.0",
        r"down_proj_for_vision_speech": "audio_projection.vision.2",
        r"((?:self_attn\.(?:qkv|o)|mlp\.(?:gate_up|down))_proj)\.weight": r"\1.base_layer.weight",
    }  # fmt: skip
    made = {}
    for name, tensor in reference.state_dict().items():
        below = "img_processor" in name or "encoders" in name
        for old, new in names.items():
            if "base_layer" not in new or not below:
                name = re.sub(old, new, name)
        made[name] = tensor.clone()
    for adapter, tensors in adapters.items():
        made |= {f"{key}.{adapter}.weight": tensor for key, tensor in tensors.items()}
    save_file(made, folder / "model.safetensors")
    given = {key: value for key, value in CONFIG.items() if key not in ("vision_config", "audio_config")}
    rope = dict(given.pop("rope_parameters"))
    audio = CONFIG["audio_config"]
    config = {
        **given, "architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm", "tie_word_embeddings": False,
        "rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"],
        "rope_scaling": {"type": "longrope", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]},
        "embd_layer": {
            "image_embd_layer": {"crop_size": TILE, "hd_transform_order": "sub_glb"},
            "audio_embd_layer": {"downsample_rate": 1, "compression_rate": 8},
        },
        # The published one has none: its tower is SigLIP's of 400M.
        "vision_config": CONFIG["vision_config"],
        "audio_processor": {
            "name": "cascades",
            "config": {
                **AUDIO_SIZES, "attention_dim": 24, "attention_heads": 2, "linear_units": 40, "input_size": 80,
                "chunk_size": -1, "left_chunk": 18, "depthwise_seperable_out_channel": 24, "time_reduction": 8,
                "nemo_conv_settings": {"conv_channels": 8}, "activation": "swish", "audio_token_id": AUDIO,
                "relative_attention_bias_args": {"type": "t5", "t5_bias_max_distance": audio["bias_max_distance"]},
            },
        },
        **{f"{name}_lora": {"r": rank, "lora_alpha": alpha, "dp": 0.01} for name, (rank, alpha) in ADAPTERS.items()},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    """Noise that a gliding tone stands out of."""
    count = int(seconds * 16_000)
    time = np.arange(count) / 16_000
    made = np.random.default_rng([seed, count]).normal(0, 0.02, count)
    made += 0.3 * np.sin(2 * np.pi * (200 + 150 * seed + 700 * time) * time)
    return made.astype(np.float32)


def placed_prompt(phi4: Phi4, text: str, images: list[Image.Image], sounds: list[np.ndarray]) -> Prompt:
    """A prompt by our processor, as an API process makes it."""
    media, features = [], {}
    for kind, given in (("image", images), ("audio", sounds)):
        for medium in given:
            array, items = phi4.processor.image(medium, {}) if kind == "image" else phi4.processor.audio(medium, {})
            array = np.array(array)
            digest = sha256(array.tobytes()).digest()
            where = Features(path=digest.hex(), digest=digest, dtype=array.dtype.name, shape=array.shape)  # type: ignore[arg-type]
            processed = Processed(dtype=where.dtype, shape=array.shape, items=items)
            media.append(Prepared(kind=kind, digest=digest, processed=processed, features=where))  # type: ignore[arg-type]
            features[where.path] = array
    placer = Placer(phi4.processor, phi4.tokenizer)
    ordered = placer.ordered(text, media) if media else []
    ids = phi4.tokenizer.encode(placer.spelled(text, media) if media else text, True)
    placed = placer.place_spelled(ids, ordered)
    items = phi4.processor.together(placed.items)
    adapter = phi4.processor.adapter({item.kind for item in items})
    return Prompt(placed.ids.tolist(), items, b"", features, adapter)
