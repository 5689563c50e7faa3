"""Where scales of cached keys and values are found, and what is wrong with those that can't be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bough.config.hf import Checkpoint, open_checkpoint
from bough.core.errors import BoughError
from bough.quantization.kv_scales import KvScales, find_kv_scales
from bough.quantization.names import kv_scale_of, tensor_name, weight_name

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8, "vocab_size": 16,
}  # fmt: skip


def checkpoint(folder: Path, **tensors: Any) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    named = {name.replace("__", "."): torch.tensor(value) for name, value in tensors.items()}
    save_file({"model.norm.weight": torch.ones(8), **named}, folder / "model.safetensors")
    return open_checkpoint(str(folder))


@pytest.mark.parametrize("place", ["self_attn.{}_scale", "self_attn.attn.{}_scale", "self_attn.{}_proj.{}_scale",
                                   "self_attn.{}_proj.output_scale"])  # fmt: skip
def test_scales_of_a_checkpoint(place: str, tmp_path: Path) -> None:
    tensors = {}
    for layer in (0, 1):
        for which, value in (("k", 0.5 + layer), ("v", [0.25 + layer])):
            tensors[f"model.layers.{layer}.{place.format(which, which)}".replace(".", "__")] = value
    assert find_kv_scales(checkpoint(tmp_path, **tensors), 2) == KvScales((0.5, 1.5), (0.25, 1.25))


def test_one_scale_for_both_and_layers_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = find_kv_scales(checkpoint(tmp_path, model__layers__1__self_attn__kv_scale=0.125), 2)
    assert found == KvScales((1.0, 0.125), (1.0, 0.125))
    assert "1 of 2 layers" in caplog.text


def test_without_scales(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert find_kv_scales(checkpoint(tmp_path), 2) == KvScales()
    assert "without scales" in caplog.text


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), [0.1, 0.2]])
def test_scales_that_cannot_be(value: Any, tmp_path: Path) -> None:
    with pytest.raises(BoughError, match="scale"):
        find_kv_scales(checkpoint(tmp_path, model__layers__0__self_attn__k_scale=value), 2)


def test_scales_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "scales.json"

    def read(scaling: object) -> KvScales:
        file.write_text(json.dumps({"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": scaling}}))
        return find_kv_scales(open_checkpoint(""), 2, str(file))

    assert read({"0": {"0": 0.5, "1": {"k": 0.25, "v": 2}}}) == KvScales((0.5, 0.25), (0.5, 2.0))
    wrong = ({"0": {"5": 1.0}}, {"0": {"0": 0.0}}, {"0": {"0": "x"}}, {"0": {"0": 1.0}, "1": {"0": 2.0}}, [1.0])
    for scaling in wrong:
        with pytest.raises(BoughError):
            read(scaling)
    with pytest.raises(BoughError, match="can't be read"):
        find_kv_scales(open_checkpoint(""), 2, str(tmp_path / "none.json"))


def test_names() -> None:
    for quantised in (True, False):
        assert weight_name("model.layers.0.self_attn.k_scale", quantised=quantised) is None
        assert weight_name("model.layers.0.self_attn.q_scale", quantised=quantised) is None
    name = "model.layers.3.mlp.down_proj.weight.quant_state.bitsandbytes__nf4"
    assert weight_name(name, quantised=False) == name
    assert weight_name(name, quantised=True) == tensor_name(name) == "model.layers.3.mlp.down_proj.weight_quant_state"
    assert kv_scale_of("model.layers.3.self_attn.k_proj.weight_scale") is None
    assert kv_scale_of("model.layers.12.self_attn.v_proj.output_scale") == (12, "v")
