"""Scales of keys and values that are cached in FP8, from a file, a checkpoint and the first prompts, on ranks as threads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from thread_engine import ThreadEngine
from tiny import make_tiny

from bough.core.errors import ConfigError

PROMPTS = [[5, 17, 99, 3, 64, 2, 120, 33, 7, 8, 9], [42, 43], [5, 17, 99, 3, 64, 2, 120, 77]]
FP8 = {"kv_cache_dtype": "fp8_e4m3"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "stages": {"pp_size": 2},
    "heads": {"tp_size": 2},
    "replicas": {"tp_size": 2, "attn_dp_size": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its keys overflow FP8 without scales."""
    folder = tmp_path_factory.mktemp("large_keys")
    make_tiny("llama", folder)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "q_proj" in name or "k_proj" in name:
            tensors[name] *= 4096.0 if "k_proj" in name else 1 / 4096.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def scales_file(folder: Path) -> Path:
    file = folder / "scales.json"
    scaling = {str(layer): {"k": 2.0 ** (5 + layer), "v": 2.0 ** (layer - 6)} for layer in range(4)}
    file.write_text(json.dumps({"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": scaling}}}))
    return file


def answers(model: Path, **settings: Any) -> tuple[list[list[int]], list[list[float]]]:
    """Answers, and each rank's scales of keys."""
    with ThreadEngine(model, **settings) as engine:
        given = engine.ask(PROMPTS) + engine.ask(PROMPTS[::-1])
        return given, [runner.pool.k_scales for _, runner in sorted(engine.runners.items())]


def test_a_file_serves_every_rank(model: Path, tmp_path: Path) -> None:
    options = {**FP8, "quantization_param_path": str(scales_file(tmp_path))}
    expected, (scales,) = answers(model, **options)
    assert scales == [32.0, 64.0, 128.0, 256.0]
    staged, held = answers(model, **options, **LAYOUTS["stages"])
    assert (staged, held) == (expected, [[32.0, 64.0], [128.0, 256.0]])
    cut, held = answers(model, **options, **LAYOUTS["heads"])
    assert (cut, held) == (expected, [scales, scales])


def test_a_checkpoint_brings_its_scales(model: Path, tmp_path: Path) -> None:
    """The same scales in a file and in the checkpoint give the same answers."""
    expected, (scales,) = answers(model, **FP8, quantization_param_path=str(scales_file(tmp_path)))
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    tensors = load_file(model / "model.safetensors")
    for layer in range(4):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(2.0 ** (5 + layer))
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(2.0 ** (layer - 6))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert answers(tmp_path, **FP8) == (expected, [scales])


@pytest.mark.parametrize("layout", ["alone", *LAYOUTS])
def test_the_first_prompts_give_scales(model: Path, layout: str) -> None:
    """Which lose as little as those of a file, whichever ranks there are."""
    exact, _ = answers(model)
    measured, held = answers(model, **FP8, calculate_kv_scales=True, **LAYOUTS.get(layout, {}))
    assert all(scale > 4 for scales in held for scale in scales)
    clamped, _ = answers(model, **FP8)
    assert equal_tokens(measured, exact) > equal_tokens(clamped, exact)


def equal_tokens(some: list[list[int]], others: list[list[int]]) -> int:
    """Tokens before the first difference."""
    total = 0
    for a, b in zip(some, others, strict=True):
        total += next((at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return total


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"calculate_kv_scales": True}, "calculate_kv_scales"),
        ({"calculate_kv_scales": True, "kv_cache_dtype": "int8"}, "calculate_kv_scales"),
        ({"quantization_param_path": "scales.json"}, "quantization_param_path"),
        ({"calculate_kv_scales": True, **FP8, "quantization_param_path": "scales.json"}, "calculate_kv_scales"),
        ({"calculate_kv_scales": True, **FP8, "tp_size": 2, "attn_cp_size": 2}, "calculate_kv_scales"),
    ],
)
def test_scales_that_nothing_would_use_are_refused(model: Path, settings: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ThreadEngine(model, **settings)
    assert refused.value.param == param
