"""Prepares JPEGs of 1,280 x 960 pixels for Qwen2.5-VL, by bough's worker and by transformers' processor on Pillow.

    python benchmarks/preprocess_images.py [--images 12] [--rounds 5]

Both decode the file and end with what is sent to the device. Times are those of the processor, not of the clock, on one
thread, in turns; the least of the rounds counts.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from bough.multimodal.families import processor_of
from bough.multimodal.worker import _decode

HEIGHT, WIDTH = 960, 1280
SETTINGS = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 12845056}
CONFIG = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "image_token_id": 5,
    "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8,
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "processor_config": {"image_processor": SETTINGS},
}  # fmt: skip


def jpegs(count: int) -> list[bytes]:
    """Smooth pictures with some noise, as photographs are."""
    rng, made = np.random.default_rng(0), []
    for _ in range(count):
        coarse = rng.integers(0, 256, (HEIGHT // 32, WIDTH // 32, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.int16)
        noisy = np.clip(smooth + rng.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(noisy).save(file, "JPEG", quality=90)
        made.append(file.getvalue())
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    files, ours = jpegs(options.images), processor_of(CONFIG)
    assert ours is not None
    theirs = Qwen2VLImageProcessorPil(**SETTINGS)

    def own(file: bytes) -> None:
        ours.image(_decode(file), {})

    def library(file: bytes) -> None:
        theirs(images=Image.open(io.BytesIO(file)).convert("RGB"), return_tensors="pt")

    def decoded(file: bytes) -> None:
        Image.open(io.BytesIO(file)).convert("RGB")

    ways: dict[str, Callable[[bytes], None]] = {"bough": own, "transformers": library, "decoding alone": decoded}
    took = dict.fromkeys(ways, float("inf"))
    for _ in range(options.rounds):
        for name, way in ways.items():
            begin = time.process_time()
            for file in files:
                way(file)
            took[name] = min(took[name], (time.process_time() - begin) / len(files))
    for name, seconds in took.items():
        print(f"{name:15s} {1e3 * seconds:7.1f} ms an image, {1 / seconds:6.1f} images per second and core")
    print(f"bough / transformers: {took['transformers'] / took['bough']:.2f}")


if __name__ == "__main__":
    main()
