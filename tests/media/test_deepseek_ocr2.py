"""DeepSeek-OCR 2 against transformers: token ids and pixels of its processor, features, and greedy answers through the
engine. Its images have hundreds of positions in any size, so that prompts have one each."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from in_process import InProcess, Setup
from PIL import Image
from prompts import noise
from seeing import CPU
from test_in_engine import GREEDY, NEW
from tile_kinds import HALF, TEXT
from tiny import shake
from tiny_vision import EOS, IMAGE, VOCAB, make_tokenizer
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import DeepseekOcr2ImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from bough.config.hf import Checkpoint, open_checkpoint
from bough.core.errors import ConfigError
from bough.core.media import Features
from bough.layers.decoder import Decoder
from bough.layers.tower import TowerInput
from bough.models.load import build_model
from bough.models.registry import facts_of
from bough.multimodal.families import processor_of
from bough.multimodal.placing import Placer
from bough.multimodal.processor import Prepared, Processed, Processor
from bough.tokenizer.load import load_tokenizer

SETTINGS: dict[str, Any] = {
    "size": {"height": 64, "width": 64}, "tile_size": 48, "min_patches": 2, "max_patches": 3, **HALF,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "text_config": {
        **TEXT, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24,
        "mlp_layer_types": ["dense"] + ["sparse"] * (TEXT["num_hidden_layers"] - 1), "max_position_embeddings": 1024,
        "head_dim": None,
    },
    "vision_config": {
        "sam_config": {
            "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 1, "image_size": 64,
            "window_size": 5, "global_attn_indexes": [1], "output_channels": 8, "downsample_channels": [12, 24],
        },
        "encoder_config": {
            "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 40,
        },
    },
    "image_token_id": IMAGE,
}  # fmt: skip


@cache
def load() -> tuple[Path, Checkpoint, Any, Decoder, Processor]:
    folder = Path(tempfile.mkdtemp(prefix="bough-tiny-"))
    config = transformers.DeepseekOcr2Config(**CONFIG, attn_implementation="eager")
    torch.manual_seed(5)
    reference = transformers.DeepseekOcr2ForConditionalGeneration(config).eval()
    shake(reference)
    reference.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    make_tokenizer(folder, {EOS: "<|endoftext|>", IMAGE: "<image>"})
    checkpoint = open_checkpoint(str(folder))
    model = build_model(checkpoint, dtype=torch.float32, device=CPU, context_length=1024)
    processor = processor_of(checkpoint.config)
    assert isinstance(model, Decoder)
    assert processor is not None
    return folder, checkpoint, reference, model, processor


def by_transformers(folder: Path, text: str, image: Image.Image) -> dict[str, Any]:
    check = ProcessorMixin.check_argument_for_proper_class
    ProcessorMixin.check_argument_for_proper_class = lambda *_: None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        made = transformers.DeepseekOcr2Processor(
            DeepseekOcr2ImageProcessorPil(**SETTINGS), tokenizer, patch_size=1, downsample_ratio=4
        )
        bounds = {name: SETTINGS[name] for name in ("min_patches", "max_patches")}
        return dict(made(text=[text], images=[image], return_tensors="pt", **bounds))
    finally:
        ProcessorMixin.check_argument_for_proper_class = check


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("shape", "tiles"),
    [pytest.param((30, 40), 0, marks=LONG), ((61, 90), 2), pytest.param((90, 20), 3, marks=LONG)],
)
def test_ids_features_and_answers_are_transformers(shape: tuple[int, int], tiles: int) -> None:
    folder, _, reference, model, processor = load()
    tokenizer = load_tokenizer(folder)
    image, text = Image.fromarray(noise(*shape)), "see <image> now"
    array, items = processor.image(image, {})
    assert [item.grid for item in items] == [(tiles, 64)]
    array = np.array(array)
    where = Features(path="one", digest=b"o" * 32, dtype="uint8", shape=array.shape)
    processed = Processed(dtype="uint8", shape=array.shape, items=items)
    media = [Prepared(kind="image", digest=b"o" * 32, processed=processed, features=where)]
    placer = Placer(processor, tokenizer)
    placed = placer.place_spelled(tokenizer.encode(placer.spelled(text, media), True), media)
    theirs = by_transformers(folder, text, image)
    ids = theirs["input_ids"]
    assert placed.ids.tolist() == ids[0].tolist()
    given = {key: theirs[key] for key in theirs if key.startswith(("pixel", "num_"))}
    with torch.no_grad():
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
            eos_token_id=None, pad_token_id=0, **given,
        )  # fmt: skip
        expected = torch.cat(reference.model.get_image_features(**given).pooler_output)
        assert model.tower is not None
        ours = model.tower([TowerInput(torch.from_numpy(array), items[0].grid)])
    assert expected.std() > 0.05
    assert (ours - expected).abs().max() <= 1e-4
    setup = Setup(context_length=1024, chunk_tokens=200, media_rows=1024, num_pages=300)
    engine = InProcess(model, VOCAB, setup)
    engine.features["one"] = array
    for _ in range(2):
        (found,) = engine.finish([engine.submit(placed.ids.tolist(), GREEDY, media=placed.items)])
        assert found.tokens == out[0, len(placed.ids) :].tolist()
    assert found.end is not None
    assert found.end.cached_tokens > len(placed.ids) - 20


def test_parameters_are_counted_and_bounds_hold() -> None:
    _, checkpoint, _, model, processor = load()
    facts = facts_of(checkpoint.config)
    assert facts.num_parameters() == sum(parameter.numel() for parameter in model.parameters())
    assert facts.tower is not None
    (most,) = processor.image(Image.fromarray(noise(90, 20)), {})[1]
    assert most.count == facts.tower.max_positions, "memory is planned by this"
    (least,) = processor.image(Image.fromarray(noise(90, 20)), processor.little_detail())[1]
    assert (least.grid, least.count) == ((0, 48), 145)


def test_sizes_that_queries_can_not_read_are_refused() -> None:
    _, checkpoint, *_ = load()
    settings = {"processor_config": {"image_processor": {**SETTINGS, "tile_size": 32}}}
    with pytest.raises(ConfigError, match="queries read squares"):
        facts_of({**checkpoint.config, **settings})
