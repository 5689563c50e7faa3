"""Model shapes and random workloads of the roofline, and the floors under their times.

A floor counts what must be done: weights and KV read once each, products of all tokens. It takes nothing for norms,
activations, rotation and sampling, which can be done while something else is read.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["decode", "prefill"]

_ITEM_BYTES = 2
"""bfloat16."""
LEAST_BYTES = 4e9
LEAST_FLOPS = 2e12
"""A step reads or computes at least this much: shorter ones measure the host."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as far as its times depend on it."""

    name: str
    width: int
    heads: int
    kv_heads: int
    layers: int
    inner: int
    """Units of a feed-forward layer, or of each expert."""
    vocab: int
    head_dim: int = 128
    experts: int = 0
    per_token: int = 0

    def config(self) -> dict[str, Any]:
        """The `config.json` of a model with this shape."""
        common: dict[str, Any] = {
            "hidden_size": self.width,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab,
            "intermediate_size": self.inner,
            "max_position_embeddings": 1 << 17,
            "rope_theta": 5e5,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }
        if not self.experts:
            return {**common, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        return {
            **common,
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": self.experts,
            "num_experts_per_tok": self.per_token,
            "moe_intermediate_size": self.inner,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    @property
    def kv_bytes(self) -> int:
        """Of one token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _ITEM_BYTES


SHAPES = (
    ModelShape("dense-2k-gqa2", 2048, 16, 8, layers=28, inner=6144, vocab=151_936),
    ModelShape("dense-4k-mha", 4096, 32, 32, layers=32, inner=11_008, vocab=32_000),
    ModelShape("dense-4k-gqa4", 4096, 32, 8, layers=32, inner=14_336, vocab=128_256),
    ModelShape("dense-8k-gqa8", 8192, 64, 8, layers=20, inner=28_672, vocab=128_256),
    ModelShape("moe-2k-gqa8", 2048, 32, 4, layers=48, inner=768, vocab=151_936, experts=128, per_token=8),
    ModelShape("moe-4k-gqa16", 4096, 64, 4, layers=12, inner=1536, vocab=151_936, experts=128, per_token=8),
)
"""Widths of 2k to 8k, 1 to 16 query heads per KV head. The last two dense models and both mixtures have the shapes of
published ones; layers are left out where a model would not fit beside 40 GB of KV."""
TINY_SHAPES = (
    ModelShape("tiny-dense", 64, 4, 2, layers=2, inner=96, vocab=128, head_dim=16),
    ModelShape("tiny-moe", 64, 4, 1, layers=2, inner=32, vocab=128, head_dim=16, experts=8, per_token=2),
)


@dataclass(frozen=True, slots=True)
class WorkloadBounds:
    """Ranges that workloads are drawn from."""

    most_rows: int = 512
    least_context: int = 64
    most_context: int = 65_536
    most_prompt: int = 32_768
    most_prompt_tokens: int = 65_536
    """Of all prompts of a prefill."""
    least_bytes: float = LEAST_BYTES
    least_flops: float = LEAST_FLOPS
    measured_s: float = 0.4
    """How long decode steps are repeated, about."""


TINY = WorkloadBounds(
    most_rows=6,
    least_context=16,
    most_context=96,
    most_prompt=64,
    most_prompt_tokens=128,
    least_bytes=0,
    least_flops=0,
    measured_s=0.01,
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows with `lengths` tokens before the step (decode), or prompts of `lengths` tokens (prefill)."""

    kind: Kind
    lengths: tuple[int, ...]
    tree: tuple[tuple[int, int], ...] = ()
    """How decode rows begin alike: (groups, tokens) by level, each group cut into the groups of the next level."""
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1

    def __str__(self) -> str:
        mean = sum(self.lengths) // len(self.lengths)
        what = f"{len(self.lengths)} x {mean:,}"
        if self.tree:
            what += ", shared " + " > ".join(f"{groups} x {tokens}" for groups, tokens in self.tree)
        if self.temperature:
            what += f", t={self.temperature} p={self.top_p} k={self.top_k}"
        return f"{self.kind} {what}"

    @property
    def shared_tokens(self) -> int:
        """KV tokens of a row that it shares with others."""
        return sum(tokens for _, tokens in self.tree)

    @property
    def distinct_tokens(self) -> int:
        """KV tokens that differ between rows, and the shared ones once each."""
        own = sum(self.lengths) - self.shared_tokens * len(self.lengths)
        return own + sum(groups * tokens for groups, tokens in self.tree)


@dataclass(frozen=True, slots=True)
class OperationCost:
    """Bytes and FLOPs of one operation of a step."""

    name: str
    num_bytes: float
    flops: float


def operations(shape: ModelShape, workload: Workload) -> list[OperationCost]:
    """What a decode step, or a prefill, has to do at least: each kind of operation, all layers together."""
    rows = len(workload.lengths)
    tokens = rows if workload.kind == "decode" else sum(workload.lengths)

    def product(name: str, out: int, depth: int, times: int, count: float = tokens) -> OperationCost:
        return OperationCost(name, times * out * depth * _ITEM_BYTES, 2.0 * times * count * out * depth)

    heads, kv, width, layers = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.width, shape.layers
    if workload.kind == "decode":
        seen, read = float(sum(workload.lengths)), float(workload.distinct_tokens * shape.kv_bytes)
    else:
        seen, read = sum(n * (n + 1) / 2 for n in workload.lengths), 0.0
    found = [
        product("qkv", heads + 2 * kv, width, layers),
        product("output", width, heads, layers),
        OperationCost("attention", read, 4.0 * layers * heads * seen),
        product("head", shape.vocab, width, 1, rows),
    ]
    if not shape.experts:
        return [*found, product("gate_up", 2 * shape.inner, width, layers), product("down", width, shape.inner, layers)]
    touched = shape.experts * (1 - (1 - shape.per_token / shape.experts) ** tokens)
    expert = 3 * width * shape.inner
    flops = 2.0 * layers * tokens * shape.per_token * expert
    return [
        *found,
        product("router", shape.experts, width, layers),
        OperationCost("experts", layers * touched * expert * _ITEM_BYTES, flops),
    ]


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Measured rates of the device."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, work: OperationCost) -> float:
        return max(work.num_bytes / self.bytes_per_s, work.flops / self.flops_per_s)


def floor_s(shape: ModelShape, workload: Workload, rates: DeviceRates) -> float:
    """Seconds below which the step, or the prefill, cannot be done."""
    return sum(rates.floor_s(work) for work in operations(shape, workload))


def bound_by(shape: ModelShape, workload: Workload, rates: DeviceRates) -> str:
    """The operation with the largest part of the floor, and its part."""
    work = max(operations(shape, workload), key=rates.floor_s)
    share = rates.floor_s(work) / floor_s(shape, workload, rates)
    of = "bytes" if work.num_bytes / rates.bytes_per_s > work.flops / rates.flops_per_s else "FLOPs"
    return f"{work.name} {share:.0%} ({of})"


def draw_workloads(
    shape: ModelShape, count: int, seed: int, *, kv_tokens: int, page_size: int, bounds: WorkloadBounds
) -> list[Workload]:
    """`count` workloads, five decodes for every three prefills. `kv_tokens`: how many the device holds."""
    rng = random.Random(f"{seed} {shape.name}")
    kinds: list[Kind] = ["decode", "prefill", "decode", "decode", "prefill", "decode", "prefill", "decode"]
    return [
        _draw(rng, kinds[i % len(kinds)], shape, kv_tokens=kv_tokens, page_size=page_size, bounds=bounds)
        for i in range(count)
    ]


_TRIES = 10_000


def _draw(
    rng: random.Random, kind: Kind, shape: ModelShape, *, kv_tokens: int, page_size: int, bounds: WorkloadBounds
) -> Workload:
    for _ in range(_TRIES):
        drawn = _decode(rng, page_size, bounds) if kind == "decode" else _prefill(rng, bounds)
        work = operations(shape, drawn)
        large = sum(each.num_bytes for each in work) >= bounds.least_bytes
        if kind == "prefill":
            large = sum(each.flops for each in work) >= bounds.least_flops
        if large and drawn.distinct_tokens + len(drawn.lengths) * 2 * page_size <= kv_tokens:
            return drawn
    raise ValueError(f"no {kind} of {shape.name} fits into {kv_tokens} KV tokens and is large enough")


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def _decode(rng: random.Random, page_size: int, bounds: WorkloadBounds) -> Workload:
    rows = _log_uniform(rng, 1, bounds.most_rows)
    middle = _log_uniform(rng, bounds.least_context, bounds.most_context)
    spread = rng.choice((0.0, 0.3, 0.9))

    def length() -> int:
        drawn = min(bounds.most_context, round(middle * math.exp(rng.uniform(-spread, spread))))
        return max(1, round(drawn / page_size)) * page_size  # what is cached is whole pages

    lengths = tuple(length() for _ in range(rows))
    workload = Workload("decode", lengths, **_sampling(rng))
    levels = rng.choice((0, 0, 1, 2, 3))
    return replace(workload, tree=_tree(rng, levels, rows, min(lengths), page_size))


def _tree(rng: random.Random, levels: int, rows: int, most_tokens: int, page_size: int) -> tuple[tuple[int, int], ...]:
    """Up to `levels` levels of common beginnings, in whole pages, of at most `most_tokens` tokens in all."""
    tree: list[tuple[int, int]] = []
    groups, left = 1, most_tokens // page_size
    for _ in range(levels):
        groups *= rng.choice((1, 2, 4, 8, 16)) if tree else rng.choice((1, 1, 2, 4))
        pages = int(left * rng.uniform(0.2, 0.9))
        if pages == 0 or 2 * groups > rows:
            break
        tree.append((groups, pages * page_size))
        left -= pages
    return tuple(tree)


def _prefill(rng: random.Random, bounds: WorkloadBounds) -> Workload:
    most = bounds.most_prompt
    middle = _log_uniform(rng, bounds.least_context, most)
    prompts = _log_uniform(rng, 1, max(1, min(bounds.most_rows, bounds.most_prompt_tokens // middle)))
    spread = rng.choice((0.0, 0.5))
    lengths = tuple(
        max(bounds.least_context, min(most, round(middle * math.exp(rng.uniform(-spread, spread)))))
        for _ in range(prompts)
    )
    return Workload("prefill", lengths)


def _sampling(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        (
            {},
            {},
            {"temperature": 0.8, "top_p": 0.95},
            {"temperature": 1.0, "top_k": 50},
            {"temperature": 0.7},
        )
    )
