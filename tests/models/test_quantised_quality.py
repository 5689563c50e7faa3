"""What quantising the embedded model by `bough quantize` costs, on a text of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bough.cli import quantize

TEXT = Path(__file__).parents[2] / "docs" / "life_of_a_request.md"


def divergence(form: str, out: Path, printed: pytest.CaptureFixture[str]) -> float:
    """Mean KL to the model before, as the command says it. Groups of 64: the model's widths are no multiples of 128."""
    arguments = ["default", str(out / form), "--to", form, "--text", str(TEXT), "--text-tokens", "1024"]
    quantize.run(arguments + (["--group-size", "64"] if form.startswith("int4") else []))
    said = printed.readouterr().out
    with printed.disabled():
        print(form, said.splitlines()[-1])
    found = re.search(r"KL ([\d.]+)$", said, re.MULTILINE)
    assert found is not None, said
    return float(found[1])


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("form", "most"), [("fp8", 0.04), ("int8", 0.04), ("int8-weight", 0.005)])
def test_eight_bits(form: str, most: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 < divergence(form, tmp_path, capsys) <= most


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_gptq_and_awq_halve_what_four_bits_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nearest = divergence("int4", tmp_path, capsys)
    assert divergence("int4-gptq", tmp_path, capsys) <= nearest / 2
    assert divergence("int4-awq", tmp_path, capsys) <= nearest / 2
