"""Limits for planning: those of the device and those set by the operator, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from bough.config.concerns import AUTO, Auto, SchedulePolicy, SchedulerConfig
from bough.core.kv import Grows, KvGroup, KvLayout
from bough.core.step import MediaLimits, RunnerLimits, SpanCosts

# Defaults below were compared with others by `benchmarks/scheduler_constants.py`; the results are in
# docs/decisions/scheduler_constants.md.

DEFAULT_CHUNK_TOKENS = 8192
"""Prompt tokens. From about 4,096 on, a token costs the same in every larger step; by the cost model of
`docs/decisions/scheduler_constants.md`, a step of 8,192 tokens takes 0.23 s with an 8B model on one H200. Long prompts
beside short ones have their first token after 1.52 s; 1.97 s with 1,024."""

_NEVER = 2**32
"""A difference of priorities that no two requests can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of an engine; they do not change while it runs."""

    num_slots: int
    num_pages: int
    """Number of pages, including page 0, which is never allocated."""
    page_size: int
    pages_per_slot: int
    context_length: int
    max_step_tokens: int
    vocab_size: int
    max_running: int
    max_queued_requests: int = 4096
    """Maximum number of waiting requests; more are refused (--max-queued-requests)."""
    max_queued_tokens: int = 8_388_608
    """Maximum number of prompt tokens of waiting requests, 64 MiB of ids; more are refused (--max-queued-tokens)."""
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    """Maximum prompt tokens of one step."""
    unwatched_tokens: int = 0
    """Maximum prompt tokens of a step while no request streams, if larger than `chunk_tokens`."""
    whole_prompts: bool = False
    """A prompt that fits into one step waits for one with enough tokens left, instead of being cut. Only the first
    prompt of a step is cut, if the step's budget is too small (`Queues.prefill_cap`), so that it makes progress."""
    uncut: bool = False
    """Prompts are never cut, because the model must see all tokens at once (some pooling models): the first prompt of a
    step is not limited by the budget. No prompt is longer than a step."""
    policy: SchedulePolicy = "auto"
    conservativeness: float = 1.0
    """Factor of the output that is expected of requests when memory is reserved. With 2.0 a full pool ends 40 % later,
    because fewer requests run at once; with 0.5 three times as many of them are retracted."""
    tpot_target_ms: float | None = None
    """Time per token that prefill chunks must leave running rows; None: follow the measured decode time; 0: no target."""
    small_share: float = 0.25
    """Part of the prefill budget that long prompts leave to prompts that fit into it. Beside prompts of 20,000 tokens, those
    of 200 have their first token after 0.14 s; after 0.78 s with 0.1. Larger parts gain nothing."""
    priority: bool = False
    preempt_gap: int = 10
    """Levels of priority by which a waiting request must be above a running one to take its place."""
    min_chunk_tokens: int = 64
    """Prompt tokens of a step in any case, whatever the target time per token says. 16 to 256 make no difference beside a
    prompt of 60,000 tokens; with 1,024 the longest gap of streams is 6.5 decode steps instead of 2.8."""
    large_step_tokens: int = 4096
    """Prompt tokens from which on a step that isn't quite full costs no more per token. 512 to 8,192 differ by 0.5 %."""
    share_tokens: int = 32
    """If a row computes at least this many tokens (or a page) of a waiting request's prompt, the request waits for them. Of
    256 prompts with 8 beginnings of 100 tokens, 1.5 % fewer tokens are computed than with 128."""
    spans: SpanCosts | None = None
    """Cost of attention over shared spans; None: spans are not shared."""
    kv_stays: str = ""
    """Why KV that was computed at some positions can't be moved to others; empty: it can."""
    num_snapshots: int | None = None
    """Number of places for snapshots of recurrent states; None: no layer has a state."""
    state_interval: int = 64
    """Tokens between saves of the state of a row that decodes, at least: a state is as large as the KV of hundreds of
    tokens, and is copied whole. A request that goes on from an answer computes at most this many tokens again. Chosen by
    these bounds; not measured."""
    media: MediaLimits | None = None
    """Limits of media on the device; None: the model takes text only."""
    num_adapters: int = 0
    """Adapters that requests may have."""
    max_retractions: int = 4
    """Times that a request loses its memory to others before all that it may need is reserved for it. 2 to 16 make no
    difference in a full pool; with 1, it ends 13 % later."""
    estimate_clip_tokens: int = 4096
    """`max_new_tokens` above this count as this much when a request's memory is estimated. 2,048 to 8,192 differ by 4 %;
    with 512, eight times as many requests are retracted."""
    lpm_window: int = 256
    """Waiting requests, the oldest ones, that are sorted by their cached prefix. With 60 prefixes in a cache for 25, 1,200
    requests take 11.8 s; 13.5 s with 128, 10.9 s with 512, which costs the host 1.5 ms more in some steps."""
    max_step_drafts: int = 0
    """Drafts of all rows of a step at most."""
    num_stages: int = 1
    """Pipeline stages: number of steps computed at the same time. With several, a row is planned again only when its
    sample has come back, so that no two steps in flight have a row in common."""
    micro_batch: int = 0
    """With pipeline stages: maximum number of decode rows per step; 0: the running rows divided by the number of
    stages."""
    seed: int = 0
    groups: tuple[KvGroup, ...] = (KvGroup(Grows()),)
    """KV groups: which layers keep KV, and for how long."""
    layout: KvLayout = field(init=False)
    """Layout of the KV groups, for planning."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", KvLayout(self.groups, self.page_size))

    @property
    def tile_tokens(self) -> int:
        """Step tokens of a tile: matrix products of large steps are computed in such tiles, and a partly filled
        tile costs as much as a full one. An eighth of `large_step_tokens` (512 on an H200), so that a large step has at
        least eight tiles."""
        return max(1, self.large_step_tokens // 8)

    @property
    def capacity_tokens(self) -> int:
        """KV tokens that one request can ever hold."""
        return self.layout.tokens_in(self.num_pages - 1, self.pages_per_slot * self.page_size)

    def columns_for(self, num_tokens: int) -> int:
        """Columns that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    @classmethod
    def of(cls, runner: RunnerLimits, config: SchedulerConfig, *, max_step_drafts: int = 0, seed: int = 0) -> Limits:
        """Limits of an engine. Values still `AUTO` follow the runner."""
        running = config.max_running_requests
        chunk = config.chunked_prefill_size
        unwatched = config.unwatched_prefill_size
        target = config.tpot_target_ms
        return cls(
            num_slots=runner.num_slots,
            num_pages=runner.num_pages,
            page_size=runner.page_size,
            pages_per_slot=runner.pages_per_slot,
            context_length=runner.context_length,
            max_step_tokens=runner.max_step_tokens,
            vocab_size=runner.vocab_size,
            spans=runner.spans,
            media=runner.media,
            num_adapters=runner.num_adapters,
            kv_stays=runner.kv_stays,
            groups=runner.groups,
            num_snapshots=runner.num_snapshots,
            max_running=runner.num_slots if running is AUTO else min(_int(running), runner.num_slots),
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            chunk_tokens=runner.max_step_tokens if chunk is AUTO or _int(chunk) <= 0 else _int(chunk),
            unwatched_tokens=0 if unwatched is AUTO else _int(unwatched),
            whole_prompts=chunk is not AUTO and _int(chunk) <= 0,
            policy=config.schedule_policy,
            conservativeness=config.schedule_conservativeness,
            tpot_target_ms=None if isinstance(target, Auto) else target,
            small_share=config.small_request_share,
            priority=config.priority_scheduling,
            preempt_gap=config.priority_preemption_threshold if config.priority_preemption else _NEVER,
            max_step_drafts=max_step_drafts,
            seed=seed,
        )


def _int(value: int | Auto) -> int:
    assert not isinstance(value, Auto), "AUTO was ruled out above"
    return value
