"""Times a vision model: a new image, the same image again, several at once, a video, the encoder alone, chats with images
beside text streams, and first tokens over HTTP.

    bough bench images                      # the shapes of Qwen2.5-VL-7B with dummy weights, on this machine's GPU
    bough bench images --size tiny          # the same measurements of a tiny model, on any machine
    bough bench images --size small         # a question to a server with the shapes of SmolVLM-256M, on a CPU
    bough bench images --url http://127.0.0.1:30000 --ids 151652,151655,151653

Without --url an engine runs in this process: features are in memory, nothing is fetched or decoded. A new image of 6,256
patches (1,564 positions) with 64 tokens of text is encoded and prefilled; once more, it is neither. `floor_ms` is the time
of the FLOPs of tower and prefill at the rate that large products sustain in the same run. For "chats", streams of text run
without and with chats whose images arrive at a fixed rate: `ratio` is that of the 99th percentiles of a request's mean time
per token. With --url a running
server is asked by /generate, so that fetching, decoding, hashing and HTTP count too; --ids are the ids that stand for an
image in a prompt. Prints a JSON object per measurement; goals are for an H200.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np
import torch

from bough.bench import image_question
from bough.bench.direct_engine import DirectEngine
from bough.bench.roofline_rates import measure_rates
from bough.core.media import Features, MediaItem
from bough.core.sampling import SamplingParams
from bough.multimodal.families import processor_of
from bough.multimodal.placing import Placer
from bough.multimodal.processor import ItemShape, Prepared, Processed, Processor, VideoInfo

if TYPE_CHECKING:
    import numpy.typing as npt

    from bough.core.messages import Ids

    SeeingPrompt = tuple[Ids, tuple[MediaItem, ...], bytes]
    """Ids, the media in them, and positions if these have several axes."""

_ONE: Final = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
_TEXT: Final = 64
_JSON: Final = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatLoad:
    """Streams of text, and chats with images beside them."""

    streams: int = 16
    prompt: int = 256
    tokens: int = 128
    """Of each request of a stream; the next one follows at once."""
    alone_s: float = 4.0
    chats: int = 32
    per_s: float = 4.0
    answer: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SeeingShape:
    """A model's config, its processor's settings, and the image."""

    config: dict[str, Any]
    processor: dict[str, Any]
    height: int
    width: int
    settings: dict[str, Any]
    goals: dict[str, float]
    """By measurement, in milliseconds."""
    frames: int
    """Of the video, each with a quarter of the image's pixels."""
    chats: ChatLoad

    def flops(self, items: Sequence[MediaItem], prompts: Sequence[int]) -> float:
        """Of the tower over these items, and of the prefill of prompts of these lengths."""
        config, vision = self.config, self.config["vision_config"]
        hidden, width = vision["hidden_size"], config["hidden_size"]
        merged = hidden * vision["spatial_merge_size"] ** 2
        block = 4 * hidden**2 + 3 * hidden * vision["intermediate_size"]
        seen = len(vision["fullatt_block_indexes"])
        per_window = (vision["window_size"] // vision["patch_size"]) ** 2
        total = 0.0
        for item in items:
            full = seen * item.cost + (vision["depth"] - seen) * min(per_window, item.cost)
            total += 2 * vision["depth"] * block * item.cost + 4 * hidden * full * item.cost
            total += 2 * (merged**2 + merged * width) * item.count
        head = width // config["num_attention_heads"]
        keys = 2 * config["num_key_value_heads"] * head
        layer = 2 * width**2 + width * keys + 3 * width * config["intermediate_size"]
        for length in prompts:
            total += config["num_hidden_layers"] * (2 * layer * length + 2 * width * length**2)
        return total


_IDS: Final = {
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
}  # fmt: skip
FULL: Final = SeeingShape(
    config={
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", **_IDS,
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "rms_norm_eps": 1e-6, "max_position_embeddings": 128000,
        "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112, "out_hidden_size": 3584,
            "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "in_channels": 3, "hidden_act": "silu",
        },
    },
    processor={"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 12845056},
    height=952,
    width=1288,
    settings={
        "device": "cuda", "dtype": "bfloat16", "context_length": 32768, "mem_fraction_static": 0.8,
        "max_running_requests": 64,
    },
    goals={"new image": 54.0, "same image": 8.0},
    frames=64,
    chats=ChatLoad(),
)  # fmt: skip
TINY: Final = SeeingShape(
    config={
        **FULL.config, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "torch_dtype": "float32",
        "vocab_size": 152064 // 64, **{name: 2000 + at for at, name in enumerate(_IDS)},
        "vision_config": {
            **FULL.config["vision_config"], "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
            "out_hidden_size": 64, "fullatt_block_indexes": [1],
        },
    },
    processor=FULL.processor,
    height=112,
    width=140,
    settings={
        "device": "cpu", "dtype": "float32", "cpu_threads": 1, "context_length": 2048, "max_total_tokens": 4096,
        "max_running_requests": 8, "page_size": 16, "mm_cache_size": 8 * 2**20,
    },
    goals={},
    frames=4,
    chats=ChatLoad(streams=2, prompt=8, tokens=8, alone_s=0.05, chats=2, per_s=50.0, answer=2),
)  # fmt: skip
MOST_RATIO: Final = 1.5
"""How much longer others' tokens may take beside chats with images."""


class SeeingEngine:
    """An engine in this process, and prompts with images that it has never seen."""

    def __init__(self, shape: SeeingShape, seed: int) -> None:
        self.shape = shape
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "preprocessor_config.json").write_text(json.dumps(shape.processor))
            self.engine = DirectEngine(shape.config, Path(folder), **shape.settings)
        settings = {**shape.config, "processor_config": {"image_processor": shape.processor}}
        processor = processor_of(settings)
        assert processor is not None, "the family takes images"
        self.processor: Processor = processor
        self._rng = np.random.default_rng(seed)

    def prompt(self, kind: Literal["image", "video"] = "image") -> SeeingPrompt:
        """Text, and a new image or video in it."""
        marker = self.processor.marker(kind)
        text = self.words(_TEXT - 2)
        media = [self._image() if kind == "image" else self._video()]
        placed = Placer(self.processor, None).place_ids(
            np.concatenate([np.array(marker.insert, np.int32), text]), media
        )
        positions = self.processor.positions(placed.ids, placed.items) if self.processor.axes else None
        return placed.ids, placed.items, b"" if positions is None else positions.astype("<i4").tobytes()

    def _image(self) -> Prepared:
        from PIL import Image

        pixels = self._rng.integers(0, 256, (self.shape.height, self.shape.width, 3), dtype=np.uint8)
        return self._prepared("image", *self.processor.image(Image.fromarray(pixels), {}))

    def _video(self) -> Prepared:
        from PIL import Image

        count, height, width = self.shape.frames, self.shape.height // 2, self.shape.width // 2
        pixels = self._rng.integers(0, 256, (count, height, width, 3), dtype=np.uint8)
        info = VideoInfo(total=count, fps=2.0, width=width, height=height)
        frames = (Image.fromarray(each) for each in pixels)
        array, items, _ = self.processor.video(info, range(count), frames, {})
        return self._prepared("video", array, items)

    def _prepared(
        self, kind: Literal["image", "video"], array: npt.NDArray[Any], items: tuple[ItemShape, ...]
    ) -> Prepared:
        digest = sha256(array.tobytes()).digest()
        where = Features(path=digest.hex(), digest=digest, dtype="uint8", shape=array.shape)
        self.engine.features[where.path] = np.array(array)
        return Prepared(
            kind=kind, digest=digest, processed=Processed(dtype="uint8", shape=array.shape, items=items), features=where
        )  # fmt: skip

    def words(self, count: int) -> Ids:
        """A text that was never sent."""
        return self._rng.integers(0, 1000, count).astype(np.int32)

    def ask_ms(self, prompts: Sequence[SeeingPrompt]) -> float:
        """Milliseconds from sending the requests to the last of their first tokens."""
        begin = time.perf_counter()
        for ids, items, positions in prompts:
            self.engine.submit([ids.astype(np.int64)], _ONE, media=items, positions=positions)
        self.engine.finish()
        return 1e3 * (time.perf_counter() - begin)

    def tower_ms(self, items: Sequence[MediaItem]) -> float:
        """Times the encoder alone, including its writes to the store."""
        from bough.core.step import Encode

        encoder = self.engine.runner.encoder
        assert encoder is not None, "the model has a tower"
        rows = np.arange(sum(item.count for item in items), dtype=np.int32)
        work, start = [], 0
        for item in items:
            features = self.engine.features[item.features.path]
            work.append(Encode(features=features, grid=item.grid, rows=rows[start : start + item.count]))
            start += item.count
        begin = time.perf_counter()
        with torch.inference_mode():
            encoder.encode(work)
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
        return 1e3 * (time.perf_counter() - begin)


def measure(seeing: SeeingEngine, repeats: int, tell: Callable[[dict[str, Any]], None]) -> None:
    """Calls `tell` with each measurement."""
    rate = measure_rates(seeing.engine.device).flops_per_s

    def row(name: str, took: Sequence[float], items: Sequence[MediaItem], prompts: Sequence[int], **more: Any) -> None:
        goal = seeing.shape.goals.get(name)
        value = statistics.median(took)
        tell({
            "workload": name, "ms": round(value, 2), "best_ms": round(min(took), 2),
            "floor_ms": round(1e3 * seeing.shape.flops(items, prompts) / rate, 2),
            "patches": sum(item.cost for item in items), "positions": sum(item.count for item in items), **more,
            **({} if goal is None else {"goal_ms": goal, "reached": value <= goal}),
        })  # fmt: skip

    seeing.engine.warm_up()  # as a server does: graphs of small steps, kernels of large ones
    for _ in range(2):  # kernels of the tower are compiled, memory is found
        warm = seeing.prompt()
        seeing.ask_ms([warm])
        seeing.ask_ms([warm])
    seeing.engine.settle_down()
    fresh = [seeing.prompt() for _ in range(repeats)]
    items, length = fresh[0][1], len(fresh[0][0])
    row("new image", [seeing.ask_ms([each]) for each in fresh], items, [length], tokens=length)
    row("same image", [seeing.ask_ms([fresh[-1]]) for _ in range(repeats)], (), [], tokens=length)
    row("tower alone", [seeing.tower_ms(each[1]) for each in fresh], items, [])
    text = [(seeing.words(length), (), b"") for _ in range(repeats)]
    row("as many tokens of text", [seeing.ask_ms([each]) for each in text], (), [length], tokens=length)
    many = [[seeing.prompt() for _ in range(8)] for _ in range(1 + max(1, repeats // 2))]
    items, lengths = tuple(item for each in many[0] for item in each[1]), [len(each[0]) for each in many[0]]
    row("8 requests with new images, first time", [seeing.ask_ms(many[0])], items, lengths)
    row("8 requests with new images", [seeing.ask_ms(each) for each in many[1:]], items, lengths)
    videos = [seeing.prompt("video") for _ in range(2)]
    took = [seeing.ask_ms([each]) for each in videos]
    length = len(videos[0][0])
    row(f"video of {seeing.shape.frames} frames", took[1:], videos[0][1], [length], tokens=length)
    tell(chats_beside_text(seeing))


def chats_beside_text(seeing: SeeingEngine) -> dict[str, Any]:
    """Times per token of streams of text, without and with chats about new images."""
    load = seeing.shape.chats
    prompts = [seeing.prompt() for _ in range(load.chats)]
    alone = _streams_tpot_ms(seeing, [], load.alone_s)
    beside = _streams_tpot_ms(seeing, prompts, load.chats / load.per_s)
    ratio = float(np.percentile(beside, 99) / np.percentile(alone, 99))
    return {
        "workload": f"{load.chats} chats with images, {load.per_s:g} per second, beside {load.streams} streams",
        "p99_tpot_ms": round(float(np.percentile(beside, 99)), 2),
        "p99_tpot_alone_ms": round(float(np.percentile(alone, 99)), 2),
        "ratio": round(ratio, 3),
        "most_ratio": MOST_RATIO,
        **({"reached": ratio <= MOST_RATIO} if seeing.shape.goals else {}),
    }


def _streams_tpot_ms(seeing: SeeingEngine, chats: Sequence[SeeingPrompt], seconds: float) -> list[float]:
    """Of each request of the streams that ended within `seconds`, or until there is one for each stream: its mean time per
    token behind the first. `chats` arrive evenly meanwhile."""
    load, engine = seeing.shape.chats, seeing.engine
    said = SamplingParams(temperature=0.0, max_new_tokens=load.tokens, ignore_eos=True)
    answer = SamplingParams(temperature=0.0, max_new_tokens=load.answer, ignore_eos=True)
    times = engine.token_times()
    running: set[int] = set()
    found: list[float] = []
    waiting = list(chats)
    begin = time.perf_counter()
    while (now := time.perf_counter()) < begin + seconds or waiting or len(found) < load.streams:
        while len(running) < load.streams:
            running |= set(engine.submit([seeing.words(load.prompt).astype(np.int64)], said, stream=True))
        if waiting and now >= begin + (len(chats) - len(waiting)) * seconds / len(chats):
            ids, items, positions = waiting.pop(0)
            engine.submit([ids.astype(np.int64)], answer, media=items, positions=positions)
        engine.turn()
        for each in [each for each in running if len(times.get(each, ())) == load.tokens]:
            running.discard(each)
            found.append(1e3 * (times[each][-1] - times[each][0]) / (load.tokens - 1))
    engine.drop_all()
    return found


def over_http(options: argparse.Namespace, tell: Callable[[dict[str, Any]], None]) -> None:
    """Times to first token of a running server: for new images, and for a repeated one."""
    import httpx
    from PIL import Image

    rng = np.random.default_rng(options.seed)
    height, width = (int(each) for each in options.image.split("x"))
    marker = [int(each) for each in options.ids.split(",")]

    def picture() -> str:
        file = io.BytesIO()
        smooth = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8))
        smooth.resize((width, height)).save(file, "JPEG", quality=90)
        return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()

    def first_ms(url: str) -> float:
        body = {
            "input_ids": [*marker, *range(10, 10 + _TEXT)], "image_data": url, "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True},
        }  # fmt: skip
        content = msgspec.json.encode(body)  # the client's own time, which is not asked for
        begin = time.perf_counter()
        with client.stream("POST", "/generate", content=content, headers=_JSON) as answer:
            if answer.status_code != 200:
                answer.read()
                raise SystemExit(f"the server answers {answer.status_code}: {answer.text[:300]}")
            lines = (line for line in answer.iter_lines() if line.startswith("data:"))
            next(lines)
            took = 1e3 * (time.perf_counter() - begin)
            for _ in lines:
                pass
        return took

    with httpx.Client(base_url=options.url, timeout=120) as client:
        first_ms(picture())
        urls = [picture() for _ in range(options.repeats)]
        for name, took, goal in (
            ("new image over HTTP", [first_ms(url) for url in urls], None),
            ("same image over HTTP", [first_ms(urls[-1]) for _ in range(options.repeats)], 12.0),
        ):
            value = round(statistics.median(took), 2)
            reached = {} if goal is None else {"goal_ms": goal, "reached": value <= goal}
            tell({"workload": name, "ms": value, "best_ms": round(min(took), 2), **reached})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bough bench images", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=["auto", "full", "small", "tiny"], default="auto", help="auto: full on a GPU")
    parser.add_argument("--threads", type=int, default=2, help="with --size small: threads of the server (default: 2)")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each measurement (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of pixels and texts")
    parser.add_argument("--url", default="", help="ask this server instead")
    parser.add_argument("--ids", default="151652,151655,151653", help="with --url: ids that stand for an image")
    parser.add_argument("--image", default="952x1288", help="with --url: height x width of the image")
    parser.add_argument("--json", type=Path, help="also append the rows there, a JSON object per line")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    rows: list[dict[str, Any]] = []

    def tell(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    if options.url:
        over_http(options, tell)
    elif options.size == "small":
        image_question.measure(options.repeats, options.seed, tell, options.threads)
    else:
        full = options.size == "full" or (options.size == "auto" and torch.cuda.is_available())
        begin = time.perf_counter()
        seeing = SeeingEngine(FULL if full else TINY, options.seed)
        print(f"built in {time.perf_counter() - begin:.1f} s", flush=True)
        measure(seeing, options.repeats, tell)
    if options.json is not None:
        with options.json.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0 if all(row.get("reached", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
