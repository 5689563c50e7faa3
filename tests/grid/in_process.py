"""The engine's real parts (scheduler, cache, runner, model) in one process, turned by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from drafting import Answers, drafter

from bough.cache.prefix import PrefixCache
from bough.config.concerns import EvictionPolicy
from bough.config.kv_groups import cut_evenly
from bough.core.grammar import GrammarQueue
from bough.core.kv import Fixed, Grows, KvGroup, KvLayout, Lifetime, Window, order
from bough.core.media import MediaItem
from bough.core.messages import (
    End,
    Generate,
    LogprobSpec,
    Pause,
    Resume,
    ToDetokenizer,
    ToEngine,
    TokenLogprobs,
    Tokens,
    pack_ids,
    unpack_ids,
)
from bough.core.sampling import SamplingParams
from bough.core.speech import SPEECH_RULES
from bough.core.step import MediaLimits, RunnerLimits, SpanCosts
from bough.engine.attention import attention_factory
from bough.engine.loop import Loop
from bough.layers.attention import Attention
from bough.layers.batch import AttentionSpec, Model, attention_specs
from bough.layers.decoder import Decoder
from bough.layers.states import state_inputs, state_shapes
from bough.memory.mha import KVPool, KVShape
from bough.memory.states import StatePool
from bough.platform import Device
from bough.runner.accepting import AcceptRule
from bough.runner.encoder import TowerRunner
from bough.runner.model_runner import ModelRunner
from bough.runner.proposing import Proposer
from bough.sampler.speech import speech_rules
from bough.scheduler.limits import Limits
from bough.scheduler.media import MediaAccount
from bough.scheduler.queues import Queues


class DraftsOnDevice(NamedTuple):
    """A proposer, and the network whose layers keep KV behind the model's."""

    proposer: Proposer
    network: torch.nn.Module
    tree_width: int = 0


GREEDY = SamplingParams(temperature=0.0, max_new_tokens=64)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way of running the engine."""

    page_size: int = 16
    chunk_tokens: int = 512
    overlap: bool = True
    radix_cache: bool = True
    attention: str = "torch"
    shared_spans: bool = True
    stream: bool = True
    num_pages: int = 0
    """0: room for everything."""
    context_length: int = 256
    policy: str = "fcfs"
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    """None: `dtype`."""
    draft_kv_dtype: torch.dtype | None = None
    """Of what drafts; None: `kv_dtype`."""
    code_bits: int = 0
    """Of the codes that keys and values are kept as; 0: floats."""
    k_scales: Sequence[float] = ()
    v_scales: Sequence[float] = ()
    measures_scales: bool = False
    """Scales are taken from the first prompts."""
    device: str = "cpu"
    graphs: bool = False
    num_slots: int = 8
    priority: bool = False
    """Requests' priorities count, and preempt."""
    eviction: EvictionPolicy = "lru"
    conservativeness: float = 1.0
    """Small: more rows are admitted than memory will do for, and retracted."""
    media_rows: int = 512
    atomic_media: bool = False
    """Images are computed in one chunk each: their tokens see each other."""
    """Of the embedding store, for models that see."""
    step_patches: int = 4096
    """Tower tokens of a step."""
    drafts: str = "none"
    """Where drafts come from (see drafting.py)."""
    most_drafts: int = 3
    """Of a row, that a proposer on the device leaves."""
    frees_windows: bool = True
    num_snapshots: int = 16
    """Places for states, of models with layers that keep one."""
    state_interval: int = 8
    """Layers with windows keep no more than those."""


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    end: End | None = None
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: TokenLogprobs | None = None


class Mailbox:
    closed = False

    def __init__(self) -> None:
        self.incoming: list[ToEngine] = []
        self.answers: dict[int, Answer] = {}

    def drain(self, block_s: float) -> list[ToEngine]:
        messages, self.incoming = self.incoming, []
        return messages

    def send(self, message: ToDetokenizer) -> None:
        if not isinstance(message, Tokens):
            return
        ids, at = unpack_ids(message.tokens).tolist(), 0
        for row, (request, count) in enumerate(zip(message.ids, message.counts, strict=True)):
            answer = self.answers.setdefault(request, Answer())
            answer.tokens += ids[at : at + count]
            at += count
            extra = message.rows.get(row)
            if extra is not None:
                if extra.end is not None:
                    assert answer.end is None, "a request ends once"
                    answer.end = extra.end
                if extra.logprobs is not None:
                    answer.output_logprobs.append(extra.logprobs)
                if extra.prompt_logprobs is not None:
                    answer.prompt_logprobs = extra.prompt_logprobs


def _media_limits(model: Model, setup: Setup) -> MediaLimits | None:
    if not isinstance(model, Decoder) or model.tower is None:
        return None
    attends = [module for module in model.layers.modules() if isinstance(module, Attention)]
    axes = max((len(each.rope.sections) for each in attends if each.rope is not None), default=0)
    fixed = max((spec.media for spec in attention_specs(model)), default=0)
    return MediaLimits(
        num_rows=setup.media_rows, step_tokens=setup.step_patches, axes=axes,
        atomic=setup.atomic_media, most_atomic=setup.chunk_tokens, fixed=fixed,
    )  # fmt: skip


def groups_of(specs: Sequence[AttentionSpec], context: int) -> tuple[KvGroup, ...]:
    """The groups of layers with these specs, for a context of so many tokens; 0: all keep everything. Lines are as long as
    the shortest group. All are in one if they keep different amounts of a token: no pages of equal size fit them."""
    if len({spec.num_kv_heads * (spec.head_dim + (spec.v_head_dim or spec.head_dim)) for spec in specs}) > 1:
        return (KvGroup(Grows()),)
    kinds: dict[Lifetime, list[int]] = {}
    for spec in specs:
        bound = spec.chunk or spec.window
        kind: Lifetime = Grows() if bound is None or bound >= context else Window(bound, spec.chunk is not None)
        if spec.media:
            kind = Fixed(spec.media)
        kinds.setdefault(kind, []).append(spec.layer)
    shortest = min((len(layers) for layers in kinds.values()), default=1)
    return tuple(
        KvGroup(kind, cut_evenly(layers, -(-len(layers) // shortest)))
        for kind, layers in sorted(kinds.items(), key=lambda each: order(each[0]))
    ) or (KvGroup(Grows()),)


class InProcess:
    """An engine over `model`, set up one way."""

    def __init__(
        self,
        model: Model,
        vocab_size: int,
        setup: Setup,
        answers: Answers | None = None,
        proposer: DraftsOnDevice | None = None,
        grammars: GrammarQueue | None = None,
        rule: AcceptRule | None = None,
    ) -> None:
        """`answers`: what requests will be answered, for drafts that know it. `proposer`: makes drafts on the device.
        `rule`: which of them count."""
        assert isinstance(model, torch.nn.Module)
        device = Device("cuda" if setup.device == "cuda" else "cpu")
        slots, per_slot = setup.num_slots, -(-setup.context_length // setup.page_size)
        specs = attention_specs(model) + ([] if proposer is None else attention_specs(proposer.network))
        keeps_states = bool(state_shapes(model))
        groups = groups_of(specs, setup.context_length if setup.frees_windows and proposer is None else 0)
        layout = KvLayout(groups, setup.page_size)
        media_pages = slots * layout.pages_of_media(layout.fixed_positions)
        self.limits = RunnerLimits(
            num_slots=slots,
            num_pages=(setup.num_pages or slots * per_slot) * layout.column_pages
            + (media_pages if not setup.num_pages else 0)
            + 1,
            page_size=setup.page_size,
            pages_per_slot=per_slot,
            context_length=setup.context_length,
            max_step_tokens=max(setup.chunk_tokens, slots),
            vocab_size=vocab_size,
            media=_media_limits(model, setup),
            groups=groups,
            num_snapshots=setup.num_snapshots if keeps_states else None,
            num_adapters=len(model.adapters.facts) if isinstance(model, Decoder) and model.adapters is not None else 0,
        )
        own = len(specs) - (0 if proposer is None else proposer.proposer.num_layers)
        shapes = [KVShape.of(spec, setup.draft_kv_dtype if at >= own else None) for at, spec in enumerate(specs)]
        pool = KVPool(
            shapes,
            self.limits.num_pages,
            setup.page_size,
            setup.kv_dtype or setup.dtype,
            device.torch_device,
            [1.0] * len(specs) if setup.measures_scales else setup.k_scales,
            [1.0] * len(specs) if setup.measures_scales else setup.v_scales,
            groups,
            setup.code_bits,
        )
        factory = attention_factory(setup.attention, device.torch_device)
        encoder = None
        if isinstance(model, Decoder) and model.tower is not None:
            encoder = TowerRunner(model.tower, setup.media_rows, setup.dtype, device.torch_device)
        runner = self.runner = ModelRunner(
            model, pool, self.limits, factory, device, graph_max_tokens=512 if setup.graphs else 0,
            proposer=None if proposer is None else proposer.proposer, most_drafts=setup.most_drafts,
            tree_width=0 if proposer is None else proposer.tree_width, encoder=encoder, rule=rule,
            states=self._states(model, setup, device.torch_device),
            readers={SPEECH_RULES: speech_rules}, measures_scales=setup.measures_scales,
            cross=attention_factory(setup.attention, device.torch_device) if layout.fixed_pages else None,
        )  # fmt: skip
        spans = SpanCosts() if setup.device == "cuda" else SpanCosts(levels=1, most_queries=1)
        limits = Limits(
            num_slots=slots,
            num_pages=self.limits.num_pages,
            page_size=setup.page_size,
            pages_per_slot=per_slot,
            context_length=setup.context_length,
            max_step_tokens=self.limits.max_step_tokens,
            vocab_size=vocab_size,
            max_running=slots,
            chunk_tokens=setup.chunk_tokens,
            policy=setup.policy,  # type: ignore[arg-type]
            priority=setup.priority,
            conservativeness=setup.conservativeness,
            tpot_target_ms=0.0,
            spans=spans if setup.shared_spans and self.limits.layout.growing_pages else None,
            max_step_drafts=64,
            groups=groups,
            num_snapshots=self.limits.num_snapshots,
            state_interval=setup.state_interval,
            num_adapters=self.limits.num_adapters,
        )
        self.queues = Queues(limits, grammars)
        self.features: dict[str, npt.NDArray[np.generic]] = {}
        if self.limits.media is not None:
            self.queues.media = MediaAccount(self.limits.media, lambda given: self.features[given.path])
        self.queues.drafter = drafter(
            setup.drafts, slots, overlaps=setup.overlap, answers=answers, most_drafts=setup.most_drafts
        )
        self.cache = PrefixCache(
            num_pages=limits.num_pages, layout=limits.layout, enabled=setup.radix_cache, policy=setup.eviction,
            num_snapshots=limits.num_snapshots,
        )  # fmt: skip
        self.mailbox = Mailbox()
        self.stream = setup.stream
        self.loop = Loop(
            runner=runner,
            queues=self.queues,
            cache=self.cache,
            limits=limits,
            inbox=self.mailbox,
            outbox=self.mailbox,
            depth=1 if setup.overlap else 0,
            strict=True,
        )
        self._next_id = 0

    @staticmethod
    def _states(model: torch.nn.Module, setup: Setup, device: torch.device) -> StatePool | None:
        shapes = state_shapes(model)
        most = 0 if setup.drafts == "none" else max(setup.most_drafts, 5)  # as drafting.py makes
        if not shapes:
            return None
        return StatePool(
            shapes, setup.num_slots, setup.num_snapshots, device, inputs=state_inputs(model), most_drafts=most
        )

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        logprobs: LogprobSpec | None = None,
        *,
        media: tuple[MediaItem, ...] = (),
        positions: bytes = b"",
        items: tuple[int, ...] = (),
        adapter: int = 0,
    ) -> int:
        self._next_id += 1
        self.mailbox.incoming.append(
            Generate(
                id=self._next_id,
                rid=str(self._next_id),
                prompt=pack_ids(prompt),
                sampling=sampling,
                stream=self.stream,
                logprobs=logprobs,
                media=media,
                positions=positions,
                items=items,
                adapter=adapter,
            )
        )
        return self._next_id

    def finish(self, ids: Sequence[int], at_turn: dict[int, Callable[[], None]] | None = None) -> list[Answer]:
        """Turns until all of `ids` have ended; calls `at_turn[n]` before turn n."""
        for turn in range(4000):
            if at_turn and turn in at_turn:
                at_turn[turn]()
            self.loop.turn()
            answers = [self.mailbox.answers.get(i) for i in ids]
            if all(a is not None and a.end is not None for a in answers):
                return [a for a in answers if a is not None]
        raise AssertionError("the engine does not come to an end")

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams = GREEDY) -> list[list[int]]:
        return [answer.tokens for answer in self.finish([self.submit(p, sampling) for p in prompts])]

    def generate_with_a_retraction(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """As `generate`, but everything that runs is thrown out of memory in the middle."""
        answers = self.finish_with_a_retraction([self.submit(p) for p in prompts])
        assert self.queues.counters.retractions >= len(prompts), "nothing was thrown out"
        return [answer.tokens for answer in answers]

    def finish_with_a_retraction(self, ids: Sequence[int]) -> list[Answer]:
        """As `finish`, with what runs thrown out of memory now and then."""

        def send(message: ToEngine) -> Callable[[], None]:
            return lambda: self.mailbox.incoming.append(message)

        steps = {
            9: send(Pause(call=1, mode="retract")),
            14: send(Resume(call=2)),
            40: send(Pause(call=3, mode="retract")),
            43: send(Resume(call=4)),
        }
        return self.finish(ids, steps)
