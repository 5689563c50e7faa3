"""What the memory plan says of quantised weights, against the bytes that they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_files import FORMATS, quantise_checkpoint
from tiny import make_tiny

from bough.cli.main import main
from bough.config.hf import open_checkpoint
from bough.config.server_args import build_config
from bough.engine.decide import decide
from bough.kernels.packed_linear import PackedWeight
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


@pytest.mark.parametrize("form", ["awq", "gptq3", "int4-zeros", "int8", "fp8-block", "fp8-static"])
def test_of_checkpoints(form: str, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, **SIZES)
    quantise_checkpoint(tmp_path, form)
    wanted = build_config(model=str(tmp_path), device="cpu", dtype="float32", skip_tokenizer_init=True)
    resolved = decide(wanted, detect("cpu")).resolved
    assert resolved.config.model.quantization == FORMATS[form][0]["quant_method"]
    model = build_model(open_checkpoint(str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"))
    assert resolved.plan.weight_bytes == pytest.approx(held(model), rel=0.12)


def test_doctor_says_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny("llama", tmp_path, **SIZES)
    quantise_checkpoint(tmp_path, "awq")
    main(["doctor", str(tmp_path), "--device", "cpu", "--skip-tokenizer-init"])
    assert "weights are quantised, awq: AWQ, INT4 in groups of 32" in capsys.readouterr().out


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
