"""Prompts with media for engines in this process: prepared by the family's processor, without workers or shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from in_process import GREEDY, InProcess
from PIL import Image
from transformers import PreTrainedModel

from bough.core.media import Features, MediaItem
from bough.core.sampling import SamplingParams
from bough.multimodal.placing import Placer
from bough.multimodal.processor import Prepared, Processed, Processor

Pixels = npt.NDArray[np.uint8]


def noise(height: int, width: int, seed: int = 0) -> Pixels:
    return np.random.default_rng([seed, height, width]).integers(0, 256, (height, width, 3), dtype=np.uint8)


@dataclass(frozen=True)
class Prompt:
    """Token ids with all placeholders, and what stands there."""

    ids: list[int]
    items: tuple[MediaItem, ...]
    positions: bytes
    features: dict[str, npt.NDArray[np.generic]]
    adapter: int = 0

    def submit(self, engine: InProcess, sampling: SamplingParams = GREEDY, **extra: Any) -> int:
        engine.features |= self.features
        return engine.submit(
            self.ids, sampling, media=self.items, positions=self.positions, adapter=self.adapter, **extra
        )


def make_prompt(processor: Processor, ids: Sequence[int], images: Sequence[Pixels]) -> Prompt:
    """`ids`: with one marker for each image."""
    media, features = [], {}
    for pixels in images:
        array, items = processor.image(Image.fromarray(pixels), {})
        digest = sha256(pixels.tobytes() + str(pixels.shape).encode()).digest()
        where = Features(path=digest.hex(), digest=digest, dtype=array.dtype.name, shape=array.shape)  # type: ignore[arg-type]
        processed = Processed(dtype=where.dtype, shape=array.shape, items=items)
        media.append(Prepared(kind="image", digest=digest, processed=processed, features=where))
        features[where.path] = np.array(array)
    placed = Placer(processor, None).place_ids(np.array(ids, np.int32), media)
    positions = b""
    if processor.axes and placed.items:
        positions = processor.positions(placed.ids, placed.items).tobytes()
    return Prompt(placed.ids.tolist(), placed.items, positions, features)


def reference_inputs(prompt: Prompt, tower: Any) -> dict[str, Any]:
    """What transformers' Qwen models take beside ids."""
    if not prompt.items:
        return {}
    pixels = [tower._cut(torch.from_numpy(prompt.features[item.features.path])) for item in prompt.items]
    types = np.isin(prompt.ids, [item.token for item in prompt.items]).astype(np.int64)
    return {
        "pixel_values": torch.cat(pixels),
        "image_grid_thw": torch.tensor([item.grid for item in prompt.items]),
        "mm_token_type_ids": torch.from_numpy(types)[None],
    }


def reference_answer(reference: PreTrainedModel, prompt: Prompt, tower: Any, new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt.ids])
    out = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0, **reference_inputs(prompt, tower),
    )  # fmt: skip
    answer: list[int] = out[0, len(prompt.ids) :].tolist()
    return answer
