"""Qwen2.5-Omni and Qwen3-Omni against transformers: sounds, images and videos in one prompt, and sounds between frames."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
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
from safetensors.torch import load_file, save_file
from seeing import CPU
from test_in_engine import GREEDY, NEW
from test_sound import sound
from tiny import EXPERTS, SIZES, shake
from tiny_vision import DEEP, EOS, PIXELS, SECTIONS, TURNS, VIDEOS, VISION, VOCAB

from bough.config.hf import open_checkpoint
from bough.core.media import Features
from bough.layers.decoder import Decoder
from bough.layers.tower import TowerInput
from bough.models.load import build_model
from bough.models.registry import facts_of
from bough.multimodal.families import processor_of
from bough.multimodal.placing import Placed, Placer
from bough.multimodal.processor import Prepared, Processed, VideoInfo
from tests.covers import long

IMAGE, VIDEO, START, END, AUDIO, AUDIO_START, AUDIO_END = range(300, 307)
RATE, HOP = 16_000, 160
IDS = {
    "vision_start_token_id": START, "vision_end_token_id": END, "audio_start_token_id": AUDIO_START,
    "audio_end_token_id": AUDIO_END,
}  # fmt: skip
EAR = {
    "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 56,
    "output_dim": 48, "max_source_positions": 60,
}  # fmt: skip
EXTRACTOR = {"feature_size": 16, "sampling_rate": RATE, "hop_length": HOP, "n_fft": 400, "chunk_length": 8}
VERSIONS = ("2.5", "3")
WHOLE = {"2.5": "Qwen2_5OmniModel", "3": "Qwen3OmniMoeForConditionalGeneration"}


def thinker(version: str) -> Any:
    text = {**SIZES, "vocab_size": VOCAB, "eos_token_id": EOS}
    if version == "2.5":
        config = transformers.Qwen2_5OmniThinkerConfig(
            text_config={**text, "rope_parameters": SECTIONS},
            vision_config={
                **VISION, "hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 56, "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            audio_config={**EAR, "n_window": 10}, position_id_per_seconds=5, seconds_per_chunk=1, audio_token_index=AUDIO,
            image_token_index=IMAGE, video_token_index=VIDEO, attn_implementation="eager", **IDS,
        )  # fmt: skip
        return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)
    config = transformers.Qwen3OmniMoeThinkerConfig(
        text_config={**text, **EXPERTS, "head_dim": 16, "rope_parameters": TURNS},
        vision_config=DEEP, audio_config={**EAR, "n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 6},
        position_id_per_seconds=13, audio_token_id=AUDIO, image_token_id=IMAGE, video_token_id=VIDEO,
        attn_implementation="eager", **IDS,
    )  # fmt: skip
    return transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config)


@cache
def omni(version: str) -> tuple[Any, Decoder, Any, Any]:
    folder = Path(tempfile.mkdtemp(prefix="bough-tiny-"))
    torch.manual_seed(7)
    reference = thinker(version).eval()
    shake(reference)
    reference.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({**PIXELS, **EXTRACTOR}))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS))
    checkpoint = open_checkpoint(str(folder))
    model = build_model(checkpoint, dtype=torch.float32, device=CPU, context_length=512)
    processor = processor_of(checkpoint.config)
    assert isinstance(model, Decoder)
    return reference, model, checkpoint, processor


def medium(version: str, kind: str, made: tuple[Any, ...], name: str) -> tuple[Prepared, np.ndarray]:
    array, items, *_ = made
    array = np.array(array)
    digest = name.encode().ljust(32, b".")
    where = Features(path=name, digest=digest, dtype=array.dtype.name, shape=array.shape)
    processed = Processed(dtype=where.dtype, shape=array.shape, items=items)
    return Prepared(kind=kind, digest=digest, processed=processed, features=where), array  # type: ignore[arg-type]


FPS = {"2.5": 2.0, "3": 2.0}
"""Of videos: pairs of frames stand 5 and 13 positions apart."""
SOUNDS = (sound(1.31), sound(2.35, seed=1), sound(0.07, seed=2))
FRAMES = [noise(24, 40, seed) for seed in range(7)]
INFO = VideoInfo(total=7, fps=2.0, width=40, height=24)


@cache
def media(version: str) -> dict[str, tuple[Prepared, np.ndarray]]:
    processor = omni(version)[3]
    options = processor.options("video", {"fps": FPS[version], "use_audio_in_video": True})
    frames = [Image.fromarray(each) for each in FRAMES]
    return {
        "image": medium(version, "image", processor.image(Image.fromarray(noise(16, 24)), {}), "image"),
        "video": medium(version, "video", processor.video(INFO, range(7), frames, options), "video"),
        **{
            f"sound {number}": medium(version, "audio", processor.audio(samples, {}), f"sound {number}")
            for number, samples in enumerate(SOUNDS)
        },
    }


MARKS = {"image": [START, IMAGE, END], "video": [START, VIDEO, END], "sound": [AUDIO_START, AUDIO, AUDIO_END]}
ASKED = {
    "all kinds": (5, "sound 0", 6, "image", 7, "video", 8, "sound 1", 9),
    "a short sound": ("sound 2", 4),
    "heard video": (5, 6, "heard", 7, "image", 8),
    "text": (7, 8, 9),
}


def names_of(case: str) -> list[str]:
    return [each for each in ASKED[case] if isinstance(each, str)]


@cache
def placed(version: str, case: str) -> Placed:
    ids: list[int] = []
    prepared = []
    for each in ASKED[case]:
        if isinstance(each, int):
            ids.append(each)
            continue
        ids += MARKS["video" if each == "heard" else each.split()[0]]
        found = media(version)["video" if each == "heard" else each][0]
        prepared.append(found.with_sound(media(version)["sound 1"][0]) if each == "heard" else found)
    return Placer(omni(version)[3], None).place_ids(np.array(ids, np.int32), prepared)


def spectra(version: str, samples: Iterable[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """As transformers' processors make them of each sound by itself."""
    extractor = transformers.WhisperFeatureExtractor(**EXTRACTOR)
    how = {"padding": "max_length"} if version == "2.5" else {"padding": True, "truncation": False}
    found = [
        extractor(each, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **how) for each in samples
    ]
    most = max(each["input_features"].shape[-1] for each in found)
    return tuple(
        torch.cat([torch.nn.functional.pad(each[name], (0, most - each[name].shape[-1])) for each in found])
        for name in ("input_features", "attention_mask")
    )  # type: ignore[return-value]


def theirs(version: str, case: str) -> dict[str, Any]:
    """What transformers takes beside ids."""
    seeing, found = omni(version)[1].tower.seeing, {}
    names = names_of(case)
    heard = [
        SOUNDS[1] if name == "heard" else SOUNDS[int(name[-1])] for name in names if name[:5] in ("sound", "heard")
    ]
    if heard:
        found["input_features"], found["feature_attention_mask"] = spectra(version, heard)
    if "image" in names:
        pixels = torch.from_numpy(media(version)["image"][1])
        found["pixel_values"] = seeing._cut(pixels)
        found["image_grid_thw"] = torch.tensor([media(version)["image"][0].processed.items[0].grid])
    if "video" in names or "heard" in names:
        prepared, pixels = media(version)["video"]
        found["pixel_values_videos"] = seeing._cut(torch.from_numpy(pixels))
        _, h, w, *_ = prepared.processed.items[0].grid
        found["video_grid_thw"] = torch.tensor([(len(prepared.processed.items), h, w)])
        found["video_second_per_grid"] = torch.tensor([2 / FPS[version]])
    if "heard" in names:
        found["use_audio_in_video"] = True
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_sounds_and_positions_are_transformers(version: str) -> None:
    reference, model, checkpoint, processor = omni(version)
    assert model.tower is not None
    for number, samples in enumerate(SOUNDS):
        prepared, ours = media(version)[f"sound {number}"]
        given, mask = spectra(version, [samples])
        frames = int(mask.sum())
        items = prepared.processed.items
        assert sum(item.grid[0] for item in items) == frames
        assert np.abs(given[0, :, :frames].T.numpy() - ours[:frames]).max() < 1e-4
        with torch.no_grad():
            wanted = reference.get_audio_features(given, mask, return_dict=True).last_hidden_state
            inputs = [TowerInput(torch.from_numpy(ours[item.first : item.last]), item.grid) for item in items]
            found = model.tower(inputs)
        assert wanted.std() > 0.05
        assert (found[:, :48] - wanted).abs().max() < 1e-4
        assert not found[:, 48:].any()
    for case in ASKED:
        at = placed(version, case)
        ids, beside = torch.from_numpy(at.ids.astype(np.int64))[None], theirs(version, case)
        lengths = beside["feature_attention_mask"].sum(-1) if "input_features" in beside else None
        wanted, delta = reference.get_rope_index(
            ids, beside.get("image_grid_thw"), beside.get("video_grid_thw"), torch.ones_like(ids),
            beside.get("use_audio_in_video", False), lengths, beside.get("video_second_per_grid"),
        )  # fmt: skip
        ours = processor.positions(at.ids, at.items)
        assert ours.tolist() == wanted[:, 0].long().tolist(), case
        assert int(ours.max()) + 1 - len(at.ids) == int(delta)
    facts = facts_of(checkpoint.config)
    assert facts.num_parameters() == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("version", VERSIONS)
def test_sounds_stand_between_frames_as_transformers_puts_them(version: str) -> None:
    if version == "2.5":
        from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor as Theirs
    else:
        from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor as Theirs
    made = Theirs.__new__(Theirs)
    made.audio_bos_token, made.audio_eos_token, made.video_token, made.audio_token = "seva"
    made.video_processor = type("Merges", (), {"merge_size": 2})
    beside = theirs(version, "heard video")
    heard = sum(item.count for item in media(version)["sound 1"][0].processed.items)
    text = made.replace_video_with_audio_token(
        {"video_grid_thw": beside["video_grid_thw"].numpy(), "video_second_per_grid": [2 / FPS[version]]}, 0,
        {"num_audio_tokens": [heard]}, 0, position_id_per_seconds=5 if version == "2.5" else 13, seconds_per_chunk=1,
    )  # fmt: skip
    tokens = {"s": AUDIO_START, "e": AUDIO_END, "v": VIDEO, "a": AUDIO}
    assert placed(version, "heard video").ids.tolist()[3 : 3 + len(text)] == [tokens[each] for each in text]
    assert text.count("av") > 1


@cache
def expected(version: str, case: str) -> list[int]:
    ids = torch.from_numpy(placed(version, case).ids.astype(np.int64))[None]
    out = omni(version)[0].generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
        eos_token_id=None, pad_token_id=0, **theirs(version, case),
    )  # fmt: skip
    return out[0, ids.shape[1] :].tolist()


SETUPS = {
    "plain": Setup(overlap=False, radix_cache=False, context_length=512),
    "in sevens, in a small store": Setup(
        chunk_tokens=7, page_size=4, media_rows=320, step_patches=1, context_length=512
    ),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("setup", [long("plain"), "in sevens, in a small store"])
def test_answers_are_transformers(version: str, setup: str) -> None:
    _, model, _, processor = omni(version)
    engine = InProcess(model, VOCAB, SETUPS[setup])
    engine.features |= {each.features.path: array for each, array in media(version).values()}
    for _ in range(2):
        ids = []
        for case in ASKED:
            at = placed(version, case)
            positions = processor.positions(at.ids, at.items).astype("<i4").tobytes() if at.items else b""
            ids.append(engine.submit(at.ids.tolist(), GREEDY, media=at.items, positions=positions))
        answers = engine.finish(ids)
        assert [answer.tokens for answer in answers] == [expected(version, case) for case in ASKED]
    heard = answers[list(ASKED).index("heard video")].end
    assert heard is not None
    assert set(heard.media_tokens) == {"video", "audio", "image"}
    if SETUPS[setup].radix_cache:
        assert heard.cached_tokens > len(placed(version, "heard video").ids) - 5


@pytest.mark.parametrize("version", VERSIONS)
def test_checkpoints_with_a_talker(version: str, tmp_path: Path) -> None:
    """By the names and in the config of whole models, as they are published."""
    _, model, checkpoint, _ = omni(version)
    source = Path(checkpoint.path)
    tensors = {"talker.model.norm.weight": torch.ones(4)}
    for name, tensor in load_file(source / "model.safetensors").items():
        bare = name.removeprefix("model.").removeprefix("language_model.model.")
        for part in ("language_model.", "layers.", "embed_tokens.", "norm."):
            bare = f"model.{bare.removeprefix('language_model.')}" if bare.startswith(part) else bare
        tensors[f"thinker.{bare}"] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    whole = {"architectures": [WHOLE[version]], "model_type": "omni", "thinker_config": config, "talker_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (tmp_path / name).write_text((source / name).read_text())
    opened = open_checkpoint(str(tmp_path))
    again = build_model(opened, dtype=torch.float32, device=CPU, context_length=512)
    assert isinstance(again, Decoder)
    for (name, ours), (_, wanted) in zip(again.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(ours, wanted), name
    processor = processor_of(opened.config)
    assert processor is not None
    assert processor.identity == omni(version)[3].identity
