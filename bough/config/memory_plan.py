"""How the device's memory is divided, computed before any weight is loaded.

Pure arithmetic: facts in, plan out. If something does not fit, a `ConfigError` gives the numbers, and commands whose
own plan fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from bough.core.errors import ConfigError
from bough.core.kv import Grows, KvGroup, KvLayout

GIB = 1024**3
MIB = 1024**2

SMALL_STEP = 512
"""Prompt tokens per step that are suggested if memory is short."""
MIN_AUTO_CONTEXT = 512
"""`--context-length auto` shrinks no further than this."""

CPU_POOL_BYTES = 512 * MIB
CPU_POOL_TOKENS = 65_536
CPU_POOL_SHARE = 0.25
"""The default pool on a CPU: two contexts, more (up to 65,536 tokens) while it stays within 512 MiB, and never more than
a quarter of the free memory, since other programs live there too."""
FREE_POOL_TOKENS = 4 * 1024 * 1024
"""KV capacity, in tokens, of a model without a KV cache (all layers are recurrent): large enough not to limit requests,
at a few bytes of host memory per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """Everything the plan depends on. Bytes are per device (per rank)."""

    model: str
    """The model as given on the command line, for the commands in error messages."""
    device: Literal["cpu", "cuda"]
    total_bytes: int
    free_bytes: int
    """Free memory before this process loads anything."""
    weight_bytes: int
    kv_bytes_per_token: int
    """Bytes per token in all lines of the KV cache."""
    groups: tuple[KvGroup, ...] = (KvGroup(Grows()),)
    """Which layers keep KV, and for how long."""
    kv_note: str = ""
    """Why `groups` keep more tokens than the layers need; empty: they do not."""
    activation_bytes: int
    """Activations of the largest step."""
    step_tokens: int
    """Tokens of the largest step."""
    small_step_tokens: int = SMALL_STEP
    """Tokens of the largest step with chunks of `SMALL_STEP`."""
    small_activation_bytes: int | None = None
    """Activations of that step; None: in proportion to its tokens."""
    graph_bytes: int = 0
    media_bytes: int = 0
    state_bytes: int = 0
    """Recurrent states of rows, and their snapshots."""
    """Store of media embeddings."""
    page_size: int = 1
    model_context: int
    """The model's own limit."""
    context_length: int | None = None
    """Context length as configured; None: as long as the model and the memory allow."""
    max_total_tokens: int | None = None
    """KV capacity as configured; None: the rest of the memory."""
    mem_fraction: float | None = None
    """Configured share of the memory for weights and KV cache; None: the rest of the memory."""
    kv_item_bytes: int = 2
    weight_dtype: str = "bfloat16"
    tp_size: int = 1
    num_devices: int = 1
    host_free_bytes: int = 0
    """Free host memory, to suggest the CPU where a GPU is too small."""

    @property
    def kv(self) -> KvLayout:
        return KvLayout(self.groups, self.page_size)

    @property
    def page_bytes(self) -> int:
        return self.kv_bytes_per_token * self.page_size // max(1, self.kv.column_pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where each byte goes. `kv_bytes` includes the one page that padding writes to."""

    groups: tuple[KvGroup, ...] = (KvGroup(Grows()),)
    kv_note: str = ""
    num_pages: int
    """Pages for requests, without the padding page."""

    total_bytes: int
    other_bytes: int
    """Memory of other processes, and of this process's runtime libraries."""
    weight_bytes: int
    kv_bytes: int
    graph_bytes: int
    activation_bytes: int
    media_bytes: int = 0
    state_bytes: int = 0
    page_size: int
    kv_tokens: int
    """Capacity for requests, however short they are, a multiple of the page size."""
    context_length: int
    because: str

    @property
    def kv(self) -> KvLayout:
        return KvLayout(self.groups, self.page_size)

    @property
    def free_bytes(self) -> int:
        used = self.other_bytes + self.weight_bytes + self.kv_bytes + self.graph_bytes + self.activation_bytes
        return self.total_bytes - used - self.media_bytes - self.state_bytes

    @property
    def max_concurrency(self) -> float:
        """Requests of the full context length that fit at once."""
        if not self.kv.windows:
            return self.kv_tokens / self.context_length
        return self.num_pages / self.kv.pages_for(self.context_length)

    @property
    def kv_remark(self) -> str:
        remark = f"{self.kv_tokens:,} tokens in pages of {self.page_size}"
        if self.kv_note:
            remark += f"; windows are kept whole: {self.kv_note}"
        if not self.kv.windows:
            return remark
        most = int(self.max_concurrency * self.context_length)
        kept = {group.lifetime.summary: sum(map(len, group.layers)) for group in self.groups}
        layers = ", ".join(f"{count} layers keep {what}" for what, count in kept.items())
        return f"{remark}, up to {most:,} in long requests ({layers})"

    def rows(self) -> list[tuple[str, int, str]]:
        """(what, bytes, remark), for tables."""
        media = [("media", self.media_bytes, "embeddings that are kept")] if self.media_bytes else []
        if self.state_bytes:
            media.append(("states", self.state_bytes, "of requests, and snapshots of prefixes"))
        return [
            ("weights", self.weight_bytes, ""),
            ("KV cache", self.kv_bytes, self.kv_remark),
            *media,
            ("graphs", self.graph_bytes, ""),
            ("activations", self.activation_bytes, "at the largest step"),
            ("other", self.other_bytes, "runtime and other programs"),
            ("free", self.free_bytes, ""),
        ]

    def table(self) -> str:
        """The rows as text, with the concurrency they give."""
        lines = [f"{what:<12} {show_bytes(size):>10}  {remark}".rstrip() for what, size, remark in self.rows()]
        lines.append(
            f"{self.max_concurrency:.1f} requests of the full {self.context_length:,} tokens fit at once ({self.because})"
        )
        return "\n".join(lines)


def show_bytes(size: int) -> str:
    """Bytes with the unit a person would choose."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"


def runtime_bytes(facts: PlanFacts) -> int:
    """Memory kept free for the libraries' own use."""
    if facts.device == "cpu":
        return 384 * MIB
    return max(768 * MIB, facts.total_bytes // 64)


def plan_memory(facts: PlanFacts) -> MemoryPlan:
    """Divides the memory. Raises `ConfigError` with exact numbers and working commands if the model can't be served."""
    problem = _plan(facts)
    if isinstance(problem, MemoryPlan):
        return problem
    commands = list(_remedies(facts))[:3]
    if commands:
        fix = "one of: " + " | ".join(commands)
    else:
        need = (
            facts.weight_bytes
            + facts.activation_bytes
            + facts.graph_bytes
            + facts.media_bytes
            + runtime_bytes(facts)
            + facts.state_bytes
        )
        need += facts.kv.pages_for(min(MIN_AUTO_CONTEXT, facts.model_context)) * facts.page_bytes
        fix = f"choose a smaller or quantised model, or a device with at least {show_bytes(need)} free"
    raise ConfigError(what=problem.what, why=problem.why, fix=fix)


@dataclass(frozen=True, slots=True)
class _Misfit:
    what: str
    why: str


def _plan(facts: PlanFacts) -> MemoryPlan | _Misfit:
    room, because = _kv_room(facts)
    pages = _pages_in(room, facts)
    tokens = _tokens_of(pages, facts)
    fixed = facts.weight_bytes + facts.activation_bytes + facts.graph_bytes + facts.media_bytes + facts.state_bytes
    numbers = (
        f"{show_bytes(facts.free_bytes)} free of {show_bytes(facts.total_bytes)}: weights {show_bytes(facts.weight_bytes)}, "
        f"activations {show_bytes(facts.activation_bytes)}, graphs {show_bytes(facts.graph_bytes)}, "
        f"runtime {show_bytes(runtime_bytes(facts))}"
        + (f", embeddings of media {show_bytes(facts.media_bytes)}" if facts.media_bytes else "")
        + (f", states {show_bytes(facts.state_bytes)}" if facts.state_bytes else "")
    )
    if room <= 0:
        return _Misfit(
            what=f"{facts.model} does not fit: {show_bytes(fixed)} are needed before any KV cache",
            why=numbers + (f"; --mem-fraction-static {facts.mem_fraction} is set" if facts.mem_fraction else ""),
        )
    if facts.max_total_tokens is not None:
        asked = _round_down(facts.max_total_tokens, facts.page_size)
        if asked == 0:
            return _Misfit(
                what=f"a KV cache of {facts.max_total_tokens:,} tokens was asked for, a page has {facts.page_size:,}",
                why="there must be at least one page",
            )
        if asked > tokens:
            return _Misfit(
                what=f"a KV cache of {facts.max_total_tokens:,} tokens was asked for, {tokens:,} fit",
                why=f"{numbers}; one token takes {show_bytes(facts.kv_bytes_per_token)}",
            )
        pages, because = asked // facts.page_size * facts.kv.column_pages, "--max-total-tokens"
        tokens = asked
    context = facts.context_length
    longest = facts.kv.tokens_in(pages, context or facts.model_context)
    if context is None:
        context = longest
        least = min(MIN_AUTO_CONTEXT, facts.model_context)
        if context < least and facts.max_total_tokens is None:
            return _Misfit(
                what=f"{facts.model} leaves room for {longest:,} tokens of KV cache, at least {least:,} are needed",
                why=f"{numbers}; one token takes {show_bytes(facts.kv_bytes_per_token)}",
            )
    elif context > longest:
        return _Misfit(
            what=f"a context of {context:,} tokens was asked for, {longest:,} fit",
            why=f"{numbers}; one token takes {show_bytes(facts.kv_bytes_per_token)}",
        )
    return MemoryPlan(
        groups=facts.groups,
        kv_note=facts.kv_note,
        num_pages=pages,
        total_bytes=facts.total_bytes,
        other_bytes=facts.total_bytes - facts.free_bytes + runtime_bytes(facts),
        weight_bytes=facts.weight_bytes,
        kv_bytes=(pages + 1) * facts.page_bytes,
        graph_bytes=facts.graph_bytes,
        activation_bytes=facts.activation_bytes,
        media_bytes=facts.media_bytes,
        state_bytes=facts.state_bytes,
        page_size=facts.page_size,
        kv_tokens=tokens,
        context_length=context,
        because=because,
    )


def _most_room(facts: PlanFacts) -> tuple[int, str]:
    """Bytes that KV pages may take at most, and why. Zero or less: not even the weights fit."""
    left = facts.free_bytes - runtime_bytes(facts) - facts.weight_bytes - facts.activation_bytes - facts.graph_bytes
    left -= facts.media_bytes + facts.state_bytes
    if facts.mem_fraction is None:
        return left, "all that weights, graphs and activations leave"
    asked = int(facts.total_bytes * facts.mem_fraction) - facts.weight_bytes
    if asked <= left:
        return asked, f"--mem-fraction-static {facts.mem_fraction}"
    return left, "what is free, less than --mem-fraction-static allows"


def _kv_room(facts: PlanFacts) -> tuple[int, str]:
    """Bytes that KV pages will take, and why that many."""
    most, because = _most_room(facts)
    if facts.device == "cpu" and facts.max_total_tokens is None and facts.mem_fraction is None:
        return _cpu_default_room(facts, most)
    return most, because


def _cpu_default_room(facts: PlanFacts, left: int) -> tuple[int, str]:
    context, kv = facts.context_length or facts.model_context, facts.kv
    per_token, page_bytes = max(1, facts.kv_bytes_per_token), max(1, facts.page_bytes)
    most = min(CPU_POOL_TOKENS, CPU_POOL_BYTES // per_token)
    wanted = max(2 * kv.pages_for(context), math.ceil(most / facts.page_size) * kv.column_pages)
    padded = (wanted + 1) * page_bytes
    share = int(facts.free_bytes * CPU_POOL_SHARE)
    if facts.context_length is not None:  # configured: it may take more than its share
        share = max(share, (kv.pages_for(context) + 1) * page_bytes)
    room = min(padded, share, left)
    if room == padded:
        kept = max(2 * context, most)
        return room, f"a CPU keeps {kept:,} tokens by default; more with --max-total-tokens"
    if room == share:
        return (
            room,
            f"a CPU keeps at most {CPU_POOL_SHARE:.0%} of the free memory by default; more with --max-total-tokens",
        )
    return room, "all that weights and activations leave"


def _pages_in(room: int, facts: PlanFacts) -> int:
    """Pages that fit `room` besides the padding page, in whole columns."""
    if facts.kv_bytes_per_token == 0:
        most = FREE_POOL_TOKENS if facts.state_bytes else CPU_POOL_TOKENS
        return (facts.max_total_tokens or max(facts.model_context, most)) // facts.page_size
    height = facts.kv.column_pages
    return max(0, room // facts.page_bytes - 1) // height * height


def _tokens_of(pages: int, facts: PlanFacts) -> int:
    """Tokens that pages hold at least: as many as if every request were short."""
    return pages // max(1, facts.kv.column_pages) * facts.page_size


def _round_down(tokens: int, page_size: int) -> int:
    return tokens // page_size * page_size


def _remedies(facts: PlanFacts) -> Iterator[str]:
    """Commands that would start, each one planned first."""
    base = f"bough serve {facts.model}".strip()
    for flags, changed in _candidates(facts):
        if isinstance(_plan(changed), MemoryPlan):
            yield f"{base} {flags}"


def _candidates(facts: PlanFacts) -> Iterator[tuple[str, PlanFacts]]:
    most, _ = _most_room(facts)
    pages = _pages_in(most, facts)
    fits = _tokens_of(pages, facts)
    if facts.max_total_tokens is not None and fits:
        yield f"--max-total-tokens {fits}", replace(facts, max_total_tokens=fits)
    if facts.context_length is not None and fits:
        if facts.max_total_tokens is not None:
            pages = min(pages, facts.max_total_tokens // facts.page_size * facts.kv.column_pages)
        shorter = facts.kv.tokens_in(pages, facts.context_length)
        yield f"--context-length {shorter}", replace(facts, context_length=shorter)
    if facts.mem_fraction is not None:
        yield "--mem-fraction-static auto", replace(facts, mem_fraction=None)
    if facts.device == "cuda" and facts.kv_item_bytes > 1:
        smaller = facts.kv_bytes_per_token // facts.kv_item_bytes
        yield "--kv-cache-dtype fp8_e4m3", replace(facts, kv_bytes_per_token=smaller, kv_item_bytes=1)
    if facts.step_tokens > facts.small_step_tokens:
        scaled = facts.small_activation_bytes
        if scaled is None:
            scaled = facts.activation_bytes * facts.small_step_tokens // facts.step_tokens
        small = replace(facts, activation_bytes=scaled, step_tokens=facts.small_step_tokens)
        yield f"--chunked-prefill-size {SMALL_STEP}", small
    for ranks in (2, 4, 8):
        if facts.tp_size < ranks <= facts.num_devices:
            by = ranks // facts.tp_size
            split = replace(
                facts,
                tp_size=ranks,
                weight_bytes=math.ceil(facts.weight_bytes / by * 1.02),
                kv_bytes_per_token=math.ceil(facts.kv_bytes_per_token / by),
            )
            yield f"--tp-size {ranks}", split
    if facts.weight_dtype == "float32":
        yield "--dtype bfloat16", replace(facts, weight_bytes=facts.weight_bytes // 2, weight_dtype="bfloat16")
    if facts.device == "cuda":
        host = replace(
            facts, device="cpu", total_bytes=facts.host_free_bytes, free_bytes=facts.host_free_bytes, graph_bytes=0
        )
        yield "--device cpu", host
