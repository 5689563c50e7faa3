"""`bough quantize`: what it writes, read back and compared with formulas of the formats."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from quantised_files import fp8, int8, packed
from safetensors.torch import load_file
from tiny import make_tiny
from whole_engine import save_tokenizer

from bough.cli.main import main
from bough.config.hf import open_checkpoint
from bough.models.load import build_model

SIZES = {"hidden_size": 64, "intermediate_size": 96}
FORMULAS = {
    "fp8": lambda w: fp8(w, 1, 0, "weight_scale"),
    "int8": int8,
    "int4": lambda w: packed(w, 32, symmetric=False),
}


@pytest.mark.parametrize("to", FORMULAS)
def test_what_is_written_is_what_the_format_says(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    make_tiny("llama", source, **SIZES)
    assert main(["quantize", str(source), str(out), "--to", to]) == 0
    assert str(out) in capsys.readouterr().out
    plain, written = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    stored, dense = FORMULAS[to](plain[f"{name}.weight"].float())
    for last, expected in stored.items():
        got = written[f"{name}.{last}"]
        if expected.dtype == torch.float32:
            torch.testing.assert_close(got.float(), expected.view(got.shape))
        else:
            assert torch.equal(got, expected)
    assert torch.equal(written["lm_head.weight"], plain["lm_head.weight"])
    model = build_model(open_checkpoint(str(out)), dtype=torch.float32, device=torch.device("cpu"), quantization="none")
    torch.testing.assert_close(model.layers[1].mlp.down.matrix.weight, dense, rtol=1e-6, atol=1e-7)  # type: ignore[attr-defined]


@pytest.mark.long  # it starts two engines
def test_perplexities_before_and_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that knows nothing gives each of its tokens about the same chance, in 8 bits too."""
    source, out, text = tmp_path / "in", tmp_path / "out", tmp_path / "text"
    source.mkdir()
    make_tiny("llama", source, **SIZES, vocab_size=384)
    save_tokenizer(source)
    text.write_text("the answer is not known, and the other one is the end of the story. " * 3)
    assert main(["quantize", str(source), str(out), "--to", "int8", "--text", str(text)]) == 0
    found = re.search(r"perplexity ([\d.]+) -> ([\d.]+)", capsys.readouterr().out)
    assert found is not None
    before, after = float(found[1]), float(found[2])
    assert 100 < before < 1500
    assert after == pytest.approx(before, rel=0.1)


def test_experts_are_written_and_routers_kept(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    make_tiny("qwen3_moe", source, **SIZES, moe_intermediate_size=64)
    assert main(["quantize", str(source), str(out), "--to", "int4"]) == 0
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert any(name.endswith("mlp.gate") for name in config["ignore"])
    model = build_model(open_checkpoint(str(out)), dtype=torch.float32, device=torch.device("cpu"))
    assert model.layers[-1].mlp.experts.stack.packed is not None  # type: ignore[attr-defined]


def test_what_cannot_be_quantised_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    make_tiny("llama", source, **SIZES)
    assert main(["quantize", str(source), str(source), "--to", "fp8"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["quantize", str(source), str(out), "--to", "fp8"]) == 0
    assert main(["quantize", str(out), str(tmp_path / "again"), "--to", "int8"]) == 2
    assert "quantised already" in capsys.readouterr().err
    assert main(["quantize", str(source), str(tmp_path / "more"), "--to", "fp8", "--text", str(tmp_path / "no")]) == 2
    assert not (tmp_path / "more").exists()
