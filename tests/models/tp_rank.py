"""One rank of a mesh: loads checkpoints with its share of the weights and writes the logits it sees.

usage: tp_rank.py RANK SIZE INIT_FILE MODEL...    writes MODEL.RANK.npy
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import numpy as np
import torch
from dense_attention import DenseAttention

from bough.config.hf import open_checkpoint
from bough.distributed.mesh import join_mesh, leave_mesh
from bough.models.load import build_model

PROMPTS = [[5, 17, 99, 3, 64, 2, 120, 33, 7, 8, 9, 10, 11], [42], [100, 90, 80]]


def main(rank: int, size: int, init_file: str, models: list[str]) -> None:
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    mesh = join_mesh(rank, size, init_method=f"file://{init_file}", device=cpu, timeout_s=300)
    for path in models:
        checkpoint = open_checkpoint(path)
        scheme = "gguf-exact" if checkpoint.kind == "gguf" else "auto"
        model = build_model(
            checkpoint, dtype=torch.float32, device=cpu, mesh=mesh, quantization=scheme, context_length=256
        )
        with torch.no_grad():
            batch = DenseAttention(len(PROMPTS)).step(list(enumerate(PROMPTS)), all_logits=True)
            np.save(f"{path}.{rank}.npy", model.logits(model.forward(batch)).numpy())
    leave_mesh(mesh)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
