"""transformers' processors that can't be imported without torchvision: their own code, over a stand-in for the functions of
torchvision that they call, with Pillow beneath. Nothing else in the process sees it."""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor


class InterpolationMode(enum.Enum):
    """Values are Pillow's numbers."""

    NEAREST = 0
    LANCZOS = 1
    BILINEAR = 2
    BICUBIC = 3
    BOX = 4
    HAMMING = 5
    NEAREST_EXACT = -1


def resize(
    image: Tensor,
    size: Sequence[int],
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
    antialias: bool | None = True,
) -> Tensor:
    if not antialias:  # which Pillow can't do: torchvision calls this, too
        assert image.is_floating_point()
        assert interpolation is InterpolationMode.BICUBIC
        several = image.reshape(-1, *image.shape[-3:])
        made = torch.nn.functional.interpolate(several, [int(edge) for edge in size], mode="bicubic")
        return made.reshape(*image.shape[:-2], *made.shape[-2:])
    assert image.dtype == torch.uint8
    planes = image.reshape(-1, *image.shape[-3:]).permute(0, 2, 3, 1).contiguous().numpy()
    height, width = (int(edge) for edge in size)
    made = [np.array(Image.fromarray(plane).resize((width, height), interpolation.value)) for plane in planes]
    return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2).reshape(*image.shape[:-2], height, width)


def pad(image: Tensor, padding: Sequence[int], fill: Any = 0, padding_mode: str = "constant") -> Tensor:
    assert padding_mode == "constant"
    left, top, right, bottom = (int(each) for each in padding)
    values = torch.tensor(fill if isinstance(fill, list | tuple) else [fill], dtype=image.dtype).view(-1, 1, 1)
    shape = (*image.shape[:-2], image.shape[-2] + top + bottom, image.shape[-1] + left + right)
    made = values.expand(shape[-3:]).expand(shape).clone()
    made[..., top : top + image.shape[-2], left : left + image.shape[-1]] = image
    return made


def normalize(image: Tensor, mean: Any, std: Any, inplace: bool = False) -> Tensor:
    mean, std = (torch.as_tensor(each, dtype=image.dtype).view(-1, 1, 1) for each in (mean, std))
    return image.sub(mean).div_(std)


def crop(image: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    return image[..., top : top + height, left : left + width]


def grayscale_to_rgb(image: Tensor) -> Tensor:
    return image if image.shape[-3] != 1 else image.expand(*image.shape[:-3], 3, -1, -1)


def pil_to_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@cache
def _stand_in() -> dict[str, ModuleType]:
    functional = ModuleType("torchvision.transforms.v2.functional")
    for each in (resize, pad, normalize, crop, grayscale_to_rgb, pil_to_tensor, InterpolationMode):
        setattr(functional, each.__name__, each)
    made = {"torchvision.transforms.v2.functional": functional, "torchvision.transforms.functional": functional}
    for name in ("torchvision.transforms.v2", "torchvision.transforms", "torchvision"):
        made[name] = ModuleType(name)
    made["torchvision.transforms.v2"].functional = functional  # type: ignore[attr-defined]
    made["torchvision.transforms"].InterpolationMode = InterpolationMode  # type: ignore[attr-defined]
    return made


@cache
def on_pillow(path: str) -> Any:
    """A name of transformers by `module.name` below `transformers.models`, over the stand-in where it needs torchvision."""
    from transformers import image_processing_backends, image_utils, video_processing_utils

    functional = _stand_in()["torchvision.transforms.v2.functional"]
    for module in (image_processing_backends, video_processing_utils):
        module.tvF = functional  # type: ignore[attr-defined]
        modes = {Image.Resampling(mode.value): mode for mode in InterpolationMode if mode.value >= 0}
        module.pil_torch_interpolation_mapping = modes  # type: ignore[attr-defined]
    image_utils.pil_to_tensor = pil_to_tensor  # type: ignore[attr-defined]
    image_processing_backends.pil_to_tensor = pil_to_tensor  # type: ignore[attr-defined]
    image_processing_backends.is_torchvision_greater_or_equal = lambda _: True  # type: ignore[attr-defined]
    name, _, wanted = path.rpartition(".")
    before = {each: sys.modules.get(each) for each in _stand_in()}
    sys.modules.update(_stand_in())
    try:
        return getattr(importlib.import_module(f"transformers.models.{name}"), wanted)
    finally:
        for each, module in before.items():  # type: ignore[assignment]
            if module is None:
                del sys.modules[each]
            else:
                sys.modules[each] = module
