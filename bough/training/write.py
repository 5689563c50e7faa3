"""Writes a trained head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bough.core.errors import ConfigError
from bough.training.heads import TOKEN_MAP, Trainee


def check_out(out: Path) -> None:
    """Raises `ConfigError` if it is there already."""
    if out.exists():
        raise ConfigError(
            what=f"{out} is there already", why="nothing is overwritten", fix="name a directory that does not exist yet"
        )


def write_head(trainee: Trainee, out: Path, report: dict[str, Any]) -> int:
    """Fills the new directory `out`: weights in bfloat16, a config, and how it was made (`training.json`). Returns the
    weights' bytes."""
    out.mkdir(parents=True)
    tensors = {
        name: (each.to(torch.bfloat16) if each.is_floating_point() else each).contiguous().cpu()
        for name, each in trainee.stored().items()
    }
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(trainee.config(), indent=2) + "\n")
    if trainee.tokens.is_shared:
        ids_V = trainee.tokens.ids_V
        assert ids_V is not None, "some tokens only"
        (out / TOKEN_MAP).write_text(json.dumps(ids_V.tolist()) + "\n")
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    return sum(each.numel() * each.element_size() for each in tensors.values())
