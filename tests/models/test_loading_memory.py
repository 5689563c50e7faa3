"""Memory while weights are loaded: that of the result, and of the layers that are being made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 2048, "vocab_size": 256,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
LAYER = {
    "self_attn.q_proj": (512, 512), "self_attn.k_proj": (512, 512), "self_attn.v_proj": (512, 512),
    "self_attn.o_proj": (512, 512), "mlp.gate_proj": (2048, 512), "mlp.up_proj": (2048, 512),
    "mlp.down_proj": (512, 2048),
}  # fmt: skip
LAYER_PARAMETERS = sum(rows * cols for rows, cols in LAYER.values())
SCRIPT = """
import sys, threading
import torch
from bough.config.hf import open_checkpoint
from bough.models.load import build_model
from bough.weights import load

load._MAX_READERS = 2

def anonymous():  # bytes that no file is behind
    resident, shared = map(int, open("/proc/self/statm").read().split()[1:3])
    return (resident - shared) * 4096

def build(path, quantization):
    return build_model(
        open_checkpoint(path), dtype=torch.bfloat16, device=torch.device("cpu"), quantization=quantization
    )

torch.set_num_threads(1)
build(sys.argv[2], sys.argv[3])  # a tiny one first: imports and kernels are there
base, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
model = build(sys.argv[1], sys.argv[3])
done.set()
watcher.join()
print(peak - base, anonymous() - base)
"""


def write(folder: Path, layers: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    tensors = {"model.embed_tokens.weight": torch.randn(256, 512).bfloat16(), "model.norm.weight": torch.ones(512)}
    for layer in range(layers):
        here = f"model.layers.{layer}"
        tensors |= {f"{here}.{name}.weight": torch.randn(shape).bfloat16() for name, shape in LAYER.items()}
        tensors |= {f"{here}.{name}_layernorm.weight": torch.ones(512) for name in ("input", "post_attention")}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("quantization", ["fp8", pytest.param("int4", marks=pytest.mark.long)])
def test_floats_that_are_quantised_while_loading(quantization: str, tmp_path: Path) -> None:
    """Two threads make a layer each, in float32. All floats at once would take 100 MB beside the result."""
    large, small = write(tmp_path / "large", 12), write(tmp_path / "small", 1)
    # Freed blocks go back to the system at once, so that resident bytes are those in use.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(large), str(small), quantization],
        capture_output=True, text=True, env=env, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    peak, result = map(int, run.stdout.split())
    assert result < 12 * LAYER_PARAMETERS * 1.5, "the result is quantised"
    assert peak < result + 2 * LAYER_PARAMETERS * 4 + 20e6
