"""Writes the engine's numbers to its board, a few times a second and whenever it falls idle."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from msgspec import structs

from bough.cache.prefix import PrefixCache
from bough.config.step_memory import MEDIA_BLOCK_ROWS
from bough.engine.loop import Laps
from bough.observability.metrics import DRAFT_PLACES, PHASES, Sheet
from bough.scheduler.queues import Queues

_EVERY_S = 0.1
_RATE_OVER_S = 1.0
"""Shortest time over which throughput is measured."""

FreeBytes = Callable[[], tuple[int, int]]


class ExpertLoad(Protocol):
    """What is known of the ranks' load, where they hold different experts."""

    @property
    def balancedness(self) -> float: ...

    @property
    def moves(self) -> int: ...

    @property
    def moved_experts(self) -> int: ...


class EngineMeter:
    """Reads queues and cache, which it never changes. `look` costs a clock reading unless something is due."""

    def __init__(
        self,
        sheet: Sheet,
        queues: Queues,
        cache: PrefixCache,
        *,
        free_bytes: FreeBytes | None = None,
        utilization: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`free_bytes`: (free, total) memory of the device; `utilization`: its share in use. None: not worth asking for."""
        self.experts: ExpertLoad | None = None
        """How even the load of ranks is, where that is counted."""
        self._queues = queues
        self._cache = cache
        self._free_bytes = free_bytes
        self._utilization = utilization
        self._clock = clock
        self._wrote_s = -1.0
        self._rated_s = clock()
        self._rated = (0, 0, 0, 0, 0)
        self._was_idle = False
        names = (
            "num_running_reqs", "num_prefilling_reqs", "num_queue_reqs", "num_queue_tokens", "num_grammar_queue_reqs",
            "num_used_tokens", "num_cached_tokens", "gen_throughput", "prompt_throughput", "decode_step_seconds",
            "device_utilization", "device_memory_used_bytes", "device_memory_total_bytes", "steps_total",
            "failed_steps_total", "oom_total",
            "computed_prompt_tokens_total", "retracted_requests_total", "forced_tokens_total", "cut_grammars_total",
            "page_repairs_total", "spec_accept_length", "spec_accept_rate", "spec_verify_total",
            "spec_draft_tokens_total", "spec_accepted_tokens_total", "expert_balancedness", "expert_rebalances_total",
            "expert_moves_total",
            "media_items_total", "media_item_hits_total", "media_tower_tokens_total", "media_used_positions",
        )  # fmt: skip
        self._cells = {name: sheet.cell(name) for name in names}
        self._phases = {phase: sheet.cell("engine_seconds_total", phase) for phase in PHASES}
        self._places = [sheet.cell("spec_accepted_by_position_total", place) for place in DRAFT_PLACES]
        sheet.cell("max_total_num_tokens").set(self._tokens(cache.total))
        sheet.cell("max_running_reqs").set(queues.limits.max_running)

    def _tokens(self, num_pages: int) -> int:
        """Tokens that this number of pages holds, in all lines."""
        return num_pages // max(1, self._cache.layout.column_pages) * self._cache.page_size

    def look(self, laps: Laps) -> None:
        """Writes if it is time to, or if the engine has just fallen idle."""
        now = self._clock()
        idle = self._queues.idle
        if now - self._wrote_s >= _EVERY_S or (idle and not self._was_idle):
            self._write(laps)
            self._wrote_s = now
        if now - self._rated_s >= _RATE_OVER_S:
            self._rate(now)
        self._was_idle = idle

    def _write(self, laps: Laps) -> None:
        queues, cache, cells = self._queues, self._cache, self._cells
        counters = queues.counters
        media = queues.media
        if media is not None:
            cells["media_items_total"].set(media.counters.items)
            cells["media_item_hits_total"].set(media.counters.hits)
            cells["media_tower_tokens_total"].set(media.counters.tower_tokens)
            cells["media_used_positions"].set(media.store.num_held * MEDIA_BLOCK_ROWS)
        cells["num_running_reqs"].set(queues.num_live)
        cells["num_prefilling_reqs"].set(len(queues.prefilling))
        cells["num_queue_reqs"].set(len(queues.waiting))
        cells["num_queue_tokens"].set(queues.waiting.num_tokens)
        cells["num_grammar_queue_reqs"].set(len(queues.compiling))
        cells["num_used_tokens"].set(self._tokens(cache.total - cache.num_available))
        cells["num_cached_tokens"].set(self._tokens(cache.tree.num_evictable))
        cells["decode_step_seconds"].set(queues.cost.decode_ms / 1e3)
        cells["steps_total"].set(counters.steps)
        cells["failed_steps_total"].set(counters.failed_steps)
        cells["oom_total"].set(counters.oom_steps)
        cells["computed_prompt_tokens_total"].set(counters.prompt_tokens)
        cells["retracted_requests_total"].set(counters.retractions)
        cells["forced_tokens_total"].set(counters.forced_tokens)
        cells["cut_grammars_total"].set(counters.cut_grammars)
        cells["page_repairs_total"].set(cache.num_repairs)
        if queues.drafter is not None:
            cells["spec_verify_total"].set(counters.decoded_rows)
            cells["spec_draft_tokens_total"].set(counters.draft_tokens)
            cells["spec_accepted_tokens_total"].set(counters.accepted_tokens)
            for cell, count in zip(self._places, counters.accepted_at, strict=True):
                cell.set(count)
        if self.experts is not None:
            cells["expert_balancedness"].set(self.experts.balancedness)
            cells["expert_rebalances_total"].set(self.experts.moves)
            cells["expert_moves_total"].set(self.experts.moved_experts)
        for phase, seconds in structs.asdict(laps).items():
            self._phases[phase].set(seconds)

    def _rate(self, now: float) -> None:
        passed = now - self._rated_s
        counters = self._queues.counters
        numbers = (
            counters.output_tokens,
            counters.prompt_tokens,
            counters.decoded_rows,
            counters.draft_tokens,
            counters.accepted_tokens,
        )
        verified, drafts, accepted = (new - old for new, old in zip(numbers[2:], self._rated[2:], strict=True))
        if verified:
            self._cells["spec_accept_length"].set(1.0 + accepted / verified)
            self._cells["spec_accept_rate"].set(accepted / drafts if drafts else 0.0)
        self._cells["gen_throughput"].set((numbers[0] - self._rated[0]) / passed)
        self._cells["prompt_throughput"].set((numbers[1] - self._rated[1]) / passed)
        self._rated_s, self._rated = now, numbers
        if self._utilization is not None:
            self._cells["device_utilization"].set(self._utilization())
        if self._free_bytes is not None:
            free, total = self._free_bytes()
            self._cells["device_memory_used_bytes"].set(total - free)
            self._cells["device_memory_total_bytes"].set(total)
