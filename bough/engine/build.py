"""Builds one rank of the engine from its configuration, and runs it: the order of start-up, on one screen.

Headers first, then the machine, then every open setting and the memory plan; weights only once all of that holds.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import to_builtins

from bough.cache.prefix import PrefixCache
from bough.config.concerns import Config
from bough.config.experts import PLAIN_EXPERTS, ExpertPlan
from bough.config.hf import Checkpoint
from bough.config.hosts import crew_of, nodes_of_ranks
from bough.config.kv_groups import held_layers, stage_groups, why_kv_stays
from bough.config.layout import Layout
from bough.config.lora_paths import names_of
from bough.config.memory_plan import MemoryPlan
from bough.config.model_facts import ModelFacts, Moe
from bough.config.pooling_facts import PoolingFacts
from bough.config.shares import uneven_heads
from bough.config.speculation import drafts_of_row, drafts_of_step
from bough.config.step_memory import KV_CODE_BITS, largest_step, num_snapshots
from bough.config.unproven import unproven
from bough.core.errors import ConfigError
from bough.core.media import MediaKind
from bough.core.messages import ToEngine
from bough.core.speech import SPEECH_RULES
from bough.core.step import NO_PROPOSER, Runner, RunnerLimits
from bough.distributed.join import join_mesh
from bough.distributed.mesh import LONE, SINGLE, Axis, Mesh
from bough.distributed.shared_memory import Patience
from bough.engine.agree import agree, part_of
from bough.engine.attention import attention_factory, span_costs
from bough.engine.decide import Decided, decide
from bough.engine.draft_trial import try_drafts
from bough.engine.dtypes import DTYPES
from bough.engine.early import Early
from bough.engine.expert_balance import BalanceRules, ExpertBalancer, has_mixtures
from bough.engine.expert_plan import plan_experts
from bough.engine.first_start import note_compiled
from bough.engine.grammars import grammars_of
from bough.engine.held import RankMemory, exchange, of_rank
from bough.engine.inbox import MessageSource as Requests
from bough.engine.lockstep import Agreement, LockstepInbox, LockstepRunner, open_company
from bough.engine.loop import Loop
from bough.engine.media import encoder_of, media_limits
from bough.engine.outbox import open_outbox
from bough.engine.pipeline import PipelineRunner, open_outcomes, open_sink, run_stage, sampling_rank
from bough.engine.places import device_index, orders_devices, sharing
from bough.engine.pooling import pooling_limits, ready_pooling
from bough.engine.speculation import LoadedDraft, corpora_of, drafter_of, load_draft, rule_of, tree_of
from bough.engine.step_channels import StepChannel, StepSource, open_channel, open_source
from bough.engine.watch import observe
from bough.engine.worker import BroadcastRunner, ToWorker, run_worker
from bough.ipc import EngineStatus, Inbox, Launch, read_checkpoint, write_status
from bough.ipc.features import open_features
from bough.ipc.store import Store
from bough.kernels.ahead import finish as finish_compiling, read_triton
from bough.kernels.cpu_build import forbid_custom_kernels
from bough.layers.batch import Model, attention_specs
from bough.layers.decoder import Decoder
from bough.layers.spread import TokenSpread
from bough.layers.states import state_inputs, state_shapes
from bough.memory.mha import KVPool, KVShape
from bough.memory.states import StatePool
from bough.models.load import build_model
from bough.models.pooled import PooledModel
from bough.platform import Device
from bough.platform.processor import can_wait_busily
from bough.platform.topology import device_order
from bough.quantization.kv_scales import KvScales, find_kv_scales
from bough.quantization.readable import rules_for
from bough.runner.compiling import compile_ahead
from bough.runner.context import ContextShare
from bough.runner.graphs import Extents
from bough.runner.model_runner import ModelRunner
from bough.runner.moves import Mover
from bough.runner.pooling import PoolingRunner
from bough.runner.rehearsal import rehearsals
from bough.sampler.processors import load_processors
from bough.sampler.speech import speech_rules
from bough.scheduler.limits import Limits
from bough.scheduler.media import MediaAccount
from bough.scheduler.queues import Queues
from bough.speculative.device import DeviceDrafter
from bough.weights.load import Progress

_log = logging.getLogger(__name__)

_TELL_EVERY_S = 0.2
WARM_STEPS = ((1, 1), (8, 8), (64, 64), (256, 256), (64, 1), (256, 8), (192, 64), (512, 65))
"""Steps (tokens, rows) whose graphs are captured before the engine is ready: decode sizes, and small extends..."""
LATER_GRAPHS = (2, 4, 16, 32, 128)
"""...and decode sizes captured in its first idle moments..."""
SHARED_GRAPHS = (64, 256)
"""...and then those of decode rows that share a prefix. All others are captured when wanted."""

SPIN_S = 0.002
"""A wait for requests begins busily for this long: waking up takes longer than most of a request's way through the host."""


@dataclass(slots=True)
class StartUp:
    """Tells the launcher how far the engine has come, and how long each phase took. A scheduler's first rank does so."""

    launch: Launch
    tells: bool
    phases: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str, progress: float, until: float = 1.0) -> Iterator[Progress]:
        """A phase that begins at `progress` of the whole. What it gives hears of bytes, on the way to `until`."""
        begin = shown_s = time.perf_counter()

        def tell(done_bytes: int, total_bytes: int) -> None:
            nonlocal shown_s
            now = time.perf_counter()
            if self.tells and (now - shown_s >= _TELL_EVERY_S or done_bytes == total_bytes):
                shown_s = now
                reached = progress + (until - progress) * done_bytes / max(1, total_bytes)
                self._write(name, reached, done_bytes, total_bytes)

        if self.tells:
            self._write(name, progress)
        yield tell
        self.phases[name] = round(time.perf_counter() - begin, 3)

    def _write(self, name: str, progress: float, done_bytes: int = 0, total_bytes: int = 0) -> None:
        status = EngineStatus(
            phase="loading", detail=name, progress=progress, done_bytes=done_bytes, total_bytes=total_bytes
        )
        write_status(self.launch.endpoints, status)

    def ready(self, facts: dict[str, Any]) -> None:
        _log.info("ready: %s", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases.items()))
        write_status(self.launch.endpoints, EngineStatus(phase="ready", facts=facts | {"startup_s": self.phases}))


def run_rank(launch: Launch, rank: int, early: Early, importing_s: float) -> None:
    """The whole life of one engine rank, once this module is imported."""
    layout = Layout.of(launch.config.parallel)
    parallel = launch.config.parallel
    crew = crew_of(parallel, rank)
    start = StartUp(launch, rank == crew[0], {"importing the engine": round(importing_s, 3)})
    with start.phase("reading the checkpoint's headers", 0.05):
        store = meeting_place(launch) if layout.size > 1 else None
        agreed = None
        if store is not None:
            agreed = partial(agree, store=store, rank=rank, num_ranks=layout.size, sharing=sharing(launch))
        elif parallel.dp_size > 1:
            agreed = partial(part_of, sharing=sharing(launch))
        decided = decide(launch.config, early.facts(), agreed, read_checkpoint(launch.server))
    checkpoint, facts, pooling, resolved, draft = decided
    config = resolved.config
    if not config.device.custom_kernels:
        forbid_custom_kernels()
    if rank == 0:
        for line in resolved.lines():
            _log.debug("decided: %s", line)
        _log.debug("memory plan:\n%s", resolved.plan.table())
        uneven = uneven_heads(facts, layout)
        for line in (*([uneven] if uneven else []), *unproven(parallel, config.device.device)):
            _log.warning("%s", line)
        if config.device.device == "cuda" and orders_devices(launch):
            order = device_order()
            _log.info("ranks get GPUs %s: %s", ", ".join(map(str, order.devices)), order.because)
    with start.phase("preparing the device", 0.1):
        if config.device.device == "cuda" and config.device.custom_kernels:
            read_triton()
        device = open_device(config, device_index(launch, rank))
        mesh, patience = SINGLE, Patience(parallel.dist_timeout_s)
        if store is not None:
            mesh = join_mesh(
                layout, rank, store,
                device=device.torch_device, hosts=nodes_of_ranks(parallel), patience=patience,
                timeout_s=parallel.dist_timeout_s, say=_log.info if rank == 0 else None,
                peer_sums=parallel.custom_all_reduce,
            )  # fmt: skip
    with start.phase("loading weights", 0.2, until=0.8) as tell:
        experts = plan_experts(parallel, facts)
        spread = TokenSpread(mesh) if mesh.tokens.size > 1 else None
        model = load_model(checkpoint, config, resolved.plan, device, mesh, pooling, tell, experts, spread)
        drafts = None if draft is None else load_draft(draft, model, config, resolved.plan, device, mesh, facts)
    with start.phase("laying out memory", 0.8):
        scales = kv_scales(checkpoint, config, facts, rank)
        runner = make_runner(
            model, config, resolved.plan, device, facts, pooling, scales, drafts, mesh.cp, mesh.replica
        )
    assert isinstance(model, torch.nn.Module)
    balancer = balance_rank(runner, model, mesh, config, facts) if experts.records else None
    states = runner.states if isinstance(runner, ModelRunner) else None
    held = exchange(of_rank(rank, model, runner.pool, states), store, layout.size)
    with start.phase("finding kernels", 0.85):
        done = partial(note_compiled, launch.config, early.facts().name)
        find_kernels(runner, config, done)
    with start.phase("warming up", 0.9):
        warm_up(runner, config)
    # What start-up leaves behind stays: no collection needs to look at it.
    gc.freeze()
    gc.enable()
    with torch.inference_mode():  # once: steps that find it on are launched sooner
        if rank == crew[0]:
            others, outcomes, company = None, None, None
            if store is not None and len(crew) > 1:
                others = open_channel(store, launch.endpoints, parallel, launch.generation, rank)
                if layout.pp > 1:
                    outcomes = open_outcomes(store, launch.endpoints, parallel, others)
            if store is not None and spread is not None:
                assert isinstance(runner, ModelRunner), "pooling models have one scheduler"
                company = open_company(launch, layout, rank, store, mesh, runner, spread, others, patience)
            serve_steps(launch, start, decided, runner, others, held, patience, outcomes, balancer, company)
        else:
            assert store is not None, "a lone rank is the first of its crew"
            source = open_source(
                store, launch.endpoints, parallel, rank, ToWorker, launch.generation, spin_s=_spin_s(device)
            )
            if layout.pp == 1:
                run_worker(source, runner, patience, spread)
            else:
                assert isinstance(runner, ModelRunner), "pooling models have no stages"
                sink = open_sink(store, launch.endpoints, source) if rank == sampling_rank(parallel) else None
                run_stage(source, runner, patience, sink)


def meeting_place(launch: Launch) -> Store:
    """Where this rank meets the others."""
    parallel = launch.config.parallel
    return Store(
        launch.meeting,
        secret=parallel.dist_secret,
        generation=launch.generation,
        timeout_s=parallel.dist_timeout_s,
    )


def open_device(config: Config, rank: int) -> Device:
    kind = config.device.device
    assert kind != "auto", "the device is decided by now"
    threads = config.device.cpu_threads
    return Device(kind, rank if kind == "cuda" else 0, threads=threads if isinstance(threads, int) else None)


def graph_tokens(config: Config) -> int:
    """Tokens of the largest graph; 0: none are captured."""
    most = config.device.cuda_graph_max_tokens
    assert isinstance(most, int), "decided by now"
    return most if config.device.cuda_graph else 0


def load_model(
    checkpoint: Checkpoint,
    config: Config,
    plan: MemoryPlan,
    device: Device,
    mesh: Mesh,
    pooling: PoolingFacts | None = None,
    progress: Progress | None = None,
    experts_plan: ExpertPlan = PLAIN_EXPERTS,
    spread: TokenSpread | None = None,
) -> Model:
    return build_model(
        checkpoint,
        dtype=DTYPES[config.model.dtype],
        device=device.torch_device,
        mesh=mesh,
        load_format=config.model.load_format,
        quantization=config.model.quantization,
        context_length=plan.context_length,
        seed=config.model.seed,
        dummy_weights=config.model.dummy_weights,
        dummy_routing=config.model.dummy_routing,
        pooling=pooling,
        first_layer_table=config.model.first_layer_table == "on",
        progress=progress,
        model_impl=config.model.model_impl,
        experts_plan=experts_plan,
        spread=spread,
    )


def kv_scales(checkpoint: Checkpoint, config: Config, facts: ModelFacts, rank: int) -> KvScales:
    """Of keys and values that are cached in 8 bits, as rank `rank` reads them; none for others."""
    if not config.model.kv_cache_dtype.startswith("fp8"):
        return KvScales()
    if config.model.calculate_kv_scales:  # 1 until the first prompts come
        return KvScales((1.0,) * len(facts.kv_mixers), (1.0,) * len(facts.kv_mixers))
    return find_kv_scales(checkpoint, len(facts.kv_mixers), config.model.quantization_param_path, rank)


def make_runner(
    model: Model,
    config: Config,
    plan: MemoryPlan,
    device: Device,
    facts: ModelFacts,
    pooling: PoolingFacts | None = None,
    scales: KvScales | None = None,
    drafts: LoadedDraft | None = None,
    sharing_context: Axis = LONE,
    same_requests: Axis = LONE,
) -> ModelRunner | PoolingRunner:
    """The runner of one rank, with its memory. `sharing_context`: ranks that share the KV of sequences; `same_requests`:
    ranks that run the same steps."""
    assert isinstance(model, torch.nn.Module)
    stages, stage = (model.pp.size, model.pp.rank) if isinstance(model, Decoder) else (1, 0)
    if stages != config.parallel.pp_size:
        raise ConfigError(
            what=f"{facts.architecture} can't be cut into {config.parallel.pp_size} stages",
            why="it is not made of blocks that bough runs one by one",
            fix="use --tp-size instead of --pp-size",
            param="pp_size",
        )
    held = held_layers(facts, Layout.of(config.parallel), stage)
    whole = pooling is not None and pooling.whole
    page_size = plan.page_size
    num_pages = plan.num_pages + 1  # page 0 is never allocated
    _check_room(plan, device)
    specs = [] if whole else attention_specs(model)
    ropes = facts.ropes[held.start : held.stop]
    scales = (scales or KvScales()).held(held)
    if drafts is not None:  # whose layers come behind the model's
        held = range(held.start, held.stop + len(drafts.facts.model.kv_mixers))
        specs, ropes = specs + attention_specs(drafts.network), ropes + drafts.facts.model.ropes
    own = len(specs) if drafts is None else len(specs) - len(drafts.facts.model.kv_mixers)
    drafted_dtype = DTYPES.get(config.speculative.speculative_draft_kv_cache_dtype)
    shapes = [KVShape.of(spec, drafted_dtype if at >= own else None) for at, spec in enumerate(specs)]
    scales = scales.padded(len(specs))
    values = [
        k if spec.latent else v for spec, k, v in zip(specs, scales.keys, scales.values, strict=bool(scales.keys))
    ]
    kv_dtype = DTYPES[config.model.kv_cache_dtype]
    backend = config.device.attention_backend
    attend = attention_factory(backend, device.torch_device)
    context = ContextShare(sharing_context, attend) if sharing_context.size > 1 else None
    # Each of the ranks that share contexts keeps its part of every page.
    kept = page_size // sharing_context.size
    groups = stage_groups(plan.groups, held)
    bits = KV_CODE_BITS.get(config.model.kv_cache_dtype, 0)
    pool = KVPool(shapes, num_pages, kept, kv_dtype, device.torch_device, scales.keys, values, groups, bits)
    device.reserve(plan.activation_bytes)
    running = config.scheduler.max_running_requests
    chunk, unwatched = config.scheduler.chunked_prefill_size, config.scheduler.unwatched_prefill_size
    assert isinstance(running, int)
    assert isinstance(chunk, int)
    assert isinstance(unwatched, int)
    step_tokens = largest_step(chunk, unwatched, plan.context_length, running)
    if whole:
        step_tokens = max(running, chunk)  # `pooling_settings` has seen to it that a text fits
    limits = RunnerLimits(
        num_slots=running,
        num_pages=num_pages,
        page_size=page_size,
        pages_per_slot=-(-plan.context_length // page_size),
        context_length=plan.context_length,
        max_step_tokens=step_tokens,
        vocab_size=facts.vocab,
        kv_stays=why_kv_stays(facts, groups, shares_context=context is not None),
        groups=groups,
        num_snapshots=num_snapshots(running) if facts.state_mixers and pooling is None else None,
        spans=span_costs(backend, specs, bits / 8 or kv_dtype.itemsize) if specs and context is None else None,
        media=media_limits(facts, config, plan),
        num_adapters=len(facts.adapters),
    )
    sharing_media = same_requests if config.media.mm_enable_dp_encoder else LONE
    encoder = encoder_of(model, limits, DTYPES[config.model.dtype], device, sharing_media)
    if pooling is not None:
        assert isinstance(model, PooledModel)
        if whole:
            attend = attention_factory("whole", device.torch_device)
        return PoolingRunner(model, pooling, pool, limits, attend, device, encoder)
    runner = ModelRunner(
        model,
        pool,
        limits,
        attend,
        device,
        graph_max_tokens=graph_tokens(config) if stages == 1 else 0,
        processors=load_processors(config.model.logit_processors),
        readers={SPEECH_RULES: speech_rules} if facts.tower is not None and facts.tower.required else {},
        mover=Mover(pool, ropes, plan.context_length, device.torch_device),
        samples=stage == stages - 1,
        proposer=None if drafts is None else drafts.proposer,
        most_drafts=drafts_of_row(config.speculative) if drafts is not None else 0,
        tree_width=0 if drafts is None or (tree := tree_of(config.speculative)) is None else tree.steps + 1,
        encoder=encoder,
        states=states_pool(model, limits, device, drafts_of_row(config.speculative)),
        context=context,
        cross=attention_factory(backend, device.torch_device) if facts.reads_media else None,
        rule=rule_of(config.speculative),
        measures_scales=config.model.calculate_kv_scales and bool(specs),
    )
    if config.log.tensor_dump_dir and config.parallel.tp_size > 1:
        runner.forward.narrows = False  # rank 0 sees whole layers of some steps, and does not tell the others of which
    if config.parallel.attn_dp_size > 1 or context is not None:
        runner.forward.narrows = False  # replicas agree on one number of tokens for all layers
    return runner


def states_pool(model: torch.nn.Module, limits: RunnerLimits, device: Device, most_drafts: int) -> StatePool | None:
    """For the states of layers that keep one; None: there are none. `most_drafts`: of a row."""
    if limits.num_snapshots is None:
        return None
    return StatePool(
        state_shapes(model),
        limits.num_slots,
        limits.num_snapshots,
        device.torch_device,
        inputs=state_inputs(model),
        most_drafts=most_drafts,
    )


def balance_rank(
    runner: ModelRunner | PoolingRunner, model: Model, mesh: Mesh, config: Config, facts: ModelFacts
) -> ExpertBalancer | None:
    """Counts tokens by expert on this rank from now on, and moves experts if that was asked for."""
    mixtures = [layer.ffn for layer in facts.layers if isinstance(layer.ffn, Moe)]
    if not isinstance(runner, ModelRunner) or not isinstance(model, torch.nn.Module) or not has_mixtures(model):
        return None  # a stage may have none
    groups = max(mixture.scored.groups if mixture.scored is not None else 1 for mixture in mixtures)
    rules = BalanceRules.of(config.parallel)
    balancer = ExpertBalancer(model, mesh.tokens, rules, groups=groups, num_nodes=config.parallel.nnodes)
    runner.before_step = balancer.before_step
    return balancer


def _check_room(plan: MemoryPlan, device: Device) -> None:
    """The plan was made from headers; now the weights are really there."""
    if not device.is_async:
        return
    free, _ = device.free_bytes()
    if plan.kv_bytes + plan.activation_bytes > free:
        raise ConfigError(
            what=f"the KV cache needs {plan.kv_bytes / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free after loading",
            why="the weights took more than their headers promised, or another process took memory meanwhile",
            fix="free the device, or start with a smaller --mem-fraction-static",
        )


def find_kernels(runner: ModelRunner | PoolingRunner, config: Config, done: Callable[[], None]) -> None:
    """Has compilers make what `warm_up` and later steps launch, where some were started. `done` is called if and when all
    of it is made."""
    if runner.graphs is None or not isinstance(runner, ModelRunner) or runner.measures_scales:
        finish_compiling()
        return
    most = min(graph_tokens(config), runner.limits.num_slots)
    compile_ahead(runner, _warm_steps(config, runner, most), most)
    finish_compiling(done)


def warm_up(runner: ModelRunner | PoolingRunner, config: Config) -> None:
    """Captures what the first request needs, and notes what the next ones will."""
    if runner.graphs is not None and isinstance(runner, ModelRunner) and runner.measures_scales:
        _log.info("no graphs are captured before the first prompt, which scales of keys and values are taken from")
    elif runner.graphs is not None:
        most = min(graph_tokens(config), runner.limits.num_slots)
        with torch.inference_mode():
            runner.graphs.warm_up(_warm_steps(config, runner, most))
        if isinstance(runner, ModelRunner):
            runner.copies.capture()
        runner.graphs.want([size for size in LATER_GRAPHS if size <= most])
        runner.graphs.want([size for size in SHARED_GRAPHS if size <= most], shared=True)
        for step in rehearsals(runner.limits):
            runner.launch(step).wait()


def _warm_steps(config: Config, runner: ModelRunner | PoolingRunner, most: int) -> list[Extents]:
    """Steps of at most `most` rows whose graphs are captured first; with those that verify drafts, where some are made."""
    drafts = drafts_of_row(config.speculative)
    proposals = drafts if isinstance(runner, ModelRunner) and runner.forward.proposer is not None else NO_PROPOSER
    steps = [
        Extents(tokens, rows, rows, max_query=1 if rows == tokens else tokens, proposals=proposals)
        for tokens, rows in WARM_STEPS
        if rows <= most
    ]
    if proposals > 0:
        width = 1 + drafts
        steps += [
            Extents(rows * width, rows, rows * width, width, width, proposals)
            for tokens, rows in WARM_STEPS
            if rows == tokens and rows * width <= graph_tokens(config) and rows <= most
        ]
    if runner.limits.num_adapters:
        steps += [step._replace(adapted=True) for step in steps if step.max_query == step.width]
    return steps


def serve_steps(
    launch: Launch,
    start: StartUp,
    decided: Decided,
    local: ModelRunner | PoolingRunner,
    others: StepChannel | None,
    held: Sequence[RankMemory],
    patience: Patience,
    outcomes: StepSource | None = None,
    balancer: ExpertBalancer | None = None,
    company: tuple[LockstepRunner, Agreement] | None = None,
) -> None:
    """Rank 0: takes requests until it is asked to stop. `others`: the way to the other ranks, if there are any; `held`: what
    each rank has loaded; `patience`: how long this one waits for the others; `outcomes`: what the last stage samples, if
    there are stages; `company`: the other schedulers, if there are replicas of attention."""
    checkpoint, resolved = decided.checkpoint, decided.resolved
    config, endpoints = resolved.config, launch.endpoints
    runner: Runner = local
    broadcast: BroadcastRunner | PipelineRunner | None = None
    if others is not None and outcomes is not None:
        assert isinstance(local, ModelRunner), "pooling models have no stages"
        runner = broadcast = PipelineRunner(local, others, outcomes, patience)
    elif company is not None:
        runner = company[0]
    elif others is not None:
        runner = broadcast = BroadcastRunner(local, others, patience)
    inbox: Requests = Inbox(endpoints.engine, ToEngine, spin_s=_spin_s(local.machine))
    if company is not None:
        inbox = LockstepInbox(inbox, company[1])
    drafts = drafts_of_step(config.speculative, local.machine.kind, local.limits.num_slots)
    limits = Limits.of(local.limits, config.scheduler, max_step_drafts=drafts, seed=config.model.seed)
    parallel = config.parallel
    if parallel.pp_size > 1:
        limits = replace(limits, num_stages=parallel.pp_size, micro_batch=parallel.pp_max_micro_batch_size)
    if isinstance(local, PoolingRunner):
        limits = pooling_limits(limits, local.limits, local.pooling)
    cache = PrefixCache(
        num_pages=limits.num_pages,
        layout=limits.layout,
        policy=config.cache.radix_eviction_policy,
        enabled=config.cache.radix_cache,
        num_snapshots=limits.num_snapshots,
    )
    queues = Queues(limits, grammars_of(config, checkpoint, limits.vocab_size))
    if local.limits.media is not None:
        queues.media = MediaAccount(local.limits.media, open_features)
    drafter = drafter_of(config, limits, decided)
    queues.drafter = drafter
    computes_here = runner is local and not local.machine.is_async
    if computes_here and isinstance(local, ModelRunner) and isinstance(drafter, DeviceDrafter):
        try_drafts(local, drafter)
    if config.log.tensor_dump_dir:
        runner = _dumping(runner, local, queues, config)
    runner, watch = observe(
        runner, config, launch, queues, cache, local.machine, local.idle if runner is local else None
    )
    hooks = watch.hooks()
    hooks.corpus = corpora_of(drafter)
    if balancer is not None:
        hooks.experts = balancer.record
        hooks.extra_info = lambda: {"experts": balancer.info()}
        watch.watch_experts(balancer)
    loop = Loop(
        runner=runner,
        queues=queues,
        cache=cache,
        limits=limits,
        inbox=inbox,
        outbox=open_outbox(launch),
        depth=steps_in_flight(config),
        hooks=hooks,
        # A CPU computes steps in this very thread, whose own time does not depend on what else the machine does.
        step_clock=time.thread_time if computes_here else None,
        report_every_s=config.log.decode_log_interval_s,
        report_every_steps=config.log.decode_log_interval,
        company=None if company is None else company[0],
    )
    watch.follow(loop)
    processors = local.shaper.names if isinstance(local, ModelRunner) else []
    ranks = [to_builtins(each) for each in held]
    start.ready({**ready_facts(decided, local.limits), "logit_processors": processors, "ranks": ranks})
    try:
        loop.run()
        if company is not None:
            company[0].stop(inbox)
    finally:
        if broadcast is not None:
            broadcast.stop()


def steps_in_flight(config: Config) -> int:
    """Steps that may be computed while the next one is planned."""
    parallel = config.parallel
    if parallel.pp_size > 1:
        return parallel.pp_size - 1 + parallel.pp_async_batch_depth
    return 1 if config.scheduler.overlap_schedule else 0


def _spin_s(device: Device) -> float:
    """How long the loop waits busily for the next request once it has nothing to do. Never where the cores compute."""
    return SPIN_S if device.is_async and can_wait_busily() else 0.0


def _dumping(runner: Runner, local: ModelRunner | PoolingRunner, queues: Queues, config: Config) -> Runner:
    if not isinstance(local, ModelRunner):
        raise ConfigError(
            what="tensors can't be dumped",
            why="the model pools",
            fix="leave out --tensor-dump-dir",
            param="tensor_dump_dir",
        )
    from bough.engine.tensors import DumpingRunner

    directory = Path(config.log.tensor_dump_dir).expanduser()
    return DumpingRunner(runner, local, queues, directory, several_ranks=config.parallel.tp_size > 1)


def media_kinds(facts: ModelFacts, pooling: PoolingFacts | None) -> tuple[MediaKind, ...]:
    """What prompts may have beside text."""
    if pooling is not None:
        return pooling.media
    return () if facts.tower is None else facts.tower.kinds


def weight_format(checkpoint: Checkpoint, config: Config) -> str:
    """How weights are quantised, in a few words; empty: they are not, or are GGUF's blocks."""
    rules = rules_for(checkpoint, config.model.quantization)
    if rules is None:
        return ""
    return rules.summary if config.model.quantization != "none" else f"{rules.summary}, dequantised"


def ready_facts(decided: Decided, limits: RunnerLimits) -> dict[str, Any]:
    """What the other processes and `/server_info` may know."""
    checkpoint, facts, pooling, resolved, _ = decided
    plan, parallel = resolved.plan, resolved.config.parallel
    return {
        "model": checkpoint.name,
        "architecture": facts.architecture,
        "num_parameters": facts.num_parameters(),
        "context_length": limits.context_length,
        "vocab_size": limits.vocab_size,
        "kv_tokens": plan.kv_tokens,
        "page_size": limits.page_size,
        "max_running_requests": limits.num_slots,
        "eos_ids": list(checkpoint.eos_ids),
        "device": resolved.config.device.device,
        "dtype": resolved.config.model.dtype,
        "weight_format": weight_format(checkpoint, resolved.config),
        "kv_cache_dtype": resolved.config.model.kv_cache_dtype,
        "kv_join": resolved.config.cache.radix_cache and pooling is None and not limits.kv_stays,
        "media": list(media_kinds(facts, pooling)),
        "adapters": names_of(facts.config),
        "media_width": facts.tower.width if facts.tower is not None else 0,
        "score_items": pooling is None and facts.takes_items and parallel.pp_size == parallel.attn_cp_size == 1,
        "decisions": resolved.lines(),
        "memory": [list(row) for row in plan.rows()],
        "memory_table": plan.table(),
        **ready_pooling(pooling, checkpoint),
    }
