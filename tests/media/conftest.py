"""Keeps torch to one thread here: the models are tiny and the machine is shared."""

from __future__ import annotations

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch

torch.set_num_threads(1)
