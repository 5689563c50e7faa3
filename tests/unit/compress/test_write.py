"""`bough quantize`: what it writes, read back and compared with formulas of the formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf_files import write_gguf
from quantised_files import fp8, int8, packed, words
from safetensors.torch import load_file
from tiny import make_tiny
from tokenizers import pre_tokenizers
from torch import Tensor
from whole_engine import save_tokenizer

from bough.cli.main import main
from bough.config.hf import open_checkpoint
from bough.models.load import build_model
from bough.tokenizer import load_tokenizer

SIZES = {"hidden_size": 64, "intermediate_size": 96}
TOKENS = {"tokens": [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"], "merges": ["t h", "th e"]}
Stored = tuple[dict[str, Tensor], Tensor]


def int8_words(w: Tensor) -> Stored:
    stored, dense = int8(w)
    codes = stored["weight"].int() + 128
    return {"weight_packed": words(codes, 8, 1), "weight_scale": stored["weight_scale"]}, dense


FORMULAS: dict[str, Callable[[Tensor], Stored]] = {
    "fp8": lambda w: fp8(w, 1, 0, "weight_scale"),
    "fp8-block": lambda w: fp8(w, 128, 128, "weight_scale"),
    "int8": int8,
    "int8-weight": int8_words,
    "int4": lambda w: packed(w, 32, symmetric=False),
}


@pytest.mark.parametrize("to", FORMULAS)
def test_what_is_written_is_what_the_format_says(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    make_tiny("llama", source, **SIZES)
    assert main(["quantize", str(source), str(out), "--to", to, "--text", "none"]) == 0
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


def test_perplexities_before_and_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that knows nothing gives each of its tokens about the same chance, in 8 bits too."""
    source, out, text = tmp_path / "in", tmp_path / "out", tmp_path / "text"
    source.mkdir()
    reference = make_tiny("llama", source, **SIZES, vocab_size=384)
    save_tokenizer(source)
    text.write_text("the answer is not known, and the other one is the end of the story. " * 3)
    assert main(["quantize", str(source), str(out), "--to", "int8", "--text", str(text)]) == 0
    found = re.search(r"perplexity ([\d.]+) -> ([\d.]+) .*, KL ([\d.]+)", capsys.readouterr().out)
    assert found is not None
    before, after = float(found[1]), float(found[2])
    assert 100 < before < 1500
    assert after == pytest.approx(before, rel=0.1)
    assert 0 < float(found[3]) < 0.05
    ids = load_tokenizer(source).encode(text.read_text())
    with torch.no_grad():
        loss = reference(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    assert before == pytest.approx(float(loss.exp()), rel=1e-3)


@pytest.mark.parametrize("to", ["int4-gptq", "int4-awq"])
def test_a_gguf_file_is_written_with_its_tokenizer(to: str, tmp_path: Path) -> None:
    """Rows of queries and keys are in another order there."""
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    reference = make_tiny("llama", folder, **SIZES, vocab_size=258, num_hidden_layers=2)
    expected = write_gguf(folder, {**reference.config.to_dict(), **TOKENS}, tmp_path / "tiny.gguf", "F16")
    calls = ["--text", "none", "--samples", "4", "--sample-tokens", "24", "--calibration", str(tmp_path / "text")]
    (tmp_path / "text").write_text("the answer is not known, and the other one is the end. " * 20)
    assert main(["quantize", str(tmp_path / "tiny.gguf"), str(out), "--to", to, *calls]) == 0
    model = build_model(open_checkpoint(str(out)), dtype=torch.float32, device=torch.device("cpu"), quantization="none")
    q = model.layers[1].attn.qkv.matrix.weight[:64]  # type: ignore[attr-defined]
    exact = torch.tensor(expected["model.layers.1.self_attn.q_proj.weight"])
    if to == "int4-gptq":
        assert torch.nn.functional.cosine_similarity(q, exact).min() > 0.95
    text = "the answer is"
    assert load_tokenizer(out).encode(text) == load_tokenizer(tmp_path / "tiny.gguf").encode(text)


def test_experts_are_written_and_routers_kept(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    make_tiny("qwen3_moe", source, **SIZES, moe_intermediate_size=64)
    assert main(["quantize", str(source), str(out), "--to", "int4", "--text", "none"]) == 0
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
    assert main(["quantize", str(source), str(out), "--to", "fp8", "--text", "none"]) == 0
    assert main(["quantize", str(out), str(tmp_path / "again"), "--to", "int8"]) == 2
    assert "quantised already" in capsys.readouterr().err
    assert main(["quantize", str(source), str(tmp_path / "more"), "--to", "fp8", "--text", str(tmp_path / "no")]) == 2
    assert not (tmp_path / "more").exists()
