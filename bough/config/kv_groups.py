"""How long each layer's KV must be kept, and how layers share pages: pure arithmetic on a model's facts.

Layers with one lifetime form a group. Pages of all groups have equal bytes, so a group with more layers than others is cut
into several lines, each with pages of its own; a group whose layers keep more of a token than others' has smaller pages. How
the layers are cut is chosen such that a long request takes the least memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bough.config.layout import Layout
from bough.config.model_facts import Cross, Gqa, Mixer, ModelFacts
from bough.config.shares import kv_vectors, rank_kv_values, rank_kv_vectors, rank_mixer, stage_layers
from bough.core.errors import ConfigError
from bough.core.kv import Fixed, Grows, KvGroup, KvLayout, Lifetime, Window, order

NOMINAL_TOKENS = 32_768
"""Tokens of the request for which memory is minimised."""
_LINE_COST = 0.01
"""One more line must save at least 1 % of the memory, because each line is work for the host in every step."""
MOST_LINES = 32


@dataclass(frozen=True, slots=True)
class KvPlan:
    """The groups of a model, and the size of their pages."""

    groups: tuple[KvGroup, ...]
    """Layers are numbered over the whole model, counting only layers with a KV cache."""
    values_per_token: int
    """Values that a page holds per token of a column, on the rank with the most."""
    because: str = ""
    """Why layers with windows keep all tokens; empty: they don't."""
    draft_values: int = 0
    """Of `values_per_token`, those of the draft model."""
    vectors_per_token: int = 0
    """Key and value vectors (one per head) that a page holds per token of a column, on the rank with the most."""
    even_vectors: bool = True
    """Whether pages of all lines hold the same number of them."""


def plan_groups(facts: ModelFacts, layout: Layout, *, context: int, page_size: int) -> KvPlan:
    """Groups for requests of up to `context` tokens, and columns of `page_size` of them on each rank of those that share
    contexts."""
    lifetimes = lifetimes_of(facts, context)
    kinds = sorted(dict.fromkeys(lifetimes), key=order)
    if all(isinstance(kind, Grows) for kind in kinds):
        return all_in_one(facts, layout)
    parts = _parts(facts, layout, lifetimes, kinds)
    if parts is None or any(page_size % each for each in parts):
        if facts.reads_media:
            raise ConfigError(
                what=f"layers of {facts.architecture} keep amounts of a token that no pages of equal size fit",
                why="those that read media keep other heads than those that read tokens",
                fix="serve it with another --tp-size, or another --page-size",
            )
        return all_in_one(facts, layout, "layers keep different amounts of a token, which no pages of equal size fit")
    members = [[layer for layer, each in enumerate(lifetimes) if each == kind] for kind in kinds]
    nominal = min(context, NOMINAL_TOKENS)

    def made(per_line: int) -> tuple[KvGroup, ...]:
        return tuple(
            KvGroup(kind, cut_evenly(layers, -(-len(layers) // per_line)), each)
            for kind, layers, each in zip(kinds, members, parts, strict=True)
        )

    def cost(per_line: int) -> float:
        taken = KvLayout(made(per_line), page_size * layout.cp)
        penalty = 1 + _LINE_COST * (taken.column_pages + taken.fixed_pages)
        return per_line * taken.pages_for(nominal) * penalty

    largest = max(len(layers) for layers in members)
    sizes = [n for n in range(1, largest + 1) if sum(-(-len(layers) // n) for layers in members) <= MOST_LINES]
    groups = made(min(sizes, key=cost))
    vectors = [  # by rank: of a page's tokens in a layer, by kind
        {
            kv_vectors(rank_mixer(facts.kv_mixers[layers[0]], layout, rank)) * max(parts) / each
            for layers, each in zip(members, parts, strict=True)
        }
        for rank in range(layout.tp)
    ]
    return KvPlan(
        groups,
        _most_in_line(facts, layout, groups, lambda mixer: sum(mixer.planes)),
        vectors_per_token=_most_in_line(facts, layout, groups, kv_vectors),
        even_vectors=all(len(each) == 1 for each in vectors),
    )


def all_in_one(facts: ModelFacts, layout: Layout, because: str = "", draft: ModelFacts | None = None) -> KvPlan:
    """One group: all layers keep all tokens. `draft`: the draft model, whose layers come after the model's."""
    models = [facts] if draft is None or not draft.layers else [facts, draft]
    group = KvGroup(Grows(), (tuple(range(sum(len(model.kv_mixers) for model in models))),))
    values = [sum(rank_kv_values(model, layout, rank) for model in models) for rank in range(layout.size)]
    drafts = [sum(rank_kv_values(each, layout, rank) for each in models[1:]) for rank in range(layout.size)]
    vectors = [sum(rank_kv_vectors(model, layout, rank) for model in models) for rank in range(layout.size)]
    return KvPlan((group,), max(values), because, max(drafts), vectors_per_token=max(vectors))


def with_draft_layers(facts: ModelFacts, layout: Layout, draft: ModelFacts, page_size: int, context: int) -> KvPlan:
    """The plan of a model and its draft model. All layers keep all tokens, because drafting reads one line only."""
    return all_in_one(facts, layout, _if_windows(facts, context, "what drafts on the device reads all tokens"), draft)


def _if_windows(facts: ModelFacts, context: int, because: str) -> str:
    """Why layers with windows keep all tokens; empty: there are none."""
    return because if any(isinstance(each, Window) for each in lifetimes_of(facts, context)) else ""


def lifetimes_of(facts: ModelFacts, context: int) -> list[Lifetime]:
    """By number of KV cache: how long it is needed by its own layer and by other layers that read it."""
    found: list[Lifetime] = []
    for number, layer in enumerate(facts.layers):
        readers = [other for other in facts.layers if other.kv_from == number]
        read = {lifetime_of(mixer, context) for other in readers for mixer in other.mixers}
        for mixer in layer.kv_mixers:
            needed = {lifetime_of(mixer, context), *read}
            found.append(needed.pop() if len(needed) == 1 else Grows())
    return found


def lifetime_of(mixer: Mixer, context: int) -> Lifetime:
    """How long a layer needs its KV, in requests of up to `context` tokens."""
    if isinstance(mixer, Cross):
        return Fixed(mixer.positions)
    if isinstance(mixer, Gqa) and mixer.causal:
        if mixer.chunk is not None and mixer.chunk < context:
            return Window(mixer.chunk, chunked=True)
        if mixer.window is not None and mixer.window < context:
            return Window(mixer.window)
    return Grows()


def stage_groups(groups: Sequence[KvGroup], held: range) -> tuple[KvGroup, ...]:
    """The groups with only the layers of one pipeline stage, numbered from its first layer."""
    return tuple(
        KvGroup(
            group.lifetime,
            cut_evenly(
                [layer - held.start for line in group.layers for layer in line if layer in held], group.num_lines
            ),
            group.parts,
        )
        for group in groups
    )


def why_kv_stays(facts: ModelFacts, groups: Sequence[KvGroup], *, shares_context: bool = False) -> str:
    """Why KV that was computed at some positions can't be used at others; empty: it can. `shares_context`: ranks share the
    tokens of each sequence."""
    if facts.state_mixers:
        return "some of its layers keep a state of all tokens before, in their order"
    if shares_context:
        return "which rank keeps a token depends on its position"
    if not facts.keys_turn:
        return "its keys and values hold positions that can't be changed afterwards"
    if any(isinstance(group.lifetime, Fixed) for group in groups):
        return "its tokens depend on media"
    if any(isinstance(group.lifetime, Window) for group in groups):
        return "some of its layers keep the last tokens of a context only"
    return ""


def cut_evenly(layers: Sequence[int], num_lines: int) -> tuple[tuple[int, ...], ...]:
    """Cuts consecutive layers into lines whose lengths differ by at most one."""
    bounds = [-(-len(layers) * line // num_lines) for line in range(num_lines + 1)]
    return tuple(tuple(layers[a:b]) for a, b in pairwise(bounds))


def held_layers(facts: ModelFacts, layout: Layout, stage: int) -> range:
    """The layers with a KV cache that a stage holds."""
    held = stage_layers(facts.num_layers, layout.pp, stage, layout.stage_sizes)
    counts = [len(layer.kv_mixers) for layer in facts.layers]
    return range(sum(counts[: held.start]), sum(counts[: held.stop]))


def _parts(
    facts: ModelFacts, layout: Layout, lifetimes: Sequence[Lifetime], kinds: Sequence[Lifetime]
) -> list[int] | None:
    """By kind of layer: pages per column of its lines, such that all pages have equal bytes on every rank. None:
    impossible."""
    found: set[tuple[int, ...]] = set()
    for rank in range(layout.tp):
        planes = []
        for kind in kinds:
            kept = {
                rank_mixer(mixer, layout, rank).planes
                for mixer, lifetime in zip(facts.kv_mixers, lifetimes, strict=True)
                if lifetime == kind
            }
            if len(kept) > 1:
                return None
            planes.append(kept.pop())
        least = min(planes, key=sum)
        ratios = [sum(each) // sum(least) for each in planes]
        if any(each != tuple(ratio * plane for plane in least) for each, ratio in zip(planes, ratios, strict=True)):
            return None
        found.add(tuple(ratios))
    return list(found.pop()) if len(found) == 1 else None


def _most_in_line(facts: ModelFacts, layout: Layout, groups: Sequence[KvGroup], kept_by: Callable[[Mixer], int]) -> int:
    """Values that a page holds per token of a column, on the rank with the most: the layers of the longest line there;
    the average if ranks share contexts. `kept_by`: values that one layer keeps per token."""
    most = 0
    for rank in range(layout.size):
        held = held_layers(facts, layout, layout.place(rank)["pp"])
        for group in stage_groups(groups, held):
            longest = max((len(line) for line in group.layers), default=0)
            first = next((layer for line in group.layers for layer in line), None)
            if first is not None:
                kept = kept_by(rank_mixer(facts.kv_mixers[held.start + first], layout, rank))
                most = max(most, longest * kept // group.parts)
    return -(-most // layout.cp)
