"""Writes tests/golden/video.json: what transformers' and Qwen's own code make of videos of many lengths, rates and shapes.

    python tests/media/make_video_golden.py

Needs torchvision (transformers' video processors do) and qwen-vl-utils, which the test environment lacks. Where torchvision
was built for another torch, the operators that it misses are declared first: nothing here calls them.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import torch

GOLDEN = Path(__file__).parents[1] / "golden" / "video.json"


def import_torchvision() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for _ in range(60):
        try:
            import torchvision  # noqa: F401
        except RuntimeError as error:
            missing = re.search(r"torchvision::(\w+)", str(error))
            if missing is None:
                raise
            library.define(f"{missing[1]}(Tensor a, Tensor b, Tensor c) -> Tensor")
            for name in [name for name in sys.modules if name.startswith("torchvision")]:
                del sys.modules[name]
        else:
            return


def cases(rng: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "total": rng.choice([2, 3, 5, 17, 64, 240, 1800, 20_000]),
            "fps": rng.choice([1.0, 5.0, 23.976, 25.0, 30.0, 59.94]),
            "width": rng.randint(20, 1920),
            "height": rng.randint(20, 1080),
        }
        for _ in range(60)
    ]


def qwen3(case: dict[str, Any]) -> dict[str, Any]:
    from transformers import Qwen3VLProcessor, Qwen3VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize
    from transformers.video_utils import VideoMetadata

    made: dict[str, Any] = {}
    for name, settings in (("plain", {}), ("capped", {"cap_pixels_per_frame": True})):
        processor = Qwen3VLVideoProcessor(size={"shortest_edge": 4096, "longest_edge": 25_165_824})
        metadata = VideoMetadata(total_num_frames=case["total"], fps=case["fps"])
        indices = processor.sample_frames(metadata, fps=2).tolist()
        frames, most = len(indices), 25_165_824
        if frames < 2:
            continue
        if settings:
            most = max(min(768 * 32 * 32, most // frames), int(4096 * 1.05)) * frames
        size = smart_resize(frames, case["height"], case["width"], 2, 32, 4096, most)
        seconds = Qwen3VLProcessor._calculate_timestamps(None, list(indices), case["fps"], 2)  # type: ignore[arg-type]
        made[name] = {"indices": indices, "size": list(size), "notes": [f"<{each:.1f} seconds>" for each in seconds]}
    return made


def qwen2(case: dict[str, Any]) -> dict[str, Any]:
    from qwen_vl_utils import vision_process as utils

    frames = utils.smart_nframes({}, total_frames=case["total"], video_fps=case["fps"])
    indices = torch.linspace(0, case["total"] - 1, frames).round().long().tolist()
    least = utils.VIDEO_MIN_TOKEN_NUM * 28 * 28
    budget = int(utils.MODEL_SEQ_LEN * 28 * 28 * 0.9)
    most = max(min(utils.VIDEO_MAX_TOKEN_NUM * 28 * 28, budget / frames * utils.FRAME_FACTOR), int(least * 1.05))
    size = utils.smart_resize(case["height"], case["width"], factor=28, min_pixels=least, max_pixels=most)
    return {"indices": indices, "size": list(size), "rate": frames / case["total"] * case["fps"]}


def main() -> None:
    import_torchvision()
    found = []
    for case in cases(random.Random(0)):
        answer = {**case, "qwen3": qwen3(case)}
        if case["total"] > 3:
            answer["qwen2"] = qwen2(case)
        for each in (answer["qwen3"].get("plain", {}), answer["qwen3"].get("capped", {}), answer.get("qwen2", {})):
            if len(each.get("indices", ())) > 12:
                each["count"], each["indices"] = len(each["indices"]), each["indices"][:6] + each["indices"][-6:]
                if "notes" in each:
                    each["notes"] = each["notes"][:3] + each["notes"][-3:]
        found.append(answer)
    GOLDEN.write_text(json.dumps(found, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
