"""`--tensor-dump-dir` and `bough debug compare`: every layer's output, held to transformers, and two runs held together."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import bough
from bough.cli import debug
from bough.core.errors import ConfigError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = [5, 71, 9, 33, 210, 14, 8, 61, 7, 90, 42, 3, 17, 255, 12, 77, 18, 29, 99, 100]
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny Llama with transformers' own random weights."""
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, max_position_embeddings=512,
    )  # fmt: skip
    made = LlamaForCausalLM(config).eval().float()
    folder = tmp_path_factory.mktemp("llama")
    made.save_pretrained(folder)
    return folder, made


@pytest.fixture(scope="module")
def dumps(model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A directory with the dumps of one prompt: once whole, once in small chunks beside others. And the answer."""
    directory = tmp_path_factory.mktemp("tensors")
    settings: dict[str, Any] = {
        "model_path": str(model[0]), "skip_tokenizer_init": True, "dtype": "float32", "device": "cpu",
        "custom_kernels": False, "cpu_threads": 1, "max_total_tokens": 2048, "radix_cache": False,
        "tensor_dump_dir": str(directory),
    }  # fmt: skip
    with bough.Engine(**settings) as engine:
        answer: Any = engine.generate(input_ids=PROMPT, sampling_params=GREEDY, rid="dump-whole")
        engine.generate(input_ids=PROMPT, sampling_params=GREEDY, rid="plain")
    with bough.Engine(**settings, chunked_prefill_size=16) as engine:
        others = [[at, *PROMPT[at:]] for at in range(3)]
        both: Any = engine.generate(
            input_ids=[*others, PROMPT], sampling_params=GREEDY, rid=["a", "b", "c", "dump-chunks/../x"]
        )
        assert both[3]["output_ids"] == answer["output_ids"]
    return directory, answer["output_ids"]


def file(directory: Path, name: str) -> Path:
    (found,) = directory.glob(f"{name}*.safetensors")
    return found


def test_each_layer_is_transformers_own(model: tuple[Path, Any], dumps: tuple[Path, list[int]]) -> None:
    directory, answer = dumps
    path = file(directory, "dump-whole")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    told = load_file(path)
    ids = [*PROMPT, *answer[:-1]]
    assert told["ids"].tolist() == ids
    assert told["positions"].tolist() == list(range(len(ids)))
    with torch.inference_mode():
        want = model[1](torch.tensor([ids]), output_hidden_states=True)
    np.testing.assert_allclose(told["embed"], want.hidden_states[0][0].numpy(), atol=1e-6)
    for layer in range(2):  # transformers applies the last norm to the last layer's
        np.testing.assert_allclose(told[f"layers.{layer}"], want.hidden_states[layer + 1][0].numpy(), atol=1e-5)
    assert told["logits_at"].tolist() == list(range(len(PROMPT) - 1, len(ids)))
    np.testing.assert_allclose(told["logits"], want.logits[0, len(PROMPT) - 1 :].numpy(), atol=1e-5)
    assert told["logits"].argmax(-1).tolist() == answer


def test_only_chosen_requests_are_dumped_and_names_stay_names(dumps: tuple[Path, list[int]]) -> None:
    names = sorted(path.name.split(".")[0] for path in dumps[0].iterdir())
    assert names == ["dump-chunks_", "dump-whole"]


def test_two_runs_agree_however_they_were_chunked(dumps: tuple[Path, list[int]], capsys: Any) -> None:
    first, second = file(dumps[0], "dump-whole"), file(dumps[0], "dump-chunks")
    assert debug.run(["compare", str(first), str(second), "--tolerance", "1e-4"]) == 0
    shown = capsys.readouterr().out
    assert "25 tokens in common, of 25 and 25" in shown
    assert "they agree" in shown


def test_where_two_runs_part_is_named(dumps: tuple[Path, list[int]], tmp_path: Path) -> None:
    first = file(dumps[0], "dump-whole")
    told = load_file(first)
    for name in ("layers.1.attn.out", "layers.1", "layers.2"):
        told[name] = told[name] + 0.3 * np.abs(told[name]).max()
    told["ids"][22] = 1  # sampled otherwise from there on
    changed = tmp_path / "changed.safetensors"
    save_file(told, changed)
    ended = subprocess.run(
        [sys.executable, "-m", "bough", "debug", "compare", str(first), str(changed)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.startswith("22 tokens in common")
    assert "they part at layers.1.attn.out" in ended.stdout
    ended = subprocess.run(
        [sys.executable, "-m", "bough", "debug", "compare", str(first), str(changed), "--json"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert json.loads(ended.stdout)["differs"] == ["layers.1.attn.out", "layers.1", "layers.2"]


def test_what_is_no_dump_is_refused(dumps: tuple[Path, list[int]], tmp_path: Path) -> None:
    first = str(file(dumps[0], "dump-whole"))
    (tmp_path / "text").write_text("no tensors")
    save_file({"x": np.zeros(3)}, tmp_path / "other.safetensors")
    for bad in ("text", "other.safetensors", "missing"):
        with pytest.raises(ConfigError, match=r"dump|can't read"):
            debug.run(["compare", first, str(tmp_path / bad)])
    told = load_file(first)
    told["ids"] = told["ids"] + 1
    save_file(told, tmp_path / "elsewhere.safetensors")
    with pytest.raises(ConfigError, match="no token in common"):
        debug.run(["compare", first, str(tmp_path / "elsewhere.safetensors")])
