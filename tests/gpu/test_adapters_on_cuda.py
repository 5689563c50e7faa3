"""Adapters on a CUDA device, in graphs and without: the answers of transformers with an adapter merged into its weights."""

from __future__ import annotations

import pytest
import torch
from in_process import InProcess, Setup
from test_lora import GREEDY, PROMPTS, VOCAB, adapted
from test_phi4mm import ADAPTER, PROMPTS as MEDIA, prompt, their_answer
from tiny_phi4mm import load_phi4
from tiny_vision import VOCAB as MEDIA_VOCAB

from bough.config.hf import open_checkpoint
from bough.models.load import build_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("case", ["llama-tied-bias", "phi3", "gpt_neox"])
def test_rows_have_the_answers_of_their_adapters(case: str, graphs: bool) -> None:
    made = adapted(case)
    checkpoint = open_checkpoint(str(made.folder / "model"), lora_paths=made.paths)
    model = build_model(checkpoint, dtype=torch.float32, device=torch.device("cuda"))
    setup = Setup(device="cuda", attention="triton", page_size=16, graphs=graphs, chunk_tokens=64, num_slots=12)
    engine = InProcess(model, VOCAB, setup)
    asked = [(number, name, ids) for ids in PROMPTS for number, name in enumerate(made.references)]
    wanted = [made.says(name, ids) for _, name, ids in asked]
    for _ in range(2):
        found = engine.finish([engine.submit(ids, GREEDY, adapter=number) for number, _, ids in asked])
        assert [answer.tokens for answer in found] == wanted
    plain = engine.finish([engine.submit(ids, GREEDY) for ids in PROMPTS])
    assert [answer.tokens for answer in plain] == wanted[::3]
    if graphs:
        assert engine.runner.graphs is not None
        assert {key.adapted for key in engine.runner.graphs._captured} == {True, False}


@pytest.mark.parametrize("graphs", [True, False])
def test_media_choose_the_adapter(graphs: bool) -> None:
    torch.backends.cudnn.allow_tf32 = False  # as `platform.device` does
    phi4 = load_phi4()
    model = build_model(phi4.checkpoint, dtype=torch.float32, device=torch.device("cuda"), context_length=512)
    setup = Setup(device="cuda", attention="triton", page_size=16, graphs=graphs, context_length=512)
    engine = InProcess(model, MEDIA_VOCAB, setup)
    for _ in range(2):
        found = engine.finish([prompt(phi4, name).submit(engine, GREEDY) for name in MEDIA])
        for name, answer in zip(MEDIA, found, strict=True):
            wanted = their_answer(phi4, name, ADAPTER[name])[1]
            assert answer.tokens[: len(wanted)] == wanted[: len(answer.tokens)], name
