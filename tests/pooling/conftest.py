"""Keeps torch to one thread here: the models are tiny and the machine is shared."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch

torch.set_num_threads(1)
