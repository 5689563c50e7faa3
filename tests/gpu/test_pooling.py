"""Pooling models on a CUDA device against the CPU in float32."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "pooling"))

from pooled_engine import DECODER, TEXTS, PooledEngine, make_tiny

CASES: dict[str, dict[str, Any]] = {
    "BertModel": {"type_vocab_size": 2},
    "XLMRobertaModel": {"type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 98},
    "Qwen3Model": {**DECODER, "head_dim": 16},
    "Gemma3TextModel": {
        **DECODER,
        "head_dim": 16,
        "sliding_window": 6,
        "query_pre_attn_scalar": 24,
        "use_bidirectional_attention": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_embeddings_equal_the_cpus(name: str, dtype: str, tmp_path: Path) -> None:
    make_tiny(name, tmp_path, **CASES[name])
    expected = PooledEngine(tmp_path).results(TEXTS)
    actual = PooledEngine(tmp_path, device="cuda", dtype=dtype, custom_kernels=True, max_total_tokens=4096).results(
        TEXTS
    )
    least = {"float32": 0.99999, "float16": 0.999, "bfloat16": 0.99}[dtype]
    for one, other in zip(actual, expected, strict=True):
        assert float(np.dot(one, other) / np.linalg.norm(one) / np.linalg.norm(other)) >= least
