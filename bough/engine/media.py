"""What an engine has of media: its limits, and the encoder that computes them."""

from __future__ import annotations

import torch

from bough.config.concerns import Config
from bough.config.memory_plan import MemoryPlan
from bough.config.model_facts import Cross, ModelFacts
from bough.config.step_memory import media_rows
from bough.core.errors import ConfigError
from bough.core.step import MediaLimits, RunnerLimits
from bough.distributed.mesh import LONE, Axis
from bough.layers.batch import Model
from bough.layers.decoder import Decoder
from bough.models.pooled import PooledModel
from bough.platform import Device
from bough.runner.encoder import TowerRunner


def media_limits(facts: ModelFacts, config: Config, plan: MemoryPlan) -> MediaLimits | None:
    """What the engine can hold of media; None: it takes text only."""
    tower, patches = facts.tower, config.media.mm_encoder_step_tokens
    if tower is None:
        return None
    assert isinstance(patches, int), "decided by now"
    if tower.atomic and config.parallel.attn_cp_size > 1:
        raise ConfigError(
            what="this model's images can't be served with contexts shared over ranks",
            why="tokens of an image see each other, wherever their KV is",
            fix="leave out --attn-cp-size, or start with --language-model-only",
            param="attn_cp_size",
        )
    return MediaLimits(
        num_rows=media_rows(plan.media_bytes, tower, config.model.dtype),
        step_tokens=patches,
        axes=max((len(rope.sections) for rope in facts.ropes if rope is not None), default=0),
        atomic=tower.atomic,
        fixed=max((mixer.positions for mixer in facts.mixers if isinstance(mixer, Cross)), default=0),
        required=tower.required,
        most_atomic=_prefilled_at_once(config) if tower.atomic else 0,
    )


def _prefilled_at_once(config: Config) -> int:
    """Tokens of a chunk."""
    size = config.scheduler.chunked_prefill_size
    assert isinstance(size, int), "decided by now"
    return size if size > 0 else 1 << 30


def encoder_of(
    model: Model, limits: RunnerLimits, dtype: torch.dtype, device: Device, sharing: Axis = LONE
) -> TowerRunner | None:
    """What computes media on this rank; None: nothing does. `sharing`: ranks that a step's media are spread over."""
    if limits.media is None or not isinstance(model, Decoder | PooledModel) or model.tower is None:
        return None
    return TowerRunner(model.tower, limits.media.num_rows, dtype, device.torch_device, sharing)
