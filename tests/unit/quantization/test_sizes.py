"""What the memory plan says of quantised weights, against the bytes that they take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from gguf_files import write_gguf
from quantised_files import ALL_FORMATS, quantise_checkpoint
from tiny import make_tiny

from bough.cli.main import main
from bough.config.gguf_header import KEPT_BITS
from bough.config.hf import open_checkpoint
from bough.config.server_args import build_config
from bough.engine.build import weight_format
from bough.engine.decide import decide
from bough.kernels.packed_linear import PackedWeight
from bough.kernels.packed_linear.weight import FORMATS as BLOCKS
from bough.models.load import build_model
from bough.platform import detect
from bough.quantization.packed_matrix import PackedMatrix

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}


def held(model: Any) -> int:
    """Bytes of all weights."""
    total = 0
    for module in model.modules():
        total += sum(each.numel() * each.element_size() for each in module.parameters(recurse=False))
        if isinstance(module, PackedMatrix):
            total += sum(
                piece.num_bytes if isinstance(piece, PackedWeight) else piece.numel() * piece.element_size()
                for piece in module.pieces
            )
    return total


SUMMARIES = {
    "awq": "AWQ, INT4 in groups of 32",
    "gptq": "GPTQ, INT4 in groups of 32",
    "gptq3": "GPTQ, INT3 in groups of 32",
    "gptq-desc_act": "GPTQ, INT4 in groups of 32",
    "int4": "INT4 in groups of 32",
    "int4-zeros": "INT4 in groups of 32",
    "w4a8": "INT4 in groups of 32, activations INT8 dynamic",
    "int8": "INT8, a scale per channel, activations INT8 dynamic",
    "fp8-channel": "FP8, a scale per channel, activations FP8 dynamic",
    "fp8-static": "FP8, a scale per tensor, static activations",
    "fp8-block": "FP8, blocks of 32 x 32",
    "gptq2": "GPTQ, INT2 in groups of 32",
    "gptq8-desc_act": "GPTQ, INT8 in groups of 32",
    "auto-round": "auto-round, INT4 in groups of 32",
    "fbgemm_fp8": "FP8, a scale per channel",
    "mxfp8": "MXFP8, blocks of 32",
    "mxfp4": "MXFP4",
    "modelopt-fp8": "ModelOpt FP8, a scale per tensor, static activations",
    "modelopt-nvfp4": "ModelOpt NVFP4",
    "w8a8_int8": "INT8, a scale per channel",
    "blockwise_int8": "INT8, blocks of 32 x 32",
    "bnb-nf4": "bitsandbytes NF4",
    "bnb-int8": "bitsandbytes INT8",
    "torchao-int4": "torchao IntxWeightOnly",
}
QUICK = ("awq", "gptq3", "int4-zeros", "int8", "fp8-block", "fp8-static")


@pytest.mark.parametrize(
    "form", [*QUICK, *(pytest.param(each, marks=pytest.mark.long) for each in ALL_FORMATS if each not in QUICK)]
)
def test_of_checkpoints(form: str, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, **SIZES)
    quantise_checkpoint(tmp_path, form)
    wanted = build_config(model=str(tmp_path), device="cpu", dtype="float32", skip_tokenizer_init=True)
    resolved = decide(wanted, detect("cpu")).resolved
    method = ALL_FORMATS[form][0].get("quant_method", "modelopt")
    assert resolved.config.model.quantization == method
    model = build_model(open_checkpoint(str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"))
    assert resolved.plan.weight_bytes == pytest.approx(held(model), rel=0.12)
    assert resolved.decisions["quantization"].because == SUMMARIES[form]
    assert weight_format(open_checkpoint(str(tmp_path)), resolved.config) == SUMMARIES[form], "the banner's"


@pytest.mark.parametrize(
    "form", ["awq", *(pytest.param(each, marks=pytest.mark.long) for each in ALL_FORMATS if each != "awq")]
)
def test_doctor_says_the_format(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny("llama", tmp_path, **SIZES)
    quantise_checkpoint(tmp_path, form)
    main(["doctor", str(tmp_path), "--device", "cpu", "--skip-tokenizer-init"])
    method = ALL_FORMATS[form][0].get("quant_method", "modelopt")
    assert f"weights are quantised, {method}: {SUMMARIES[form]}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "int4", "mxfp4"])
def test_of_floats_that_are_quantised_while_loading(name: str, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, **SIZES)
    wanted = build_config(
        model=str(tmp_path), device="cpu", dtype="float32", quantization=name, skip_tokenizer_init=True
    )
    resolved = decide(wanted, detect("cpu")).resolved
    assert resolved.config.model.quantization == name
    checkpoint = open_checkpoint(str(tmp_path))
    model = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), quantization=name)
    assert resolved.plan.weight_bytes == pytest.approx(held(model), rel=0.12)


KINDS = {
    "q_proj": "Q6_K",
    "down_proj": "Q4_K",
    "up_proj": "Q5_K",
    "gate_proj": "Q4_1",
    "k_proj": "Q8_0",
    "v_proj": "Q5_0",
}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_of_a_gguf_file_that_stays_packed(kind: Literal["cpu", "cuda"], tmp_path: Path) -> None:
    """On a GPU too: within 5 % of what the file takes."""
    reference = make_tiny("llama", tmp_path, **{**SIZES, "vocab_size": 64, "intermediate_size": 768})
    path = tmp_path / "tiny.gguf"
    write_gguf(tmp_path, reference.config.to_dict(), path, "Q4_0", KINDS)
    device = replace(detect("cpu"), kind=kind, capability=(9, 0), total_bytes=1 << 37, free_bytes=1 << 37)
    wanted = build_config(model=str(path), dtype="bfloat16", skip_tokenizer_init=True)
    resolved = decide(wanted, device).resolved
    assert resolved.config.model.quantization == "gguf"
    in_file = sum(tensor.nbytes for tensor in open_checkpoint(str(path)).tensors.values())
    tables = 4 * reference.config.head_dim * resolved.plan.context_length  # of rotary positions, which are in no file
    assert 0.95 * in_file < resolved.plan.weight_bytes - tables <= 1.05 * in_file
    plain = decide(replace(wanted, model=replace(wanted.model, quantization="none")), device).resolved
    assert plain.plan.weight_bytes > 2 * in_file
    assert set(KEPT_BITS) == {name for name, form in BLOCKS.items() if form.block_bytes not in (64, 128)}
