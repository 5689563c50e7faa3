"""Writes tests/golden/gemma3n.json: what transformers makes of images with timm's MobileNet-V5, and answers about them.

    python tests/media/write_gemma3n_golden.py

Needs timm 1.0.31, which the test environment lacks, because it needs torchvision. Where that does not load, names that timm
imports from it are declared first: nothing here calls them.
"""

from __future__ import annotations

import enum
import hashlib
import importlib.machinery
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("models", "grid", ".")), str(HERE.parents[1])]


def declare_torchvision() -> None:
    class Modes(enum.Enum):
        NEAREST = "nearest"
        BILINEAR = "bilinear"
        BICUBIC = "bicubic"
        BOX = "box"
        HAMMING = "hamming"
        LANCZOS = "lanczos"

    class Declared(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Modes if name == "InterpolationMode" else type(name, (torch.nn.Module,), {})

    for name in ("", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".datasets", ".models"):
        made = Declared(f"torchvision{name}")
        made.__spec__ = importlib.machinery.ModuleSpec(made.__name__, None)
        made.__path__ = []
        sys.modules[made.__name__] = made
    for name in ("ops", "transforms", "datasets", "models"):
        setattr(sys.modules["torchvision"], name, sys.modules[f"torchvision.{name}"])


def use_timm() -> None:
    """Lets transformers have timm, even if torchvision is not there."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        declare_torchvision()
    import timm
    from transformers.models.timm_wrapper import modeling_timm_wrapper

    modeling_timm_wrapper.timm = timm  # type: ignore[attr-defined]
    modeling_timm_wrapper.requires_backends = lambda *_: None  # type: ignore[assignment]


def shapes_of_the_published_tower() -> str:
    """A digest of the names and shapes of all tensors of the tower in its own size."""
    import timm

    with torch.device("meta"):
        tower = timm.create_model("mobilenetv5_300m_enc")
    lines = [f"{name} {list(each.shape)}" for name, each in sorted(tower.state_dict().items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def main() -> None:
    use_timm()
    from test_gemma3n import ASKED, given, placed
    from tiny_gemma3n import GOLDEN, IMAGES, SETTINGS, config, fill, golden
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    torch.set_num_threads(1)
    reference = transformers.Gemma3nForConditionalGeneration(config()).eval()
    fill(reference)
    settings = {name: SETTINGS[name] for name in ("size", "do_normalize", "image_mean", "image_std", "resample")}
    pixels = SiglipImageProcessorPil(**settings)(images=IMAGES, return_tensors="pt")["pixel_values"]
    prefix = "model.vision_tower."
    tensors = {name: list(each.shape) for name, each in reference.state_dict().items() if name.startswith(prefix)}
    with torch.no_grad():
        features = reference.model.get_image_features(pixels, return_dict=True).pooler_output
    made: dict[str, Any] = {
        "published": shapes_of_the_published_tower(),
        "tensors": tensors,
        "features": [[[float(f"{each:.7g}") for each in row] for row in image] for image in features.tolist()],
        "answers": {},
    }
    GOLDEN.write_text(json.dumps(made))
    golden.cache_clear()
    for case in ASKED:
        ids = torch.from_numpy(placed(case).ids.astype("int64"))[None]
        beside = given(case)
        if "pixel_values" in beside:
            beside["pixel_values"] = pixels[beside["pixel_values"].long().flatten()]
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12, do_sample=False,
            eos_token_id=None, pad_token_id=0, **beside,
        )  # fmt: skip
        made["answers"][case] = out[0, ids.shape[1] :].tolist()
        print(case, made["answers"][case])
    GOLDEN.write_text("{\n" + ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in made.items()) + "\n}\n")


if __name__ == "__main__":
    main()
