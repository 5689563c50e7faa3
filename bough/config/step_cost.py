"""How long a step of an engine takes on given hardware, spread over given ranks: arithmetic on shapes, without a device.

Every product takes as long as its weights take to be read, or as its operations take to be computed, whichever is longer;
attention as its keys and values, or its operations; collectives as their bytes take over the links. The constants are what
`benchmarks/fit_step_cost.py` makes of 11 measurements on one H200 (`benchmarks/fleet.md` has the error on those that it did
not see).
Nothing here was measured on several GPUs: links have their makers' rates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from bough.config.layout import Layout
from bough.config.model_facts import Cross, Gqa, LayerFacts, Mixer, Mla, ModelFacts, Moe
from bough.config.shares import rank_ffn, rank_kv_values, rank_mixer, rank_parameters, stage_layers
from bough.config.state_facts import StateMixer
from bough.core.errors import ConfigError

GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One GPU, its machine, and the network between machines. Rates are sustained rates."""

    name: str
    memory_bytes: int
    read_bytes_s: float
    operations_s: float
    """Operations a second of matrix products in bfloat16."""
    fp8_operations_s: float
    """Operations a second of matrix products in FP8."""
    link_bytes_s: float
    """Bytes per second to the other GPUs of a machine, in one direction."""
    net_bytes_s: float
    """Bytes per second and GPU to other machines, in one direction."""
    per_machine: int = 8


HARDWARE = {
    each.name: each
    for each in (
        Hardware(
            name="a100", memory_bytes=80 * 10**9, read_bytes_s=1.8e12, operations_s=250e12, fp8_operations_s=250e12,
            link_bytes_s=240e9, net_bytes_s=20e9,
        ),
        Hardware(
            name="h100", memory_bytes=80 * 10**9, read_bytes_s=3.0e12, operations_s=650e12, fp8_operations_s=1250e12,
            link_bytes_s=370e9, net_bytes_s=42e9,
        ),
        Hardware(
            name="h200", memory_bytes=141 * 10**9, read_bytes_s=4.26e12, operations_s=687e12, fp8_operations_s=1300e12,
            link_bytes_s=370e9, net_bytes_s=42e9,
        ),
        Hardware(
            name="b200", memory_bytes=180 * 10**9, read_bytes_s=7.0e12, operations_s=1600e12, fp8_operations_s=3200e12,
            link_bytes_s=740e9, net_bytes_s=42e9,
        ),
        Hardware(
            name="l40s", memory_bytes=48 * 10**9, read_bytes_s=0.75e12, operations_s=250e12, fp8_operations_s=450e12,
            link_bytes_s=22e9, net_bytes_s=12e9,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Share of the rates that is reached, and fixed costs."""

    read_share: float = 1.0
    compute_share: float = 1.01
    """Above 1: the rates are those of products that are repeated until power limits them."""
    attention_read_share: float = 0.67
    attention_compute_share: float = 0.815
    expert_read_share: float = 0.829
    expert_compute_share: float = 0.385
    layer_s: float = 13e-6
    """Seconds per layer of small kernels."""
    step_s: float = 100e-6
    """Seconds per step of sampling, inputs and the host."""
    row_s: float = 1.02e-6
    """Seconds per row of sampling."""
    eager_layer_s: float = 100e-6
    """Seconds of launches per layer of a step that has more tokens than `graph_tokens`."""
    graph_tokens: int = 512
    """Tokens of the largest step that runs as a graph. From about four times as many on, products hide the launches."""
    link_s: float = 8e-6
    """Seconds of a collective within a machine, at least."""
    net_s: float = 25e-6
    """Seconds of a collective between machines, at least."""
    imbalance: float = 1.2
    """Expert load of the busiest rank, relative to the mean."""


FITTED = Constants()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What one replica of attention computes in a step."""

    tokens: int
    rows: int
    """Rows that sample."""
    read_tokens: int
    """KV tokens that rows read, each for its whole context."""
    pairs: float
    """Queries times the keys that each sees."""

    @staticmethod
    def of(num_query: Sequence[int], context: Sequence[int], rows: int) -> StepLoad:
        """`num_query` tokens behind `context` tokens, by row."""
        pairs = sum(query * (before + (query + 1) / 2) for query, before in zip(num_query, context, strict=True))
        return StepLoad(tokens=sum(num_query), rows=rows, read_tokens=sum(context) + sum(num_query), pairs=pairs)


NO_LOAD = StepLoad(tokens=0, rows=0, read_tokens=0, pairs=0.0)


@dataclass(frozen=True, slots=True)
class StageCost:
    """Cost of a step on the slowest pipeline stage."""

    stage_s: float
    hop_s: float
    """Seconds to send activations from one stage to the next."""


@dataclass(frozen=True)
class FleetModel:
    """A model on ranks of some hardware."""

    facts: ModelFacts
    layout: Layout
    hardware: Hardware
    weight_bytes: float = 2.0
    """Bytes per weight: 2, or 1 in FP8."""
    kv_bytes: float = 2.0
    constants: Constants = FITTED

    @cached_property
    def _stages(self) -> list[list[tuple[LayerFacts, int]]]:
        """Per stage: kinds of layers, with their number."""
        made = []
        for stage in range(self.layout.pp):
            held = stage_layers(self.facts.num_layers, self.layout.pp, stage, self.layout.stage_sizes)
            made.append(list(Counter(self.facts.layers[at] for at in held).items()))
        return made

    @cached_property
    def room_tokens(self) -> int:
        """Tokens whose KV fits beside the weights, in each replica of attention. Raises ConfigError if weights don't fit."""
        ranks = range(self.layout.size)
        weights = max(rank_parameters(self.facts, self.layout, rank) for rank in ranks) * self.weight_bytes
        values = max(rank_kv_values(self.facts, self.layout, rank) for rank in ranks)
        free = 0.9 * self.hardware.memory_bytes - weights - 2 * GIB
        if free < values * self.kv_bytes * 1024:
            raise ConfigError(
                what=f"{weights / 1e9:.0f} GB of weights on each rank leave no room on a {self.hardware.name}",
                why=f"it has {self.hardware.memory_bytes / 1e9:.0f} GB",
                fix="use more ranks, or FP8 weights",
            )
        return int(free / (values * self.kv_bytes))

    def cost(self, loads: Sequence[StepLoad]) -> StageCost:
        """The cost of a step. `loads`: one per replica of attention; they run a step together."""
        widest = max(loads, key=lambda load: load.tokens)
        if not widest.tokens:
            return StageCost(0.0, 0.0)
        slowest = max(self._stage_s(stage, widest) for stage in range(self.layout.pp))
        hop = 0.0
        if self.layout.pp > 1:
            across = self.layout.size > self.hardware.per_machine
            hop = self._move_s(widest.tokens * self.facts.hidden * 2 / self.layout.heads, across)
        return StageCost(slowest, hop)

    # -- one stage -------------------------------------------------------------------------------------------------

    def _stage_s(self, stage: int, load: StepLoad) -> float:
        constants = self.constants
        rank = stage * self.layout.tp
        total = constants.step_s + constants.row_s * load.rows
        for layer, count in self._stages[stage]:
            seconds = constants.layer_s + self._mixers_s(layer, load, rank) + self._ffn_s(layer, load, rank)
            if load.tokens > constants.graph_tokens:
                seconds = max(seconds, constants.eager_layer_s)
            total += count * (seconds + self._collectives_s(layer, load))
        if stage == self.layout.pp - 1:
            rows = -(-self.facts.vocab // self.layout.heads)
            total += self._product_s(rows * self.facts.hidden, load.rows)
        return total

    def _product_s(self, parameters: float, tokens: float) -> float:
        operations = self.hardware.operations_s if self.weight_bytes >= 2 else self.hardware.fp8_operations_s
        read = parameters * self.weight_bytes / (self.hardware.read_bytes_s * self.constants.read_share)
        return max(read, 2 * tokens * parameters / (operations * self.constants.compute_share))

    def _mixers_s(self, layer: LayerFacts, load: StepLoad, rank: int) -> float:
        total = 0.0
        tokens = load.tokens if load.tokens < 128 * self.layout.cp else load.tokens / self.layout.cp
        for mixer in layer.mixers:
            mine = rank_mixer(mixer, self.layout, rank)
            weights = replace(layer, mixers=(mine,), ffn=None).num_parameters(self.facts.hidden)
            total += self._product_s(weights, tokens)
            if isinstance(mine, StateMixer):  # a row's state is read and written, in float32
                moved = 2 * 4 * mine.state_values * load.rows
                total += moved / (self.hardware.read_bytes_s * self.constants.attention_read_share)
                continue
            if isinstance(mine, Cross):
                total += self._cross_s(mine, load)
                continue
            seen = self._seen(mixer, load) / self.layout.cp
            kept = seen * sum(mine.planes)
            if isinstance(mine, Mla) and mine.indexer is not None:  # it scores all tokens
                kept += (1 - seen) * mine.indexer.head_dim
            read = load.read_tokens * kept * self.kv_bytes
            width = mine.head_dim + mine.value_dim if isinstance(mine, Gqa) else 2 * mine.kv_rank + mine.rope_dim
            operations = 2 * seen * load.pairs * mine.num_heads * width
            total += max(
                read / (self.hardware.read_bytes_s * self.constants.attention_read_share),
                operations / (self.hardware.operations_s * self.constants.attention_compute_share),
            )
        return total

    def _cross_s(self, mine: Cross, load: StepLoad) -> float:
        """Every token reads all media of its row."""
        read = load.rows * mine.positions * sum(mine.planes) * self.kv_bytes
        operations = 4 * load.tokens * mine.positions * mine.num_heads * mine.head_dim
        return max(
            read / (self.hardware.read_bytes_s * self.constants.attention_read_share),
            operations / (self.hardware.operations_s * self.constants.attention_compute_share),
        )

    @staticmethod
    def _seen(mixer: Mixer, load: StepLoad) -> float:
        """Share of keys that a window or sparse attention leaves for an average row."""
        most = mixer.window if isinstance(mixer, Gqa) else None
        if isinstance(mixer, Mla) and mixer.sparse is not None:
            most = mixer.sparse.topk
        if most is None or not load.tokens:
            return 1.0
        mean = max(1.0, load.pairs / load.tokens)
        return min(1.0, most / mean)

    def _ffn_s(self, layer: LayerFacts, load: StepLoad, rank: int) -> float:
        if layer.ffn is None:
            return 0.0
        ffn, mine = layer.ffn, rank_ffn(layer.ffn, self.layout, rank)
        tokens = load.tokens * self.layout.dp
        if not isinstance(ffn, Moe) or not isinstance(mine, Moe):
            return self._product_s(mine.num_parameters(self.facts.hidden), tokens)
        hidden, constants = self.facts.hidden, self.constants
        chosen = ffn.experts_per_token / ffn.num_experts
        expert = (3 if ffn.gated else 2) * hidden * mine.intermediate
        touched = mine.num_experts * (1 - (1 - chosen) ** tokens)
        operations = self.hardware.operations_s if self.weight_bytes >= 2 else self.hardware.fp8_operations_s
        skew = constants.imbalance if self.layout.ep > 1 else 1.0
        experts = skew * max(
            touched * expert * self.weight_bytes / (self.hardware.read_bytes_s * constants.expert_read_share),
            2 * tokens * chosen * mine.num_experts * expert / (operations * constants.expert_compute_share),
        )
        shared = tokens / self.layout.tp if self.layout.whole_shared else tokens
        beside = self._product_s(3 * hidden * mine.shared_intermediate, shared) if mine.shared_intermediate else 0.0
        return experts + beside + self._product_s(hidden * ffn.num_experts, load.tokens)

    # -- links -----------------------------------------------------------------------------------------------------

    def _collectives_s(self, layer: LayerFacts, load: StepLoad) -> float:
        layout = self.layout
        stream = load.tokens * self.facts.hidden * 2.0
        total = self._sum_s(layout.heads, stream)
        if layer.ffn is None or layout.tp == 1:
            return total
        if isinstance(layer.ffn, Moe) and layout.ep > 1 and layout.whole_shared:
            sent = stream / layout.heads * min(layer.ffn.experts_per_token, layout.ep - 1)
            return total + 2 * self._move_s(sent, layout.tp > self.hardware.per_machine)
        if layout.dp * layout.cp > 1:
            every = stream * layout.dp
            return (
                total
                + 2 * self._move_s(every, layout.tp > self.hardware.per_machine)
                + self._sum_s(layout.heads, stream)
            )
        return total + self._sum_s(layout.tp, stream)

    def _sum_s(self, ranks: int, num_bytes: float) -> float:
        """An all-reduce."""
        if ranks == 1:
            return 0.0
        return self._move_s(2 * (ranks - 1) / ranks * num_bytes, ranks > self.hardware.per_machine)

    def _move_s(self, num_bytes: float, across: bool) -> float:
        if across:
            return self.constants.net_s + num_bytes / self.hardware.net_bytes_s
        return self.constants.link_s + num_bytes / self.hardware.link_bytes_s
