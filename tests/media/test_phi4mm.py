"""Phi-4-multimodal against transformers: ids and features of its processor, both towers, and greedy answers through the
engine, with the adapter that a prompt's media ask for. Transformers' weights have that adapter merged."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import InProcess, Setup
from PIL import Image
from prompts import Prompt, noise
from seeing import CPU
from test_in_engine import GREEDY, NEW
from tiny_phi4mm import AUDIO, Form, Phi4, load_phi4, placed_prompt, sound
from tiny_vision import IMAGE, VOCAB

from bough.config.hf import open_checkpoint
from bough.core.errors import ConfigError, WeightsError
from bough.core.messages import LogprobSpec
from bough.layers.tower import TowerInput
from bough.models.load import build_model
from bough.models.registry import facts_of
from bough.multimodal.errors import MediaUnsupported
from bough.multimodal.families import processor_of
from bough.multimodal.phi4mm import grid_of
from bough.multimodal.placing import Placer

FORMS: list[Form] = ["built in", "own"]
PROMPTS: dict[str, tuple[str, list[tuple[int, int]], list[float]]] = {
    "text": ("hello you", [], []),
    "image": ("see <|image|> now", [(20, 30)], []),
    "several": ("see <|image|> and <|image|> now", [(61, 90), (24, 24)], []),
    "sound": ("hear <|audio|> now", [], [0.71]),
    "sounds": ("hear <|audio|> and <|audio|>", [], [0.3]),
    "both": ("see <|image|> hear <|audio|> now", [(30, 100)], [0.71]),
}
PROMPTS["sounds"] = (PROMPTS["sounds"][0], [], [0.5, 0.5])
"""Of equal length: of sounds in a batch, transformers attends to the padding of the shorter ones."""
ADAPTER = {"text": "", "image": "vision", "several": "vision", "sound": "speech", "sounds": "speech", "both": "vision"}


def inputs(name: str) -> tuple[str, list[Image.Image], list[np.ndarray]]:
    text, shapes, seconds = PROMPTS[name]
    images = [Image.fromarray(noise(*shape, seed=at)) for at, shape in enumerate(shapes)]
    return text, images, [sound(each, seed=at) for at, each in enumerate(seconds)]


def their_answer(phi4: Phi4, name: str, adapter: str) -> tuple[list[int], list[int]]:
    """Ids of the prompt and of the answer. Without a cache: transformers 5.17 would hear the sound again in every step."""
    given = phi4.theirs(*inputs(name))
    ids = given.pop("input_ids")
    with torch.no_grad():
        out = phi4.references[adapter].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
            eos_token_id=None, pad_token_id=0, use_cache=False, **given,
        )  # fmt: skip
    return ids[0].tolist(), out[0, ids.shape[1] :].tolist()


def prompt(phi4: Phi4, name: str) -> Prompt:
    return placed_prompt(phi4, *inputs(name))


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_those_of_the_adapter_that_the_media_ask_for(form: Form) -> None:
    phi4 = load_phi4(form)
    engine = InProcess(phi4.model, VOCAB, Setup(context_length=512, chunk_tokens=17, num_pages=200))
    prompts = {name: prompt(phi4, name) for name in PROMPTS}
    wanted = {name: their_answer(phi4, name, ADAPTER[name]) for name in PROMPTS}
    for name, made in prompts.items():
        assert made.ids == wanted[name][0], name
    for _ in range(2):  # the second time from the cache
        found = engine.finish([made.submit(engine, GREEDY) for made in prompts.values()])
        for name, answer in zip(prompts, found, strict=True):
            assert answer.tokens == wanted[name][1], name
            assert answer.end is not None
    assert all(answer.end.cached_tokens > 0 for answer, made in zip(found, prompts.values(), strict=True) if made.items)


def test_adapters_count() -> None:
    """Otherwise the answers above would be accidents."""
    phi4 = load_phi4()
    answers = {name: their_answer(phi4, "both", name)[1] for name in phi4.references}
    assert len({tuple(answer) for answer in answers.values()}) == 3


@pytest.mark.parametrize("shape", [(20, 30), (24, 24), (61, 90), (61, 83), (100, 23), (200, 210)])
def test_pictures_are_seen_as_transformers_sees_them(shape: tuple[int, int]) -> None:
    phi4 = load_phi4()
    image = Image.fromarray(noise(*shape))
    array, items = phi4.processor.image(image, {})
    theirs = phi4.theirs("<|image|>", [image], [])
    ids = theirs.pop("input_ids")
    assert items[0].count == int((ids == IMAGE).sum())
    embed = phi4.references[""].model.embed_tokens_extend.image_embed
    with torch.no_grad():
        wanted = embed(ids, torch.zeros(*ids.shape, 48), **theirs)[ids == IMAGE]
        found = phi4.model.tower([TowerInput(torch.from_numpy(np.array(array)), items[0].grid)])  # type: ignore[misc]
    assert wanted.std() > 0.1
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("seconds", [0.025, 0.3, 7.3, pytest.param(50.0, marks=pytest.mark.long)])
def test_sounds_are_heard_as_transformers_hears_them(seconds: float) -> None:
    """The longest has more tokens than see one another."""
    phi4 = load_phi4()
    spectrum, items = phi4.processor.audio(sound(seconds), {})
    theirs = phi4.theirs("<|audio|>", [], [sound(seconds)])
    ids = theirs["input_ids"]
    assert np.abs(spectrum - theirs["audio_input_features"][0].numpy()).max() < 1e-4
    assert items[0].count == int((ids == AUDIO).sum())
    embed = phi4.references[""].model.embed_tokens_extend.audio_embed
    for mode, name in enumerate(("speech", "vision")):
        with torch.no_grad():
            wanted = embed(
                ids, torch.zeros(*ids.shape, 48), theirs["audio_input_features"], theirs["audio_embed_sizes"],
                audio_projection_mode=name,
            )[ids == AUDIO]  # fmt: skip
            found = phi4.model.tower([TowerInput(torch.from_numpy(spectrum), (len(spectrum), mode))])  # type: ignore[misc]
        assert wanted.std() > 0.1
        assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_sounds_in_one_pass_do_not_see_one_another() -> None:
    phi4 = load_phi4()
    tower = phi4.model.tower
    assert tower is not None
    given = [TowerInput(torch.from_numpy(phi4.processor.audio(sound(each), {})[0]), (0, 0)) for each in (0.3, 0.7)]
    given = [each._replace(grid=(len(each.features), 0)) for each in given]
    image, items = phi4.processor.image(Image.fromarray(noise(20, 30)), {})
    given.insert(1, TowerInput(torch.from_numpy(np.array(image)), items[0].grid))
    with torch.no_grad():
        assert torch.allclose(tower(given), torch.cat([tower([each]) for each in given]), atol=1e-5)


def test_a_picture_may_have_as_many_tiles_as_is_asked_for() -> None:
    phi4 = load_phi4()
    image = Image.fromarray(noise(90, 70))
    rows, columns, *_ = phi4.processor.image(image, {})[1][0].grid
    assert (rows, columns) == (2, 2), "of five tiles at most, the nearest shape"
    little = phi4.processor.image(image, phi4.processor.little_detail())[1][0]
    assert little.grid[:2] == (1, 1)
    with pytest.raises(MediaUnsupported, match="narrow"):
        phi4.processor.image(Image.fromarray(noise(2, 200)), {})
    assert grid_of(1344, 896, 448, 36) == (3, 2)


def test_numbered_marks_of_the_original_checkpoint_are_taken() -> None:
    phi4 = load_phi4()
    text, images, sounds = inputs("both")
    numbered = text.replace("<|image|>", "<|image_1|>").replace("<|audio|>", "<|audio_1|>")
    made = placed_prompt(phi4, numbered, images, sounds)
    assert made.ids == prompt(phi4, "both").ids
    assert Placer(phi4.processor, phi4.tokenizer).marker_text("image") == "<|image|>"


def test_a_sound_beside_images_is_another_item() -> None:
    phi4 = load_phi4()
    alone, both = prompt(phi4, "sound"), prompt(phi4, "both")
    heard = [item for item in both.items if item.kind == "audio"]
    assert heard[0].grid[0] == alone.items[0].grid[0]
    assert heard[0].key != alone.items[0].key
    assert phi4.processor.together(both.items) == both.items, "once is enough"


def test_prompts_of_other_adapters_share_no_kv() -> None:
    phi4 = load_phi4()
    engine = InProcess(phi4.model, VOCAB, Setup(context_length=512, page_size=4))
    ids = list(range(20, 60))
    for adapter in (0, 1, 2):
        (first,) = engine.finish([engine.submit(ids, GREEDY, adapter=adapter)])
        (second,) = engine.finish([engine.submit(ids, GREEDY, adapter=adapter)])
        assert first.end is not None
        assert second.end is not None
        assert first.end.cached_tokens == 0
        assert second.end.cached_tokens >= 36
        assert first.tokens == second.tokens
    (refused,) = engine.finish([engine.submit(ids, GREEDY, adapter=3)])
    assert refused.end is not None
    assert (refused.end.reason, refused.end.status) == ("error", 400)
    assert "adapter 3" in refused.end.message


def test_scores_of_a_prompt_are_those_of_its_adapter() -> None:
    phi4 = load_phi4()
    made = prompt(phi4, "image")
    engine = InProcess(phi4.model, VOCAB, Setup(context_length=512))
    (found,) = engine.finish([made.submit(engine, GREEDY, logprobs=LogprobSpec(start=1))])
    given = phi4.theirs(*inputs("image"))
    with torch.no_grad():
        logits = phi4.references["vision"](**given).logits[0].log_softmax(-1)
    wanted = logits[:-1].gather(1, given["input_ids"][0, 1:, None])[:, 0].tolist()
    assert found.prompt_logprobs is not None
    assert [each for each in found.prompt_logprobs.logprobs if each is not None] == pytest.approx(wanted, abs=2e-4)


def test_parameters_are_counted_and_memory_is_planned_for_the_largest() -> None:
    phi4 = load_phi4()
    facts = facts_of(phi4.checkpoint.config)
    assert facts.num_parameters() == sum(parameter.numel() for parameter in phi4.model.parameters())
    assert facts.tower is not None
    assert [each.name for each in facts.adapters] == ["vision", "speech"]
    shapes = [(120, 24), (24, 120), (48, 48), (60, 40)]
    most = max(phi4.processor.image(Image.fromarray(noise(*shape)), {})[1][0].count for shape in shapes)
    assert most <= facts.tower.max_positions
    assert facts.tower.max_positions == 22_500, "half an hour of sound"


def test_the_language_model_alone_needs_no_adapters(tmp_path: Path) -> None:
    phi4 = load_phi4("own")
    checkpoint = open_checkpoint(str(phi4.folder), language_model_only=True)
    facts = facts_of(checkpoint.config)
    assert not facts.adapters
    model = build_model(checkpoint, dtype=torch.float32, device=CPU, context_length=256)
    engine = InProcess(model, VOCAB, Setup())
    (found,) = engine.finish([engine.submit(prompt(phi4, "text").ids, GREEDY)])
    assert found.tokens == their_answer(phi4, "text", "")[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"o_proj": 3}}, "rank_pattern"),
        ({"peft_type": "IA3"}, "no LoRA"),
        ({"r": 0}, "r 0"),
        ({"bias": "all"}, "bias"),
    ],
)
def test_adapters_that_are_not_served_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(load_phi4().folder, folder)
    file = folder / "speech-lora" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(str(folder))


def test_adapters_with_tensors_of_other_names_or_none_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(load_phi4().folder, folder)
    file = folder / "vision-lora" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"
    save_file(
        {key.replace("o_proj", "out_proj") if key == name else key: value for key, value in tensors.items()}, file
    )
    with pytest.raises(WeightsError, match="1 missing, 1 extra") as raised:
        build_model(open_checkpoint(str(folder)), dtype=torch.float32, device=CPU)
    assert "model.layers.1.self_attn.o_proj.lora_A.vision.weight" in str(raised.value.why)
    file.unlink()
    with pytest.raises(ConfigError, match=r"no adapter_model\.safetensors"):
        open_checkpoint(str(folder))


def test_a_checkpoint_without_folders_of_adapters_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    phi4 = load_phi4()
    folder = tmp_path / "model"
    shutil.copytree(phi4.folder, folder)
    for name in ("vision-lora", "speech-lora"):
        shutil.rmtree(folder / name)
    checkpoint = open_checkpoint(str(folder))
    model = build_model(checkpoint, dtype=torch.float32, device=CPU, context_length=512)
    assert "no vision-lora and no speech-lora" in caplog.text
    plain = processor_of(checkpoint.config)
    assert plain is not None
    assert plain.adapter({"image", "audio"}) == 0
    engine = InProcess(model, VOCAB, Setup(context_length=512))
    (found,) = engine.finish([replace(prompt(phi4, "image"), adapter=0).submit(engine, GREEDY)])
    assert found.tokens == their_answer(phi4, "image", "")[1]
