"""Towers on a CUDA device: other kernels, the same features; nothing waits for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from in_process import InProcess, Setup
from PIL import Image
from prompts import noise
from seeing import NAMES, Seeing, load
from test_gemma3n import ASKED, NEW as GEMMA3N_NEW, media_of, placed
from test_in_engine import answers, expected, prompts
from test_sound import sound
from tiny_gemma3n import TinyGemma3n, golden, load_gemma3n
from tiny_phi4mm import Phi4, load_phi4
from tiny_tiles import TILE_FAMILIES, Tiled, load_tiled
from tiny_vision import VOCAB

from bough.core.sampling import SamplingParams
from bough.core.step import Encode
from bough.layers.decoder import Decoder
from bough.models.load import build_model
from bough.runner.encoder import TowerRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", [*NAMES, *TILE_FAMILIES, "gemma3n", "phi4mm"])
def test_a_tower_gives_what_it_gives_on_the_cpu_and_waits_for_nothing(name: str) -> None:
    seen = _load(name)
    device = torch.device("cuda", torch.cuda.current_device())
    torch.backends.cudnn.allow_tf32 = False  # as `platform.device` does
    here = build_model(seen.checkpoint, dtype=torch.float32, device=device, context_length=256)
    assert isinstance(here, Decoder)
    assert here.tower is not None
    assert seen.model.tower is not None
    work, rows = [], 0
    made = [seen.processor.image(Image.fromarray(noise(*size)), {}) for size in ((24, 40), (16, 16), (90, 70))]
    if "audio" in seen.processor.kinds:
        made += [seen.processor.audio(sound(seconds), {}) for seconds in (0.9, 0.1)]
    for array, items in made:
        for item in items:
            at = np.arange(rows, rows + item.count, dtype=np.int32)
            features = np.array(array[item.first : item.last or None])
            work.append(Encode(features=features, grid=item.grid, rows=at))
            rows += item.count
    cpu = TowerRunner(seen.model.tower, rows, torch.float32, torch.device("cpu"))
    cuda = TowerRunner(here.tower, rows, torch.float32, device)
    with torch.inference_mode():
        cpu.encode(work)
        cuda.encode(work)
        first = cuda.store_RW.clone()
        torch.cuda.set_sync_debug_mode("error")
        try:
            cuda.encode(work)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert (first.cpu() - cpu.store_RW).abs().max() <= 1e-3
    assert cpu.store_RW.std() > 0.1
    assert torch.equal(first, cuda.store_RW)


def _load(name: str) -> Seeing | Tiled | TinyGemma3n | Phi4:
    others = {"gemma3n": load_gemma3n, "phi4mm": load_phi4}
    if name in others:
        return others[name]()
    return load(name) if name in NAMES else load_tiled(name)


@pytest.mark.parametrize("graphs", [True, False])
def test_answers_of_gemma3n_are_transformers_with_graphs_and_without(graphs: bool) -> None:
    """Tokens that end images and sounds have vectors of the tower's, in graphs, too."""
    torch.backends.cudnn.allow_tf32 = False
    checkpoint = load_gemma3n().checkpoint
    model = build_model(checkpoint, dtype=torch.float32, device=torch.device("cuda"), context_length=256)
    engine = InProcess(model, VOCAB, Setup(device="cuda", attention="triton", page_size=16, graphs=graphs))
    for case in ASKED:
        engine.features |= {each.features.path: array for each, array in media_of(case)}
    sampling = SamplingParams(temperature=0.0, max_new_tokens=GEMMA3N_NEW, ignore_eos=True)
    for _ in range(2):
        ids = [engine.submit(placed(case).ids.tolist(), sampling, media=placed(case).items) for case in ASKED]
        assert [answer.tokens for answer in engine.finish(ids)] == [golden()["answers"][case] for case in ASKED]
        for _ in range(8 if graphs else 0):
            engine.runner.idle()  # captures what was missed


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_answers_are_transformers_with_graphs_and_without(name: str, graphs: bool) -> None:
    model = build_model(load(name).checkpoint, dtype=torch.float32, device=torch.device("cuda"), context_length=256)
    engine = InProcess(model, VOCAB, Setup(device="cuda", attention="triton", page_size=16, graphs=graphs))
    for _ in range(2):
        assert [answer.tokens for answer in answers(engine, prompts(name))] == expected(name)
        for _ in range(8 if graphs else 0):
            engine.runner.idle()  # captures what was missed
