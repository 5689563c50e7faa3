"""Every open setting of an engine, settled before a weight is loaded: by the engine itself, and by whoever asks what it
would do. Needs no torch in this process."""

from __future__ import annotations

from collections.abc import Callable

from bough.config.concerns import Config
from bough.config.hf import Checkpoint, checkpoint_of
from bough.config.pooling_facts import PoolingFacts
from bough.config.resolve import MachineFacts, Resolved, resolve
from bough.core.errors import ConfigError
from bough.engine.facts import machine_facts, plan_facts
from bough.engine.pooling import pooling_of, pooling_settings, without_kv
from bough.models.registry import module_of
from bough.platform import DeviceFacts
from bough.quantization.readable import refuse_unreadable


def decide(
    config: Config, facts: DeviceFacts, agreed: Callable[[MachineFacts], MachineFacts] | None = None
) -> tuple[Checkpoint, Resolved]:
    """Opens the checkpoint and settles every open setting; reads headers only. `agreed`: where others decide the same,
    the machine as all of them see it. Raises `ConfigError` where the model can't be served."""
    checkpoint = checkpoint_of(config.model)
    custom = config.device.custom_kernels and not config.device.safe_mode
    keep_packed = facts.kind == "cpu" and config.model.quantization != "none" and config.model.load_format != "dummy"
    machine = machine_facts(facts, custom_kernels=custom)
    if agreed is not None:
        machine = agreed(machine)
    planned = plan_facts(checkpoint, config.model.model, keep_packed=keep_packed)
    pooling = pooling_of(config, checkpoint)
    check_servable(config, checkpoint, pooling)
    if pooling is not None:
        config = pooling_settings(config, pooling, checkpoint, facts.kind)
        planned = without_kv(planned) if pooling.whole else planned
    return checkpoint, resolve(config, machine, planned)


def check_servable(config: Config, checkpoint: Checkpoint, pooling: PoolingFacts | None) -> None:
    """Raises `ConfigError` for what building the model would stumble over, so that whoever only asks hears of it, too."""
    if pooling is None:  # what pools is made of parts, which are looked up when it is built
        module_of(checkpoint.facts.architecture)
    if config.model.load_format != "dummy":
        refuse_unreadable(checkpoint)
    heads, ranks = checkpoint.facts.num_heads, config.parallel.tp_size
    if heads % ranks:
        raise ConfigError(
            what=f"{heads} attention heads can't be split over {ranks} ranks",
            why=f"{heads} is no multiple of {ranks}",
            fix="choose another --tp-size",
            param="tp_size",
        )
