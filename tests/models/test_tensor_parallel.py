"""Two ranks over gloo give the logits of one, for architectures that split in different ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from tiny import make_tiny
from tp_rank import PROMPTS

from bough.config.hf import open_checkpoint
from bough.core.errors import ConfigError
from bough.distributed.mesh import Mesh
from bough.models.load import build_model

# case -> changes to it. One key-value head over two ranks: both hold it. A vocabulary of 131: the shares differ.
SPLITS = {
    "llama": {},
    "llama-tied-bias": {"num_key_value_heads": 1},
    "phi3": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
}


@pytest.mark.timeout(600)
def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    expected = {}
    for case, changes in SPLITS.items():
        expected[tmp_path / case] = logits_of(make_tiny(case, tmp_path / case, **changes))
    expected[tmp_path / "packed" / "tiny.gguf"] = logits_of(make_packed(tmp_path / "packed"))
    script = Path(__file__).with_name("tp_rank.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), "2", tmp_path / "meet", *expected], env=environment)
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=500) for rank in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    for path, logits in expected.items():
        for rank in range(2):
            actual = np.load(f"{path}.{rank}.npy")
            assert actual.shape == logits.shape
            assert np.abs(actual - logits).max() <= 1e-4, (path.name, rank)


def make_packed(folder: Path) -> torch.nn.Module:
    """A GGUF file whose blocks end at a rank's share of the attention output, and don't at that of the feed-forward."""
    reference = make_tiny("llama", folder, hidden_size=64, intermediate_size=96)
    config = json.loads((folder / "config.json").read_text())
    weights = write_gguf(folder, config, folder / "tiny.gguf", "Q4_1", {"v_proj": "Q8_0", "lm_head": "Q8_0"})
    reference.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    return reference


def logits_of(reference: torch.nn.Module) -> Any:
    with torch.no_grad():
        return torch.cat([reference(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]).numpy()


@pytest.mark.parametrize(("changes", "size", "what"), [({}, 3, "heads"), ({"intermediate_size": 81}, 2, "inner units")])
def test_a_mesh_that_does_not_divide_the_model_is_refused(
    changes: dict[str, int], size: int, what: str, tmp_path: Path
) -> None:
    make_tiny("llama", tmp_path, **changes)
    with pytest.raises(ConfigError, match=what) as caught:
        build_model(
            open_checkpoint(str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"), mesh=Mesh(0, size, None)
        )
    assert "--tp-size" in caught.value.fix
