"""Gemma 3n against transformers: spectra, what its encoder of sounds makes of them, and greedy answers. What timm's tower
makes of images, and answers of the whole of it, were recorded (`write_gemma3n_golden.py`)."""

from __future__ import annotations

import hashlib
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from in_process import InProcess, Setup
from seeing import CPU
from test_sound import sound
from tiny_gemma3n import CONFIG, EOA, EOI, EXTRACTOR, IMAGES, SOUNDS, drawn, golden, heard, load_gemma3n
from tiny_vision import VOCAB

from bough.config.fields import Fields
from bough.config.gemma3n_media import read_gemma3n_media
from bough.config.hf import open_checkpoint
from bough.config.usm import read_usm, read_usm_spectrum
from bough.core.errors import BoughError, InvalidRequest
from bough.core.sampling import SamplingParams
from bough.layers.build import Build
from bough.layers.decoder import Decoder
from bough.layers.place import place_weights
from bough.layers.tower import TowerInput
from bough.models import gemma3n_mm
from bough.models.load import build_model
from bough.models.mobilenet_v5 import MobileNetV5
from bough.models.registry import facts_of
from bough.models.usm_encoder import UsmEncoder
from bough.multimodal.placing import Placed, Placer
from bough.multimodal.processor import Prepared
from bough.multimodal.usm_spectrum import usm_spectrum
from bough.quantization.unquantized import Unquantized
from bough.weights.slots import owners_of
from tests.covers import long

NEW = 12
IMAGE, AUDIO = "<image_soft_token>", "<audio_soft_token>"
ASKED: dict[str, tuple[str, list[int], list[int]]] = {
    "image": (f"see {IMAGE}what?", [0], []),
    "another image": (f"see {IMAGE}what?", [1], []),
    "sound": (f"hear {AUDIO}what?", [], [0]),
    "short sound": (f"hear {AUDIO}what?", [], [2]),
    "several images": (f"{IMAGE}{IMAGE} or {IMAGE}", [0, 1, 2], []),
    "interleaved": (f"a{IMAGE}b {AUDIO}c{AUDIO}\n{IMAGE} d", [2, 0], [1, 0]),
    "text": ("neither <end_of_image> nor <end_of_audio>", [], []),
}
"""Texts, and the numbers of their images and sounds."""


def media_of(case: str) -> list[tuple[Prepared, np.ndarray]]:
    """In the order of the text."""
    text, images, sounds = ASKED[case]
    tiny, left = load_gemma3n(), {IMAGE: iter(images), AUDIO: iter(sounds)}
    found = []
    for at in range(len(text)):
        for mark, take in ((IMAGE, tiny.image), (AUDIO, tiny.sound)):
            if text.startswith(mark, at):
                found.append(take(next(left[mark])))
    return found


@cache
def placed(case: str) -> Placed:
    tiny = load_gemma3n()
    media = [each for each, _ in media_of(case)]
    placer = Placer(tiny.processor, tiny.tokenizer)
    text = ASKED[case][0]
    if not media:
        return Placed(np.array(tiny.tokenizer.encode(text, True), np.int32), ())
    return placer.place_spelled(tiny.tokenizer.encode(placer.spelled(text, media), True), media)


def given(case: str) -> dict[str, torch.Tensor]:
    """What transformers' model takes beside ids; of images their numbers."""
    _, images, sounds = ASKED[case]
    found = heard(sounds) if sounds else {}
    return {**found, "pixel_values": torch.tensor(images)[:, None].float()} if images else found


@cache
def expected(case: str) -> list[int]:
    ids = torch.from_numpy(placed(case).ids.astype(np.int64))[None]
    out = load_gemma3n().reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
        eos_token_id=None, pad_token_id=0, **given(case),
    )  # fmt: skip
    return out[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", ASKED)
def test_ids_are_transformers(case: str) -> None:
    """By its processor's own rule for each placeholder."""
    tiny = load_gemma3n()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.folder)
    text = ASKED[case][0]
    for kind, mark, count in (("image", IMAGE, 9), ("audio", AUDIO, 12)):
        around = f"\n\n<start_of_{kind}>{mark * count}<end_of_{kind}>\n\n"
        text = text.replace(mark, around)
    assert placed(case).ids.tolist() == tokenizer(text)["input_ids"]
    if media := [each for each, _ in media_of(case)]:
        by_ids = np.array(tiny.tokenizer.encode(ASKED[case][0], True), np.int32)
        again = Placer(tiny.processor, tiny.tokenizer).place_ids(by_ids, media)
        assert (again.ids.tolist(), again.items) == (placed(case).ids.tolist(), placed(case).items)


def test_images_are_timms() -> None:
    tiny = load_gemma3n()
    wanted = torch.tensor(golden()["features"])
    assert wanted.std() > 0.5
    assert (wanted[0] - wanted[1]).abs().max() > 0.1
    assert tiny.model.tower is not None
    made = [tiny.image(number) for number in range(len(IMAGES))]
    inputs = [TowerInput(torch.from_numpy(array), each.processed.items[0].grid) for each, array in made]
    with torch.no_grad():
        assert (tiny.model.tower(inputs).view(wanted.shape) - wanted).abs().max() < 1e-4
        assert (tiny.model.tower(inputs[1:2]) - wanted[1]).abs().max() < 1e-4


def test_the_published_tower_has_timms_tensors() -> None:
    """By name and shape, in its own size."""
    facts = read_gemma3n_media(Fields({})).seeing
    build = Build(scheme=Unquantized(), dtype=torch.float32, device=torch.device("meta"), context_length=32)
    tower = MobileNetV5(facts, build)
    place_weights(tower)
    shapes = {f"tower.seeing.{name}": slot.shape for each in owners_of(tower) for name, slot in each.slots.items()}
    found = {}
    for name in golden()["tensors"]:
        (target,) = gemma3n_mm.WEIGHTS.targets_of(name) or ("",)
        found[name.removeprefix("model.vision_tower.timm_model.")] = list(shapes.pop(target))
    assert not shapes
    lines = [f"{name} {shape}" for name, shape in sorted(found.items())]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == golden()["published"]
    assert facts.num_parameters() == sum(math.prod(shape) for shape in found.values()) == 294_126_912


@pytest.mark.parametrize(
    "settings", [{}, EXTRACTOR, {"preemphasis_htk_flavor": False, "input_scale_factor": 3.0, "fft_overdrive": False},
                 {"preemphasis": 0.0, "hop_length_ms": 12.0, "frame_length_ms": 25.0}]
)  # fmt: skip
def test_spectra_are_transformers(settings: dict[str, Any]) -> None:
    extractor = transformers.Gemma3nAudioFeatureExtractor(**settings)
    facts = read_usm_spectrum(Fields(settings))
    for samples in (sound(0.71), 1e-4 * sound(0.3, seed=1), np.zeros(12_800, np.float32)):
        found = extractor(samples, return_tensors="np")
        whole = np.pad(samples, (0, -len(samples) % 128))
        ours = usm_spectrum(facts, whole)
        assert found["input_features_mask"].all()
        assert ours.dtype == np.float32
        assert ours.shape == found["input_features"][0].shape
        assert np.abs(ours - found["input_features"][0]).max() < 1e-4


def test_sounds_are_transformers() -> None:
    """All at once, each as if it were alone."""
    tiny = load_gemma3n()
    assert tiny.model.tower is not None
    made = [tiny.sound(number) for number in range(len(SOUNDS))]
    inputs = [TowerInput(torch.from_numpy(array), each.processed.items[0].grid) for each, array in made]
    with torch.no_grad():
        ours = tiny.model.tower(inputs).view(len(SOUNDS), 12, -1)
        for number, out in enumerate(ours):
            features = heard([number])
            wanted = tiny.reference.model.get_audio_features(
                features["input_features"], ~features["input_features_mask"], return_dict=True
            ).pooler_output[0]
            filler = tiny.reference.model.embed_audio(input_ids=torch.tensor([[VOCAB - 1]]))[0]
            assert wanted.std() > 0.5
            assert len(wanted) == tiny.processor.facts.hearing.positions(len(inputs[number].features))
            assert (out[: len(wanted)] - wanted).abs().max() < 1e-4
            assert (out[len(wanted) :] - filler).abs().max() < 1e-5 if len(wanted) < 12 else number == 0


@pytest.mark.parametrize(
    "changed", [{"conf_attention_context_right": 2}, {"conf_attention_context_left": 1, "conf_conv_kernel_size": 5},
                {"gradient_clipping": 0.7, "conf_residual_weight": 0.25, "sscp_conv_kernel_size": [[5, 3], [3, 5]],
                 "sscp_conv_stride_size": [[3, 2], [1, 2]], "conf_reduction_factor": 1}]
)  # fmt: skip
def test_other_encoders_are_transformers(changed: dict[str, Any]) -> None:
    given = {**CONFIG["audio_config"], **changed}
    reference = transformers.Gemma3nAudioEncoder(transformers.Gemma3nAudioConfig(**given)).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(drawn(name, parameter.shape))
    facts = read_usm(Fields(given))
    build = Build(scheme=Unquantized(), dtype=torch.float32, device=torch.device("cpu"), context_length=32)
    ours = UsmEncoder(facts, build)
    place_weights(ours)
    own = {name.replace(".matrix.", "."): each for name, each in ours.named_parameters()}
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            (target,) = gemma3n_mm.WEIGHTS.targets_of(f"model.audio_tower.{name}") or ("",)
            own.pop(target.removeprefix("tower.hearing.")).copy_(parameter)
        spectra = [torch.from_numpy(usm_spectrum(read_usm_spectrum(Fields(EXTRACTOR)), each)) for each in SOUNDS[:2]]
        for out, each in zip(ours(spectra), spectra, strict=True):
            wanted = reference(each[None], torch.zeros(1, len(each), dtype=torch.bool)).last_hidden_state[0]
            assert len(wanted) == facts.positions(len(each))
            assert (out - wanted).abs().max() < 1e-4
    assert not own
    assert facts.num_parameters() == sum(parameter.numel() for parameter in reference.parameters())


SETUPS = {
    "plain": Setup(overlap=False, radix_cache=False, context_length=512),
    "in sevens, in a small store": Setup(
        chunk_tokens=7, page_size=4, media_rows=96, step_patches=1, context_length=512
    ),
}


@pytest.mark.parametrize("setup", [long("plain"), "in sevens, in a small store"])
def test_answers_are_transformers(setup: str) -> None:
    tiny = load_gemma3n()
    engine = InProcess(tiny.model, VOCAB, SETUPS[setup])
    for case in ASKED:
        engine.features |= {each.features.path: array for each, array in media_of(case)}
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
    for _ in range(2):
        ids = [engine.submit(placed(case).ids.tolist(), sampling, media=placed(case).items) for case in ASKED]
        answers = engine.finish(ids)
        assert [answer.tokens for answer in answers] == [golden()["answers"][case] for case in ASKED]
    for (_, images, sounds), case, answer in zip(ASKED.values(), ASKED, answers, strict=True):
        assert answer.end is not None
        counts = {"image": 9 * len(images), "audio": 12 * len(sounds)}
        assert answer.end.media_tokens == {kind: count for kind, count in counts.items() if count}
        assert not SETUPS[setup].radix_cache or answer.end.cached_tokens > len(placed(case).ids) - 5


def test_the_reference_answers_as_recorded() -> None:
    """With what was recorded of images: the grid asks it for more."""
    assert expected("interleaved") == golden()["answers"]["interleaved"]
    assert len({tuple(answer) for answer in golden()["answers"].values()}) == len(ASKED)


def test_parameters_are_counted_and_bounds_hold() -> None:
    tiny = load_gemma3n()
    facts = facts_of(tiny.checkpoint.config)
    assert facts.num_parameters() == sum(parameter.numel() for parameter in tiny.model.parameters())
    assert facts.tower is not None
    assert facts.tower.kinds == ("image", "audio")
    counts = [each.processed.items[0].count for each, _ in (tiny.image(0), tiny.sound(0))]
    assert max(counts) == facts.tower.max_positions, "memory is planned by this"
    rules = tiny.processor.sound
    longest = np.zeros(int(rules.seconds * rules.rate), np.float32)
    (item,) = tiny.processor.audio(longest, {})[1]
    assert tiny.processor.facts.hearing.positions(item.grid[0]) == item.count == 12
    published = read_gemma3n_media(Fields({}))
    assert (published.samples, published.tower(2048).max_positions) == (480_000, 256)
    assert published.hearing.positions(published.spectrum.frames(480_000)) == 188


def test_dummy_weights_make_vectors_of_all_tokens() -> None:
    checkpoint = open_checkpoint(str(load_gemma3n().folder), load_format="dummy")
    model = build_model(checkpoint, dtype=torch.float32, device=CPU, context_length=128, load_format="dummy")
    assert isinstance(model, Decoder)
    assert model.embed.tokens.of(torch.tensor([5, EOI, EOA])).square().mean(1).min() > 1e-5


def test_served_as_a_language_model_alone() -> None:
    tiny = load_gemma3n()
    checkpoint = open_checkpoint(str(tiny.folder), language_model_only=True)
    model = build_model(checkpoint, dtype=torch.float32, device=CPU, context_length=128)
    assert isinstance(model, Decoder)
    assert model.tower is None
    assert facts_of(checkpoint.config).tower is None


def test_settings_of_a_request_are_refused() -> None:
    processor = load_gemma3n().processor
    with pytest.raises(InvalidRequest, match="takes no settings"):
        processor.options("image", {"max_pixels": 5})
    with pytest.raises(BoughError, match="9 positions"):
        processor.embedded(10, ())
    assert processor.embedded(9, ()).embedded


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"vision_config": {"architecture": "resnet50"}}, "mobilenetv5_300m_enc is served"),
        ({"vision_config": {"model_args": {"stem_size": 3}}}, "stem_size"),
        ({"vision_config": {"vocab_offset": 5}}, "begin at 5"),
        ({"vision_soft_tokens_per_image": 100}, "leave 256 positions"),
        ({"audio_config": {"sscp_conv_stride_size": [2, 2]}}, "sscp_conv_stride_size"),
        ({"audio_config": {"conf_num_attention_heads": 7}}, "7 heads"),
        ({"processor_config": {"image_processor": {"size": {"height": 700, "width": 700}}}}, "700 x 700"),
        ({"processor_config": {"image_processor": {"size": {"height": 768, "width": 512}}}}, "512 x 768"),
    ],
)
def test_senseless_configs_are_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(BoughError, match=words):
        read_gemma3n_media(Fields(changed))
