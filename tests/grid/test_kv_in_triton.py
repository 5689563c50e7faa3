"""Scales from the first prompts and spread keys with the GPU's attention backend, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import make_tiny

SCRIPT = """
import sys
import torch
from in_process import InProcess, Setup
from bough.config.hf import open_checkpoint
from bough.core.sampling import SamplingParams
from bough.models.load import build_model

model = build_model(open_checkpoint(sys.argv[1]), dtype=torch.float32, device=torch.device("cpu"))
prompts = [[5, 17, 99, 3, 64, 2, 120, 33, 7, 8, 9], [42, 43]]
greedy = SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)
for options in ({"kv_dtype": torch.float8_e4m3fn, "measures_scales": True}, {"code_bits": 4}):
    by_torch, by_triton = (
        InProcess(model, 131, Setup(attention=name, **options)).generate(prompts, greedy) for name in ("torch", "triton")
    )
    assert by_triton == by_torch, (options, by_triton, by_torch)
"""


@pytest.mark.long
def test_answers_are_those_of_torch(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, num_hidden_layers=2)
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, env=env, timeout=280, check=False
    )
    assert run.returncode == 0, run.stderr
