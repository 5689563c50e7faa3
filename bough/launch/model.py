"""The model of a configuration: where it lies, downloaded if need be, and what `--auto-parallel` makes of it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

from bough.config.concerns import Config, ParallelConfig
from bough.config.hf import Checkpoint, checkpoint_of
from bough.config.served_names import with_own_name
from bough.platform.facts import detect

_log = logging.getLogger(__name__)


def located(config: Config, progress: Callable[[int, int], None] | None = None) -> tuple[Config, Checkpoint]:
    """The config with a hub id replaced by where it lies, so that no child asks the hub, and the checkpoint there, with its
    headers. Downloads it if need be. With `--auto-parallel`, the sizes are those that were chosen.

    `progress` hears of bytes downloaded, and of bytes in all.
    """
    model = config.model
    checkpoint = checkpoint_of(model, progress)
    if config.parallel.auto_parallel:
        config = dataclasses.replace(config, parallel=_chosen(config, checkpoint))
    if not model.model or Path(model.model).expanduser().exists():
        return config, checkpoint
    names = with_own_name(model.served_model_name, model.model)
    named = dataclasses.replace(model, model=str(checkpoint.path), served_model_name=names)
    return dataclasses.replace(config, model=named), checkpoint


def _chosen(config: Config, checkpoint: Checkpoint) -> ParallelConfig:
    """What `--auto-parallel` has decided on."""
    from bough.engine.auto_parallel import choose_parallel

    chosen = choose_parallel(config, detect(config.device.device), checkpoint)
    for line in chosen.because:
        _log.info("--auto-parallel: %s", line)
    return chosen.parallel
