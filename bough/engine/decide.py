"""Every open setting of an engine, settled before a weight is loaded: by the engine itself, and by commands that ask what it
would do. Needs no torch in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from bough.config.concerns import AUTO, Config
from bough.config.hf import Checkpoint, checkpoint_of
from bough.config.layout import Layout
from bough.config.model_facts import Cross, Gqa, Mla, ModelFacts, Moe
from bough.config.pooling_facts import PoolingFacts
from bough.config.resolve import Resolved, resolve
from bough.config.resolve_facts import MachineFacts
from bough.config.sharded import check_shards
from bough.config.shares import stage_layers
from bough.core.errors import ConfigError
from bough.engine.draft import Draft, draft_of, with_draft
from bough.engine.expert_plan import plan_experts
from bough.engine.facts import machine_facts, plan_facts
from bough.engine.pooling import pooling_of, pooling_settings, without_kv
from bough.models.registry import facts_of, module_of
from bough.platform import DeviceFacts
from bough.quantization.readable import rules_for


class Decided(NamedTuple):
    """What an engine will be."""

    checkpoint: Checkpoint
    facts: ModelFacts
    pooling: PoolingFacts | None
    resolved: Resolved
    draft: Draft | None = None


def decide(
    config: Config,
    device: DeviceFacts,
    agreed: Callable[[MachineFacts], MachineFacts] | None = None,
    checkpoint: Checkpoint | None = None,
) -> Decided:
    """Settles every open setting; reads headers only. `checkpoint`: that of the config, if it has been opened already.
    `agreed`: where others decide the same, the machine as all of them see it. Raises `ConfigError` where the model can't be
    served."""
    checkpoint = checkpoint or checkpoint_of(config.model)
    facts = facts_of(checkpoint.config, config.model.model_impl)
    custom = config.device.custom_kernels and not config.device.safe_mode
    machine = machine_facts(device, custom_kernels=custom)
    if agreed is not None:
        machine = agreed(machine)
    pooling = pooling_of(config, checkpoint, facts)
    planned = plan_facts(
        checkpoint,
        facts,
        config.model,
        on_cpu=device.kind == "cpu",
        layout=Layout.of(config.parallel),
        frees_windows=pooling is None,
    )
    check_servable(config, checkpoint, facts, pooling)
    if facts.through_transformers:
        # Modules with experts look at values on the host, which no graph can hold.
        config = replace(config, device=replace(config.device, cuda_graph=False))
    if pooling is not None:
        config = pooling_settings(config, pooling, checkpoint, facts, device.kind)
        planned = without_kv(planned) if pooling.whole else planned
    draft = draft_of(config, checkpoint, facts)
    planned = with_draft(planned, facts, draft, config, Layout.of(config.parallel), on_cpu=device.kind == "cpu")
    return Decided(checkpoint, facts, pooling, resolve(config, machine, planned), draft)


def _check_through_transformers(config: Config, pooling: PoolingFacts | None) -> None:
    if pooling is not None:
        raise ConfigError(
            what="a pooling model can't run through transformers",
            why="only models that generate do",
            fix="choose an architecture that bough implements (docs/models.md)",
            param="model_impl",
        )
    if config.parallel.tp_size > 1:
        raise ConfigError(
            what="a model that runs through transformers can't be split over ranks",
            why="its layers know nothing of them",
            fix="leave --tp-size out, or choose an architecture that bough implements (docs/models.md)",
            param="tp_size",
        )


def _does_not_work(flag: str, facts: ModelFacts, why: str) -> ConfigError:
    return ConfigError(
        what=f"{flag} does not work with {facts.architecture}",
        why=why,
        fix=f"leave {flag} out",
        param=flag.removeprefix("--").replace("-", "_"),
    )


def _check_stateful(config: Config, facts: ModelFacts, pooling: PoolingFacts | None) -> None:
    """What layers that keep a state can't do yet."""
    drafts, topk = config.speculative.speculative_algorithm, config.speculative.speculative_eagle_topk
    for asked, flag, why in (
        (
            drafts != "none" and topk not in (AUTO, 1),
            "--speculative-eagle-topk",
            "each branch of a tree would need a state of its own",
        ),
        (pooling is not None, "--is-embedding", "models that pool keep nothing between steps"),
    ):
        if asked:
            raise _does_not_work(flag, facts, f"some of its layers keep a state; {why}")


def _check_sparse(config: Config, facts: ModelFacts) -> None:
    """What models can't do whose queries read chosen tokens."""
    parallel = config.parallel
    if parallel.attn_cp_size > 1:
        raise ConfigError(
            what=f"--attn-cp-size does not work with {facts.architecture}",
            why="each query reads the best tokens of its whole context, of which a rank would have a part",
            fix="use --tp-size or --attn-dp-size instead",
            param="attn_cp_size",
        )
    layout = Layout.of(parallel)
    for stage in range(layout.pp):
        first = stage_layers(facts.num_layers, layout.pp, stage, layout.stage_sizes).start
        if facts.layers[first].shares_choice:
            raise ConfigError(
                what=f"a stage of the pipeline can't begin with layer {first} of {facts.architecture}",
                why="it reads the tokens that a layer before it chooses, on the same rank",
                fix="cut the stages elsewhere with --pp-layer-partition, or use --tp-size",
                param="pp_size",
            )


def _check_sharing(config: Config, facts: ModelFacts) -> None:
    """What models can't do whose layers read others' KV, or inputs that are made with the embeddings."""
    parallel = config.parallel
    for asked, flag, why in (
        (
            parallel.pp_size > 1,
            "--pp-size",
            "layers read what others keep, or what is made with the embeddings, on the same rank",
        ),
        (
            parallel.attn_cp_size > 1 and facts.shares_kv,
            "--attn-cp-size",
            "layers that read others' KV would have to gather it once more",
        ),
    ):
        if asked:
            raise ConfigError(
                what=f"{flag} does not work with {facts.architecture}",
                why=why,
                fix=f"use --tp-size instead of {flag}",
                param=flag.removeprefix("--").replace("-", "_"),
            )


def _check_cross(config: Config, facts: ModelFacts, pooling: PoolingFacts | None) -> None:
    """What layers that read media can't do yet."""
    parallel, drafts = config.parallel, config.speculative.speculative_algorithm
    one_step = "media are computed and written where the model begins, for all of its layers"
    for asked, flag, why in (
        (drafts != "none", "--speculative-algorithm", "drafts are made by what reads tokens alone"),
        (parallel.pp_size > 1, "--pp-size", one_step),
        (parallel.attn_dp_size > 1, "--attn-dp-size", one_step),
        (parallel.attn_cp_size > 1, "--attn-cp-size", "which rank keeps a position depends on its place among tokens"),
        (pooling is not None, "--is-embedding", "models that pool keep nothing between steps"),
    ):
        if asked:
            raise ConfigError(
                what=f"{flag} does not work with {facts.architecture}",
                why=f"its cross attention reads media; {why}",
                fix=f"leave {flag} out",
                param=flag.removeprefix("--").replace("-", "_"),
            )


def _check_adapters(config: Config, facts: ModelFacts, pooling: PoolingFacts | None) -> None:
    """What rows with adapters can't do yet."""
    for asked, flag, why in (
        (config.parallel.attn_dp_size > 1, "--attn-dp-size", "ranks don't say which adapter a gathered token has"),
        (pooling is not None, "--is-embedding", "steps of models that pool don't carry it"),
    ):
        if asked:
            raise _does_not_work(flag, facts, f"each of its requests has an adapter of its own, or none; {why}")


def _check_deep_features(config: Config, facts: ModelFacts) -> None:
    """Features that a tower adds after some of the first layers are on the first stage alone."""
    first = stage_layers(facts.num_layers, config.parallel.pp_size, 0, Layout.of(config.parallel).stage_sizes)
    if facts.deepstack > len(first):
        raise ConfigError(
            what=f"the first of {config.parallel.pp_size} stages has {len(first)} layers",
            why=f"{facts.architecture} adds features of images after each of the first {facts.deepstack}, which that stage "
            "alone computes",
            fix=f"choose a smaller --pp-size, or a --pp-layer-partition that begins with {facts.deepstack} or more",
            param="pp_size",
        )


def check_servable(config: Config, checkpoint: Checkpoint, facts: ModelFacts, pooling: PoolingFacts | None) -> None:
    """Raises `ConfigError` for what building the model would fail with, so that commands that only ask report it, too."""
    if facts.through_transformers:
        _check_through_transformers(config, pooling)
    elif pooling is None:  # what pools is made of parts, which are looked up when it is built
        module_of(facts.architecture)
    rules_for(checkpoint, config.model.quantization)
    if config.parallel.ep_size > 1 and not any(isinstance(layer.ffn, Moe) for layer in facts.layers):
        raise ConfigError(
            what=f"ep_size is {config.parallel.ep_size}, the model has no experts",
            why=f"{facts.architecture} is dense",
            fix="leave --ep-size out",
            param="ep_size",
        )
    experts = plan_experts(config.parallel, facts)
    if checkpoint.shards is not None:
        check_shards(checkpoint.shards, checkpoint.path, config.parallel, experts.slots)
    if facts.reads_media:
        _check_cross(config, facts, pooling)
    if facts.tower is not None:
        _check_deep_features(config, facts)
    if facts.adapters:
        _check_adapters(config, facts, pooling)
    stateful = [mixer for mixer in facts.mixers if not isinstance(mixer, Gqa | Mla | Cross)]
    if config.parallel.attn_cp_size > 1 and stateful:
        raise ConfigError(
            what=f"attn_cp_size is {config.parallel.attn_cp_size}, layers of {facts.architecture} keep a state",
            why=f"a state ({type(stateful[0]).__name__}) is of all tokens before: it can't be shared by position",
            fix="use --tp-size or --attn-dp-size instead",
            param="attn_cp_size",
        )
    if stateful:
        _check_stateful(config, facts, pooling)
    if facts.shares_kv or facts.per_layer is not None:
        _check_sharing(config, facts)
    if facts.topk:
        _check_sparse(config, facts)
    if config.model.dummy_routing == "uniform" and not any(isinstance(layer.ffn, Moe) for layer in facts.layers):
        raise ConfigError(
            what="dummy_routing is uniform, the model has no experts",
            why=f"{facts.architecture} is dense",
            fix="leave --dummy-routing out",
            param="dummy_routing",
        )
