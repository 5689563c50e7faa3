"""Videos: which frames are seen, how large and when, against transformers and qwen-vl-utils (tests/golden/video.json);
positions, token ids and greedy answers against transformers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import InProcess, Setup
from PIL import Image
from prompts import noise
from seeing import load
from test_in_engine import GREEDY, NEW
from tiny_vision import END, START, VIDEO, VOCAB, make_tokenizer

from bough.config.fields import Fields
from bough.core.media import Features
from bough.multimodal.errors import MediaError
from bough.multimodal.film import open_film
from bough.multimodal.placing import Placer
from bough.multimodal.processor import Prepared, Processed, VideoInfo
from bough.multimodal.qwen_video import VideoRules
from bough.multimodal.worker import thinned
from bough.tokenizer.load import load_tokenizer
from tests.covers import cover

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "video.json").read_text())
NAMES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
INFO = VideoInfo(total=9, fps=3.0, width=40, height=24)
FRAMES = [noise(24, 40, seed=number) for number in range(9)]


def shown(indices: list[int], wanted: dict[str, Any]) -> bool:
    short = indices if len(indices) <= 12 else indices[:6] + indices[-6:]
    return short == wanted["indices"] and len(indices) == wanted.get("count", len(indices))


def test_frames_sizes_and_times_of_qwen3() -> None:
    from bough.multimodal.qwen_video import timestamps

    for capped in (False, True):
        size = {"shortest_edge": 4096, "longest_edge": 25_165_824}
        settings = {"size": size, "cap_pixels_per_frame": capped}
        rules = VideoRules.of(Fields(settings), whole=True, factor=32)
        for case in GOLDEN:
            wanted = case["qwen3"].get("capped" if capped else "plain")
            if wanted is None:
                continue
            info = VideoInfo(**{name: case[name] for name in ("total", "fps", "width", "height")})
            indices = rules.sample(info, {})
            assert shown(indices, wanted), case
            assert list(rules.frame_size(info, len(indices), {})) == wanted["size"], case
            notes = [f"<{each:.1f} seconds>" for each in timestamps(indices, info.fps)]
            assert (notes if len(indices) <= 12 else notes[:3] + notes[-3:]) == wanted["notes"], case


def test_frames_and_sizes_of_qwen2() -> None:
    rules = VideoRules.of(Fields({}), whole=False, factor=28)
    for case in GOLDEN:
        if "qwen2" not in case:
            continue
        info = VideoInfo(**{name: case[name] for name in ("total", "fps", "width", "height")})
        indices = rules.sample(info, {})
        assert shown(indices, case["qwen2"]), case
        assert list(rules.frame_size(info, len(indices), {})) == case["qwen2"]["size"], case


def test_requests_choose_frames() -> None:
    rules = VideoRules.of(Fields({}), whole=False, factor=28)
    info = VideoInfo(total=300, fps=30.0, width=100, height=100)
    assert len(rules.sample(info, {})) == 20
    assert len(rules.sample(info, {"fps": 1.0})) == 10
    assert len(rules.sample(info, {"num_frames": 7})) == 8
    assert len(rules.sample(info, {"max_frames": 5})) == 4
    assert rules.sample(VideoInfo(total=1, fps=30.0, width=100, height=100), {}) == [0]


def test_the_server_bounds_frames() -> None:
    assert thinned([0, 3, 6], 3) == [0, 3, 6]
    assert thinned(list(range(0, 100, 2)), 4) == [0, 32, 66, 98]
    assert thinned([4, 9], 1) == [4]


def prepared(name: str, options: dict[str, Any]) -> tuple[Prepared, np.ndarray]:
    processor = load(name).processor
    indices = processor.sample(INFO, options)
    images = [Image.fromarray(FRAMES[index]) for index in indices]
    array, items, notes = processor.video(INFO, indices, images, options)
    digest = bytes([len(indices)]) * 32
    where = Features(path=f"video-{len(indices)}", digest=digest, dtype="uint8", shape=array.shape)
    processed = Processed(dtype="uint8", shape=array.shape, items=items, notes=notes)
    return Prepared(kind="video", digest=digest, processed=processed, features=where), array


@pytest.mark.parametrize(("name", "options"), cover(NAMES, {"by rate": {}, "an odd frame": {"num_frames": 3}}))
def test_ids_positions_and_answers_are_transformers(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    seen = load(name)
    video, array = prepared(name, options)
    tokenizer = load_tokenizer(_tokenizer(tmp_path))
    placer = Placer(seen.processor, tokenizer)
    text = "see <|vision_start|><|video_pad|><|vision_end|> now"
    placed = placer.place_spelled(tokenizer.encode(placer.spelled(text, [video]), True), [video])
    by_ids = placer.place_ids(np.array(tokenizer.encode(text, True), np.int32), [video])
    assert (by_ids.ids.tolist(), by_ids.items) == (placed.ids.tolist(), placed.items)

    grid = torch.tensor([[len(video.processed.items), *video.processed.items[0].grid[1:3]]])
    pixels = seen.tower._cut(torch.from_numpy(array))
    times = [index / INFO.fps for index in seen.processor.sample(INFO, options)]
    rate = len(times) / INFO.total * INFO.fps
    ids = _expected_ids(name, tokenizer, times, video)
    assert placed.ids.tolist() == ids
    types = torch.tensor([[2 if token == VIDEO else 0 for token in ids]])
    extra = {"second_per_grid_ts": torch.tensor([2 / rate])} if name == "qwen2_5_vl" else {}
    axes, _ = seen.reference.model.get_rope_index(
        torch.tensor([ids]), mm_token_type_ids=types, video_grid_thw=grid.clone(), **extra
    )
    positions = seen.processor.positions(placed.ids, placed.items)
    assert positions.tolist() == axes[:, 0].tolist()

    wanted = seen.reference.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=NEW, min_new_tokens=NEW,
        do_sample=False, eos_token_id=None, pad_token_id=0, pixel_values_videos=pixels, video_grid_thw=grid,
        mm_token_type_ids=types, **extra,
    )[0, len(ids) :].tolist()  # fmt: skip
    for setup in (Setup(overlap=False, radix_cache=False), Setup(chunk_tokens=7, page_size=4, media_rows=48)):
        engine = InProcess(seen.model, VOCAB, setup)
        engine.features[video.features.path] = array
        for _ in range(2):
            asked = engine.submit(ids, GREEDY, media=placed.items, positions=positions.tobytes())
            (answer,) = engine.finish([asked])
            assert answer.tokens == wanted
        assert answer.end is not None
        assert answer.end.media_tokens == {"video": sum(item.count for item in video.processed.items)}


def test_text_goes_on_behind_the_latest_frame() -> None:
    """As the models were trained: transformers 5.22 goes on behind the widest frame, which may be earlier."""
    processor = load("qwen2_5_vl").processor
    info = VideoInfo(total=40, fps=2.0, width=16, height=16)
    array, items, _ = processor.video(info, [0, 13, 26, 39], [Image.fromarray(noise(16, 16))] * 4, {})
    assert [item.grid for item in items] == [(1, 4, 4, 0, 0), (1, 4, 4, 1, 10)]
    where = Features(path="v", digest=b"v" * 32, dtype="uint8", shape=array.shape)
    processed = Processed(dtype="uint8", shape=array.shape, items=items)
    video = Prepared(kind="video", digest=b"v" * 32, processed=processed, features=where)
    placed = Placer(processor, None).place_ids(np.array([1, START, VIDEO, END, 2], np.int32), [video])
    assert processor.positions(placed.ids, placed.items)[0].tolist() == [0, 1, *[2] * 4, *[12] * 4, 13, 14]


def _tokenizer(folder: Path) -> Path:
    make_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    return folder


def _expected_ids(name: str, tokenizer: Any, times: list[float], video: Prepared) -> list[int]:
    """As the model's own processor has them: 3 has marks and a time around each pair of frames."""
    around = tokenizer.encode("see ", True), tokenizer.encode(" now", True)
    count = video.processed.items[0].count
    if name != "qwen3_vl":
        return [*around[0], START, *[VIDEO] * count * len(video.processed.items), END, *around[1]]
    pairs = [*times, times[-1]] if len(times) % 2 else times
    middle: list[int] = []
    for at in range(0, len(pairs), 2):
        middle += tokenizer.encode(f"<{(pairs[at] + pairs[at + 1]) / 2:.1f} seconds>", True)
        middle += [START, *[VIDEO] * count, END]
    return [*around[0], *middle, *around[1]]


def animation(form: str, duration: int = 250) -> bytes:
    images = [Image.fromarray(frame) for frame in FRAMES]
    file = io.BytesIO()
    images[0].save(file, form, save_all=True, append_images=images[1:], duration=duration, lossless=True)
    return file.getvalue()


@pytest.mark.parametrize("form", ["WEBP", "PNG", "GIF"])
def test_animations_are_videos(form: str) -> None:
    film = open_film(animation(form), form.lower(), 10_000)
    assert film.info == VideoInfo(total=9, fps=4.0, width=40, height=24)
    images = list(film.frames([0, 3, 3, 8]))
    assert len(images) == 4
    if form != "GIF":  # which has 256 colours
        assert all(
            np.array_equal(np.asarray(image), FRAMES[at]) for image, at in zip(images, [0, 3, 3, 8], strict=True)
        )
    with pytest.raises(MediaError, match="at most 100 are taken"):
        open_film(animation(form), form.lower(), 100)


def test_files_of_video() -> None:
    """By PyAV, where it is installed; otherwise they are refused with what to do."""
    av = pytest.importorskip("av", reason="PyAV is an extra")
    file = io.BytesIO()
    smooth = [np.full((32, 48, 3), 20 * number, np.uint8) for number in range(10)]
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for frame in smooth:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    film = open_film(file.getvalue(), "mp4", 10_000)
    assert film.info == VideoInfo(total=10, fps=5.0, width=48, height=32)
    images = list(film.frames([0, 4, 9, 12]))
    values = [float(np.asarray(image).mean()) for image in images]
    assert values == pytest.approx([0, 80, 180, 180], abs=6)
    with pytest.raises(MediaError, match="can't be decoded"):
        list(open_film(file.getvalue()[:200], "mp4", 10_000).frames([0]))


def test_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MediaError, match=r"install bough\[video\]"):
        open_film(b"....ftyp", "mp4", 10_000)
