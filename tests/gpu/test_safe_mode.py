"""`--safe-mode` and `--no-custom-kernels` on a GPU: nothing of ours is compiled or loaded, and answers stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_tiny

import bough

PROMPTS = [[(7 * i + 3) % 120 + 3 for i in range(length)] for length in (5, 40, 90)]
SAMPLING = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
RICH = {**SAMPLING, "frequency_penalty": 0.4, "logit_bias": {"5": 2.0}}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize(
    ("flags", "compiles"), [({}, True), ({"custom_kernels": False}, False), ({"safe_mode": True}, False)]
)
def test_nothing_of_ours_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, flags: dict[str, Any], compiles: bool
) -> None:
    reference = make_tiny(family, tmp_path / "model", head_dim=32, hidden_size=128, intermediate_size=256).cuda()
    expected = []
    for prompt in PROMPTS:
        out = reference.generate(
            torch.tensor([prompt], device="cuda"), attention_mask=torch.ones(1, len(prompt), device="cuda"),
            max_new_tokens=24, min_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        expected.append(out[0, len(prompt) :].tolist())
    caches = {name: tmp_path / name for name in ("TRITON_CACHE_DIR", "XDG_CACHE_HOME")}
    for name, path in caches.items():
        monkeypatch.setenv(name, str(path))
    settings = {"device": "cuda", "dtype": "float32", "skip_tokenizer_init": True, "max_total_tokens": 4096}
    with bough.Engine(model_path=str(tmp_path / "model"), log_level="warning", **settings, **flags) as engine:
        answers = engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING)
        shaped = engine.generate(input_ids=PROMPTS, sampling_params=RICH)
    assert isinstance(answers, list)
    assert isinstance(shaped, list)
    assert [answer["output_ids"] for answer in answers] == expected
    assert all(len(answer["output_ids"]) == 24 for answer in shaped)
    made = [file for path in caches.values() for file in path.rglob("*") if file.suffix in (".cubin", ".ptx", ".so")]
    assert bool(made) == compiles, made
