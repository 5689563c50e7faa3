"""Checkpoint -> model on its device, weights loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from bough.config.concerns import DummyRouting, DummyWeights, ModelImpl
from bough.config.experts import PLAIN_EXPERTS, ExpertPlan
from bough.config.hf import Checkpoint
from bough.config.model_facts import ModelFacts
from bough.config.pooling_facts import PoolingFacts
from bough.distributed.mesh import SINGLE, Mesh
from bough.layers.adapters import Adapters
from bough.layers.batch import Model
from bough.layers.build import Build
from bough.layers.cpu_stack import use_cpu_stack
from bough.layers.decoder import Decoder
from bough.layers.moe import route_uniformly
from bough.layers.place import place_weights
from bough.layers.spread import TokenSpread
from bough.models.hosted import load_through_transformers
from bough.models.pooled import PooledModel, load_projections, pooled_architecture
from bough.models.registry import Architecture, facts_of, find_architecture
from bough.models.seeing import TOWER, is_of_adapter
from bough.quantization.choose import choose_scheme
from bough.quantization.names import weight_name
from bough.weights import mistral_names
from bough.weights.dummy import fill_dummy
from bough.weights.load import Progress, load_weights, trace_reads
from bough.weights.shards import TracedReads
from bough.weights.stored import Stored

_log = logging.getLogger(__name__)


def build_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    mesh: Mesh = SINGLE,
    load_format: str = "auto",
    quantization: str = "auto",
    context_length: int | None = None,
    seed: int = 0,
    dummy_weights: DummyWeights = "normal",
    dummy_routing: DummyRouting = "router",
    pooling: PoolingFacts | None = None,
    first_layer_table: bool = False,
    progress: Progress | None = None,
    model_impl: ModelImpl = "auto",
    experts_plan: ExpertPlan = PLAIN_EXPERTS,
    first_layer: int = 0,
    spread: TokenSpread | None = None,
) -> Model:
    """The model that `checkpoint` describes: this rank's share of it, on `device`.

    `context_length` bounds the sequences that will be computed (default: the model's own); `seed` is that of dummy weights,
    which are drawn as `dummy_weights` says, and route tokens as `dummy_routing` says. With `pooling` it is a `PooledModel`.
    `first_layer_table`: see `Decoder.look_up_first_layer`. `progress` hears how much has been read; dummy weights are not
    read. `model_impl`: see `ModelConfig`. `experts_plan`: where experts are, and how tokens reach them. `first_layer`: as in
    `Build`. `spread`: set before each step, where ranks hold different tokens.
    """
    facts = facts_of(checkpoint.config, model_impl)
    if facts.through_transformers:
        return load_through_transformers(checkpoint, facts, dtype, device, dummy=load_format == "dummy", seed=seed)
    architecture = _architecture(facts, pooling)
    dummy = load_format == "dummy" or checkpoint.kind == "config-only"
    build = Build(
        scheme=choose_scheme(checkpoint, quantization, device, architecture.weights, dummy=dummy),
        dtype=dtype,
        device=device,
        context_length=context_length or facts.max_context,
        mesh=mesh,
        experts_plan=experts_plan,
        first_layer=first_layer,
        spread=spread,
        adapters=_adapters(facts),
    )
    model: nn.Module = architecture.make(facts, build)
    place_weights(model)
    if dummy:
        fill_dummy(model, seed, dummy_weights)
        if dummy_routing == "uniform":
            route_uniformly(model, seed)
    else:
        load_weights(
            model,
            architecture.weights,
            checkpoint,
            progress,
            _names(checkpoint),
            left_out=_left_out(facts, pooling, mesh),
            rank=mesh.world.rank,
        )
        if isinstance(model, PooledModel):
            load_projections(model, checkpoint.path)
        if device.type == "cpu" and isinstance(model, Decoder):
            use_cpu_stack(model)
    if first_layer_table and not (isinstance(model, Decoder) and model.look_up_first_layer()):
        _log.warning("%s computes its first layer: nothing of it can be looked up", facts.architecture)
    model.eval()
    return model  # type: ignore[return-value]


def _adapters(facts: ModelFacts) -> Adapters | None:
    return Adapters(facts.adapters, built_in=facts.built_in_adapters) if facts.adapters else None


def _left_out(facts: ModelFacts, pooling: PoolingFacts | None, mesh: Mesh) -> Callable[[str], bool]:
    """Tells the names of slots that this rank is made without. A tower is where the first layers are."""
    if facts.tower is not None and mesh.pp.rank == 0:
        return lambda slot: False
    tower = TOWER if pooling is None else f"body.{TOWER}"
    has_adapters = bool(facts.adapters)
    return lambda slot: slot.startswith(tower) or (not has_adapters and is_of_adapter(slot))


def _architecture(facts: ModelFacts, pooling: PoolingFacts | None) -> Architecture:
    return find_architecture(facts.architecture) if pooling is None else pooled_architecture(facts, pooling)


def reads_of(
    checkpoint: Checkpoint,
    tensors: dict[str, Stored],
    *,
    dtype: torch.dtype,
    quantization: str = "auto",
    mesh: Mesh = SINGLE,
    experts_plan: ExpertPlan = PLAIN_EXPERTS,
    spread: TokenSpread | None = None,
) -> TracedReads:
    """What a rank reads of its checkpoint's `tensors` when `build_model` builds its share. Takes no memory for weights."""
    facts, device = facts_of(checkpoint.config), torch.device("meta")
    architecture = _architecture(facts, None)
    build = Build(
        scheme=choose_scheme(checkpoint, quantization, device, architecture.weights),
        dtype=dtype,
        device=device,
        context_length=1,
        mesh=mesh,
        experts_plan=experts_plan,
        spread=spread,
        adapters=_adapters(facts),
    )
    model = architecture.make(facts, build)
    place_weights(model)
    return trace_reads(
        model, architecture.weights, checkpoint, tensors, _names(checkpoint), _left_out(facts, None, mesh)
    )


def _names(checkpoint: Checkpoint) -> Callable[[str], str | None]:
    """How the checkpoint's names become those that model files know."""
    if checkpoint.is_consolidated:
        return mistral_names.hf_name
    return partial(weight_name, quantised=bool(checkpoint.quantization))
