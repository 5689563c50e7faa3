"""Two ranks over gloo give the logits of one, for architectures that split in different ways."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
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


def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    expected = {}
    for case, changes in SPLITS.items():
        reference = make_tiny(case, tmp_path / case, **changes)
        with torch.no_grad():
            rows = [reference(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
        expected[case] = torch.cat(rows).numpy()
    script = Path(__file__).with_name("tp_rank.py")
    folders = [str(tmp_path / case) for case in SPLITS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), "2", tmp_path / "meet", *folders], env=environment)
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=90) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    for case in SPLITS:
        for rank in range(2):
            actual = np.load(tmp_path / case / f"logits_{rank}.npy")
            assert actual.shape == expected[case].shape
            assert np.abs(actual - expected[case]).max() <= 1e-4, (case, rank)


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
