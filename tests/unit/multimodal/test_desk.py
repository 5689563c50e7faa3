"""The desk and its workers: media are prepared once, within limits, and stay as long as they are used."""

from __future__ import annotations

import asyncio
import base64
import io
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save
from safetensors.torch import save as torch_save

from bough.config.concerns import MediaConfig
from bough.core.errors import InvalidRequest, Overloaded
from bough.core.media import Features
from bough.ipc.features import check_features, features_path, open_features, write_features
from bough.multimodal import Door, MediaError, MediaTooLarge, MediaUnsupported
from bough.multimodal.desk import Desk, Embeddings, Frames, MediaInput, RawPixels
from bough.multimodal.embeds import read_embeddings
from bough.multimodal.families import processor_of
from bough.multimodal.feature_cache import FeatureCache
from bough.multimodal.own import own_media
from bough.multimodal.sound import wav_bytes
from bough.multimodal.work import UnencodedPixels
from bough.multimodal.workers import Workers

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "image_token_id": 9, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8,
    "vision_config": {"patch_size": 4, "spatial_merge_size": 2},
    "processor_config": {"image_processor": {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 6400}},
}  # fmt: skip
MEDIA = MediaConfig(limit_mm_data_per_request='{"image": 3}', mm_processor_cache_size=1 << 20)


def png(height: int, width: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def named(source: Any, **options: Any) -> MediaInput:
    return MediaInput(kind="image", source=source, options=options)


def make_desk(workers: Workers, config: MediaConfig = MEDIA) -> Desk:
    processor = processor_of(CONFIG)
    assert processor is not None
    return Desk(processor, Door(config), config, workers)


@pytest.fixture(scope="module")
def workers() -> Any:
    made = Workers(CONFIG, count=1, max_pixels=MEDIA.max_media_pixels, cpu_s=20.0)
    yield made
    made.close()


@pytest.fixture
async def desk(workers: Workers) -> AsyncIterator[Desk]:
    made = make_desk(workers)
    yield made
    made.cache.close()


async def test_equal_media_are_prepared_once_and_found_again(desk: Desk) -> None:
    one, other = png(30, 50), png(30, 50, seed=1)
    first = await desk.prepare([named(one), named(other), named(one)])
    assert first[0] is first[2]
    assert first[0].digest != first[1].digest
    assert len(desk.cache) == 2
    pixels = open_features(first[0].features)
    assert pixels.shape == (1, 32, 48, 3)
    assert np.array_equal(pixels[0], np.asarray(Image.open(io.BytesIO(one)).resize((48, 32), 3)))
    desk.release(first)
    (again,) = await desk.prepare([named(one)])
    assert again is first[0]
    by_option = await desk.prepare([named(one, max_pixels=640)], tenant="")
    by_tenant = await desk.prepare([named(one)], tenant="someone")
    assert len({again.digest, by_option[0].digest, by_tenant[0].digest}) == 3


async def test_a_known_data_url_is_not_decoded_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "data:image/png;base64," + base64.b64encode(png(30, 50)).decode()
    (first,) = await desk.prepare([named(url)])
    other = await desk.prepare([named("data:image/x;base64," + url.partition(",")[2]), named(png(30, 50))])
    assert other == [first, first], "what counts is the bytes, however they are sent"
    reads: list[str] = []

    async def read(asked: str) -> bytes:
        reads.append(asked)
        return png(30, 50, seed=3)

    monkeypatch.setattr(desk._door, "read", read)
    assert (await desk.prepare([named(url)])) == [first]
    assert reads == []
    for different in (named(url, max_pixels=640), named(url[:-8] + "AAAAAAAA"), named("http://one.example/picture")):
        (found,) = await desk.prepare([different])
        assert found.digest != first.digest
    await desk.prepare([named("http://one.example/picture")])
    assert len(reads) == 4, "options and other bytes have their own names; what a server sends may change"
    await desk.prepare([named(url)], tenant="someone")
    assert len(reads) == 5, "tenants share nothing"
    desk.cache._drop(first.digest)
    await desk.prepare([named(url)])
    assert len(reads) == 6


def test_names_are_bounded() -> None:
    cache = FeatureCache(1 << 20)
    for number in range(5000):
        cache.name(number.to_bytes(4, "little"), b"")
    assert len(cache._names) == 4096
    assert cache.use_named((4999).to_bytes(4, "little")) is None, "what it names is not there"
    assert (cache.hits, cache.misses) == (0, 0)


async def test_media_at_the_same_time_are_computed_once(desk: Desk) -> None:
    data = png(64, 64, seed=7)
    found = await asyncio.gather(*(desk.prepare([named(data)]) for _ in range(5)))
    assert len({each[0].features.path for each in found}) == 1
    assert len(desk.cache) == 1


async def test_what_is_used_stays_and_the_rest_goes(workers: Workers) -> None:
    desk = make_desk(workers, replace(MEDIA, mm_processor_cache_size=40_000))
    held = await desk.prepare([named(png(80, 80)), named(png(80, 80, seed=1))])
    with pytest.raises(Overloaded, match="mm-processor-cache-size"):
        await desk.prepare([named(png(80, 80, seed=2))])
    opened = open_features(held[0].features)
    desk.release(held[:1])
    await desk.prepare([named(png(80, 80, seed=2))])
    assert desk.again(held[:1]) is None
    assert opened.sum() > 0, "whoever has opened it keeps it"
    with pytest.raises((OSError, ValueError)):
        check_features(os.open("/dev/null", os.O_RDONLY), held[0].features)
    with pytest.raises(MediaTooLarge):
        await make_desk(workers, replace(MEDIA, mm_processor_cache_size=100)).prepare([named(png(80, 80))])
    desk.cache.close()


async def test_bad_media_are_refused_and_nothing_is_held(desk: Desk) -> None:
    good = png(20, 20)
    cut = png(200, 200)[:2000]
    for bad, kind in ((b"nonsense", MediaUnsupported), (cut, MediaUnsupported), (b"", MediaUnsupported)):
        with pytest.raises(kind):
            await desk.prepare([named(good), named(bad)])
    with pytest.raises(InvalidRequest, match="mm_processor_kwargs"):
        await desk.prepare([named(good, nonsense=1)])
    with pytest.raises(InvalidRequest, match="at most 3"):
        await desk.prepare([named(good)] * 4)
    with pytest.raises(InvalidRequest, match="text and image, video"):
        await desk.prepare([MediaInput(kind="audio", source=good)])
    with pytest.raises(MediaError, match="200 times"):
        await desk.prepare([named(png(2, 900))])
    (fine,) = await desk.prepare([named(good)])
    assert fine.processed.items[0].count > 0


async def test_frames_of_a_video(desk: Desk) -> None:
    """A list of frames, arrays, a data: URL of several JPEGs and an animation are prepared as a video."""
    pictures = [Image.fromarray(np.full((24, 40, 3), 40 * number, np.uint8)) for number in range(4)]

    def encoded(form: str, **extra: Any) -> list[bytes]:
        files = []
        for picture in pictures:
            file = io.BytesIO()
            picture.save(file, form, **extra)
            files.append(file.getvalue())
        return files

    files = encoded("PNG")
    listed = Frames(images=tuple(files), fps=10.0, indices=(0, 5, 10, 15))
    arrays = own_media(np.stack([np.asarray(each) for each in pictures]), MEDIA)
    url = "data:video/jpeg;base64," + ",".join(base64.b64encode(each).decode() for each in encoded("JPEG", quality=95))
    moving = io.BytesIO()
    pictures[0].save(moving, "WEBP", save_all=True, append_images=pictures[1:], duration=500, lossless=True)
    inputs = [MediaInput(kind="video", source=each) for each in (listed, arrays, url, moving.getvalue())]
    found = [(await desk.prepare([each]))[0] for each in inputs]
    for each in found:
        assert each.processed.shape[0] == 4
        assert [item.grid[3:] for item in each.processed.items] == [(0, 0), (1, 1)]
        assert [(item.first, item.last) for item in each.processed.items] == [(0, 2), (2, 4)]
        assert abs(int(open_features(each.features)[3].mean()) - 120) <= 2
    assert len({each.digest for each in found}) == 4
    for bad, why in (
        (Frames(images=()), "0 frames"),
        (Frames(images=tuple(files), indices=(1, 2)), "2 frames_indices"),
        (Frames(images=tuple(files), indices=(3, 2, 1, 0)), "ascend"),
        (b"nonsense", "no video of a kind"),
    ):
        with pytest.raises(MediaError, match=why):
            await desk.prepare([MediaInput(kind="video", source=bad)])


async def test_a_worker_that_takes_too_long_or_too_much_is_replaced() -> None:
    slow = Workers(CONFIG, count=1, max_pixels=100_000_000, cpu_s=0.02)
    desk = make_desk(slow, replace(MEDIA, max_media_pixels=100_000_000, max_media_bytes=1 << 30))
    large = RawPixels(UnencodedPixels(9000, 9000, "RGB"), bytes(9000 * 9000 * 3))
    with pytest.raises(MediaTooLarge, match="takes too long, or too much memory"):
        await desk.prepare([named(large)])
    small = Workers(CONFIG, count=1, max_pixels=1, cpu_s=20.0)
    desk = make_desk(small, replace(MEDIA, max_media_pixels=200_000_000))
    bomb = RawPixels(UnencodedPixels(11000, 11000, "L"), bytes(11000 * 11000))
    with pytest.raises(MediaTooLarge):
        await desk.prepare([named(bomb)])
    (fine,) = await desk.prepare([named(RawPixels(UnencodedPixels(20, 20, "L"), bytes(400)))])
    assert fine.processed.items[0].count > 0
    slow.close()
    small.close()


def test_a_segment_is_sealed_and_holds_what_it_says() -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    descriptor = write_features(array, b"d" * 32)
    features = Features(path=features_path(descriptor), digest=b"d" * 32, dtype="uint8", shape=array.shape)
    assert np.array_equal(open_features(features), array)
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(descriptor, b"x", 70)
    for other in ({"digest": b"e" * 32}, {"shape": (2, 3, 5)}):
        with pytest.raises(ValueError, match="segment"):
            open_features(Features(**{**{n: getattr(features, n) for n in features.__struct_fields__}, **other}))
    os.close(descriptor)
    with pytest.raises((OSError, ValueError)):
        open_features(features)


def test_a_program_s_own_images(tmp_path: Path) -> None:
    image = Image.fromarray(np.zeros((4, 6, 3), np.uint8))
    raw = own_media(image, MEDIA)
    assert raw == own_media(np.zeros((4, 6, 3), np.uint8), MEDIA)
    assert raw.raw == UnencodedPixels(6, 4, "RGB")
    assert own_media(image.convert("P"), MEDIA).raw.mode == "RGB"
    (tmp_path / "a.png").write_bytes(b"bytes")
    assert own_media([str(tmp_path / "a.png"), tmp_path / "a.png"], MEDIA) == [b"bytes", b"bytes"]
    assert own_media("https://example.com/a.png", MEDIA) == "https://example.com/a.png"
    assert own_media("aGVsbG8=", MEDIA) == "aGVsbG8="
    with pytest.raises(InvalidRequest, match="uint8"):
        own_media(np.zeros((4, 6)), MEDIA)


async def test_sounds_are_prepared_by_workers() -> None:
    config = {
        "architectures": ["Qwen2AudioForConditionalGeneration"], "audio_token_index": 9,
        "audio_config": {"num_mel_bins": 8, "d_model": 32, "encoder_attention_heads": 2, "max_source_positions": 100},
    }  # fmt: skip
    hears = Workers(config, count=1, max_pixels=1000, cpu_s=20.0)
    processor = processor_of(config)
    assert processor is not None
    desk = Desk(processor, Door(MEDIA), MEDIA, hears)
    try:
        samples = np.sin(np.arange(8000) / 20).astype(np.float32)
        (made,) = await desk.prepare([MediaInput(kind="audio", source=wav_bytes(samples, 16_000))])
        assert made.processed.items[0].count == 12  # 50 frames, 25 tokens
        assert open_features(made.features).shape == (52, 8)
        for bad, why in (
            (b"nonsense", "no sound of a kind"),
            (b"RIFF....WAVE", "can't be decoded"),
            (wav_bytes(np.zeros(40_000, np.float32), 16_000), "at most 2 s"),
        ):
            with pytest.raises(MediaError, match=why):
                await desk.prepare([MediaInput(kind="audio", source=bad)])
        with pytest.raises(InvalidRequest, match="takes text and audio"):
            await desk.prepare([named(png(8, 8))])
        desk.release([made])
    finally:
        desk.close()


WIDTH = 6


def embeddings(rows: int = 4, width: int = WIDTH, dtype: Any = np.float32, **more: Any) -> bytes:
    values = np.random.default_rng(rows).standard_normal((rows, width))
    return save({"embeddings": values.astype(dtype), **more})


GRID = np.array([4, 4])
BAD_EMBEDDINGS = {
    "no file": (b"nonsense", "no safetensors file"),
    "cut off": (embeddings(grid=GRID)[:-3], "no safetensors file"),
    "no embeddings": (save({"grid": GRID}), "no 'embeddings'"),
    "something else": (embeddings(grid=GRID, weight=GRID), "has 'weight'"),
    "integers": (embeddings(dtype=np.int32, grid=GRID), "not F32, F16 or BF16"),
    "doubles": (embeddings(dtype=np.float64, grid=GRID), "not F32, F16 or BF16"),
    "one axis": (save({"embeddings": np.ones(24, np.float32), "grid": GRID}), r"the shape \[24\]"),
    "nothing": (save({"embeddings": np.ones((0, WIDTH), np.float32), "grid": GRID}), "the shape"),
    "not finite": (save({"embeddings": np.full((4, WIDTH), np.nan, np.float32), "grid": GRID}), "not finite"),
    "too wide": (embeddings(width=WIDTH + 1, grid=GRID), "7 wide, those of this model 6"),
    "no grid": (embeddings(), "are no image"),
    "another grid": (embeddings(grid=np.array([4, 6])), "are no image"),
    "odd grid": (embeddings(rows=3, grid=np.array([3, 4])), "are no image"),
    "a video": (embeddings(rows=8, grid=np.array([2, 4, 4])), "are no image"),
    "a grid of fractions": (embeddings(grid=np.ones(2, np.float32)), "grid is F32"),
    "a grid of nothing": (embeddings(grid=np.array([0, 4])), r"grid is \[0, 4\]"),
}


@pytest.mark.parametrize("kind", [np.float32, np.float16])
async def test_embeddings_stand_for_an_image(workers: Workers, kind: Any) -> None:
    config = replace(MEDIA, enable_mm_embeds=True)
    processor = processor_of(CONFIG)
    assert processor is not None
    desk = Desk(processor, Door(config), config, workers, width=WIDTH)
    file = embeddings(dtype=kind, grid=np.array([1, 4, 4]))
    (made,) = await desk.prepare([named(Embeddings(file))])
    (item,) = made.processed.items
    assert (item.grid, item.count, item.cost, item.embedded) == ((1, 4, 4), 4, 0, True)
    values = np.random.default_rng(4).standard_normal((4, WIDTH)).astype(kind)
    assert (open_features(made.features) == values).all()
    url = "data:application/octet-stream;base64," + base64.b64encode(file).decode()
    (again,) = await desk.prepare([named(Embeddings(url))])
    assert again.digest == made.digest
    for bad, why in BAD_EMBEDDINGS.values():
        with pytest.raises(MediaError, match=why):
            await desk.prepare([named(Embeddings(bad))])
    with pytest.raises(MediaError, match="not for video"):
        await desk.prepare([MediaInput(kind="video", source=Embeddings(file))])
    small = Desk(processor, Door(config), replace(config, max_media_bytes=16), workers, width=WIDTH)
    with pytest.raises(MediaError, match="16 bytes"):
        await small.prepare([named(Embeddings(file))])


async def test_embeddings_are_refused_unless_they_are_allowed(desk: Desk) -> None:
    with pytest.raises(InvalidRequest, match="--enable-mm-embeds"):
        await desk.prepare([named(Embeddings(embeddings(grid=GRID)))])


def test_values_of_sixteen_bits_are_read_exactly() -> None:
    values = torch.randn(4, WIDTH).to(torch.bfloat16)
    found, grid = read_embeddings(torch_save({"embeddings": values, "grid": torch.tensor([4, 4], dtype=torch.int32)}))
    assert torch.equal(torch.from_numpy(found), values.float())
    assert grid == (4, 4)


OMNI: dict[str, Any] = {
    **CONFIG, "architectures": ["Qwen3OmniMoeForConditionalGeneration"], "audio_token_id": 10,
    "audio_config": {"num_mel_bins": 8, "d_model": 32, "encoder_attention_heads": 2},
}  # fmt: skip


def film() -> bytes:
    """Four seconds of 25 frames each, with sound."""
    av: Any = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        seen, heard = out.add_stream("mpeg4", rate=25), out.add_stream("aac", rate=16_000)
        seen.width, seen.height, seen.pix_fmt = 48, 32, "yuv420p"
        for number in range(100):
            out.mux(seen.encode(av.VideoFrame.from_ndarray(np.full((32, 48, 3), number, np.uint8), format="rgb24")))
        samples = np.sin(np.arange(4 * 16_000) / 9).astype(np.float32)[None]
        for start in range(0, samples.shape[1], 1024):
            frame = av.AudioFrame.from_ndarray(samples[:, start : start + 1024], format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 16_000, start
            out.mux(heard.encode(frame))
        for stream in (seen, heard):
            out.mux(stream.encode(None))
    return file.getvalue()


async def test_the_sound_of_a_video_is_prepared_with_it() -> None:
    workers = Workers(OMNI, count=1, max_pixels=100_000, cpu_s=20.0)
    processor = processor_of(OMNI)
    assert processor is not None
    desk = Desk(processor, Door(MEDIA), MEDIA, workers)
    with_sound = {"use_audio_in_video": True}
    try:
        with pytest.raises(InvalidRequest, match="must be true or false"):
            await desk.prepare([MediaInput(kind="video", source=b"", options={"use_audio_in_video": "yes"})])
        frames = Frames(images=(png(8, 8), png(8, 8, 1)), fps=1.0)
        with pytest.raises(MediaUnsupported, match="sent as frames"):
            await desk.prepare([MediaInput(kind="video", source=frames, options=with_sound)])
        assert not [each for each in desk.cache._held.values() if each.users]
        data = film()
        (silent,) = await desk.prepare([MediaInput(kind="video", source=data)])
        (heard,) = await desk.prepare([MediaInput(kind="video", source=data, options=with_sound)])
        assert silent.sound is None
        assert heard.sound is not None
        assert heard.processed.sound == heard.sound.processed.items
        assert 50 <= sum(item.count for item in heard.sound.processed.items) <= 54  # 13 a second
        assert desk.again([heard]) == [heard]
        for each in ([silent], [heard], [heard]):
            desk.release(each)
    finally:
        desk.close()
