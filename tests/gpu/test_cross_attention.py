"""Cross attention on a GPU: Whisper's answers are transformers', in graphs and without, cached or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from in_process import InProcess, Setup
from test_whisper import ASKED, SPOKEN, VOCAB, expected, submit, whisper

from bough.models.load import build_model

pytestmark = pytest.mark.xdist_group("whisper")
"""What transformers answers is computed once."""

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {"overlap": False},
    "graphs": {"graphs": True},
    "chunks of 5": {"graphs": True, "chunk_tokens": 5, "page_size": 4},
    "no cache": {"graphs": True, "radix_cache": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_are_transformers(variant: str) -> None:
    model = build_model(whisper()[2], dtype=torch.float32, device=torch.device("cuda"), context_length=96)
    attention = "hopper" if HOPPER else "triton"
    setup = Setup(device="cuda", attention=attention, context_length=96, **VARIANTS[variant])
    engine = InProcess(model, VOCAB, setup)
    for _ in range(2):
        answers = engine.finish([submit(engine, *each) for each in ASKED])
        assert [answer.tokens for answer in answers] == [expected(*each) for each in ASKED]
    spoken = engine.finish([submit(engine, *each, rules=True) for each in SPOKEN])
    assert [answer.tokens for answer in spoken] == [expected(*each, rules=True) for each in SPOKEN]
