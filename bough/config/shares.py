"""Which part of a model each rank holds: pure arithmetic, used to shard layers and to plan memory. Dimensions that
divide are split evenly. Others are split unevenly: ranks then differ by one head, or by a few intermediate units.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from bough.config.layout import Layout
from bough.config.model_facts import (
    Cross,
    Dense,
    FeedForward,
    Gqa,
    LayerFacts,
    Mixer,
    Mla,
    ModelFacts,
    Moe,
)
from bough.config.state_facts import GatedDelta, Lightning, Mamba, Mamba2, ShortConv, StateMixer
from bough.core.errors import ConfigError

_COARSEST_CUT = 64
"""A dimension that does not divide is cut at multiples of this, or of a smaller power of two, which kernels and quantised
blocks prefer."""
_CUTS_PER_RANK = 8
"""Pieces that each rank should get at least: with fewer, a smaller cut is taken, so that no rank has more than about 1/8
more than another."""


def cut(total: int, size: int, rank: int, what: str, flag: str = "--tp-size") -> slice:
    """The part of `range(total)` that is a rank's. Raises ConfigError if there are more ranks than parts; `flag` says how
    many there are."""
    if total < size:
        raise ConfigError(
            what=f"{total} {what} can't be split over {size} ranks",
            why="some ranks would have none",
            fix=f"choose a {flag} of at most {total}",
            param=flag.strip("-").replace("-", "_"),
        )
    grain = 1
    while total % size and grain < _COARSEST_CUT and total // (2 * grain) >= _CUTS_PER_RANK * size:
        grain *= 2
    pieces = total // grain

    def bound(at: int) -> int:
        return total if at == size else pieces * at // size * grain

    return slice(bound(rank), bound(rank + 1))


class HeadShare(NamedTuple):
    """A rank's query heads, and the key-value heads that they read. As many queries read each of them."""

    heads: slice
    kv_heads: slice
    holders: int = 1
    """How many ranks hold the same key-value heads."""


def head_share(num_heads: int, num_kv_heads: int, size: int, rank: int) -> HeadShare:
    """The heads of a rank. With fewer key-value heads than ranks, several ranks hold the same one, and split its queries.

    Raises ConfigError if a rank would have no query head.
    """
    group = num_heads // num_kv_heads
    if num_kv_heads >= size:
        low, high = num_kv_heads * rank // size, num_kv_heads * (rank + 1) // size
        return HeadShare(slice(low * group, high * group), slice(low, high))
    most_sharers = -(-size // num_kv_heads)
    if group < most_sharers:
        raise ConfigError(
            what=f"{num_heads} attention heads can't be split over {size} ranks",
            why=f"{most_sharers} ranks would share the {group} heads that read the same keys",
            fix=f"choose a --tp-size of at most {num_heads}",
            param="tp_size",
        )
    begins = [size * head // num_kv_heads for head in range(num_kv_heads + 1)]  # of the ranks that hold each head
    head = bisect_right(begins, rank) - 1
    sharers, place = begins[head + 1] - begins[head], rank - begins[head]
    first = head * group
    heads = slice(first + group * place // sharers, first + group * (place + 1) // sharers)
    return HeadShare(heads, slice(head, head + 1), sharers)


def width(part: slice) -> int:
    """Size of the part."""
    return int(part.stop) - int(part.start)


def rank_mixer(mixer: Mixer, layout: Layout, rank: int) -> Mixer:
    """What a rank holds of a mixer."""
    match mixer:
        case Gqa() | Cross():
            share = head_share(mixer.num_heads, mixer.num_kv_heads, layout.heads, layout.place(rank)["heads"])
            return replace(mixer, num_heads=width(share.heads), num_kv_heads=width(share.kv_heads))
        case Mla() | Lightning():
            heads = cut(mixer.num_heads, layout.heads, layout.place(rank)["heads"], "attention heads")
            return replace(mixer, num_heads=width(heads))
        case GatedDelta():
            share = head_share(mixer.num_value_heads, mixer.num_key_heads, layout.heads, layout.place(rank)["heads"])
            return replace(mixer, num_value_heads=width(share.heads), num_key_heads=width(share.kv_heads))
        case Mamba2():
            share = head_share(mixer.num_heads, mixer.num_groups, layout.heads, layout.place(rank)["heads"])
            return replace(mixer, num_heads=width(share.heads), num_groups=width(share.kv_heads))
        case Mamba():
            channels = cut(mixer.inner, layout.heads, layout.place(rank)["heads"], "channels")
            return replace(mixer, inner=width(channels))
        case ShortConv():
            channels = cut(mixer.channels, layout.heads, layout.place(rank)["heads"], "channels")
            return replace(mixer, channels=width(channels))


def rank_ffn(ffn: FeedForward, layout: Layout, rank: int) -> FeedForward:
    """What a rank holds of a feed-forward block."""
    place = layout.place(rank)
    match ffn:
        case Dense():
            units = cut(ffn.intermediate, layout.tp, place["tp"], "inner units")
            return replace(ffn, intermediate=width(units))
        case Moe():
            units = cut(ffn.intermediate, layout.units, place["units"], "inner units of an expert")
            experts = expert_slots(ffn.num_experts, layout.redundant, layout.ep, place["ep"])
            shared = ffn.shared_intermediate
            if shared and not layout.whole_shared:
                shared = width(cut(shared, layout.tp, place["tp"], "inner units of the shared expert"))
            held = width(experts)
            return replace(ffn, num_experts=held, intermediate=width(units), shared_intermediate=shared)


def expert_slots(num_experts: int, redundant: int, size: int, rank: int) -> slice:
    """The slots of a rank, each of which holds one expert. Raises ConfigError if ranks would have none, or if there are
    redundant ones and ranks would not have equally many."""
    if redundant and (num_experts + redundant) % size:
        fitting = -num_experts % size
        raise ConfigError(
            what=f"{num_experts} experts and {redundant} copies can't be spread evenly over {size} groups of ranks",
            why="with copies, each group holds equally many",
            fix=f"choose --ep-num-redundant-experts {fitting}, or {fitting + size}",
            param="ep_num_redundant_experts",
        )
    return cut(num_experts + redundant, size, rank, "experts", flag="--ep-size")


def stage_layers(num_layers: int, num_stages: int, stage: int, sizes: Sequence[int] = ()) -> range:
    """The layers of a stage: as many as `sizes` says, or evenly. The last stage also has the output head: where layers don't
    divide, earlier ones have more.

    Raises ConfigError if there are more stages than layers, or if sizes are not those of all layers."""
    if sizes:
        if sum(sizes) != num_layers:
            raise ConfigError(
                what=f"--pp-layer-partition has {sum(sizes)} layers in all",
                why=f"the model has {num_layers}",
                fix="give numbers of layers whose sum is that of the model",
                param="pp_layer_partition",
            )
        return range(sum(sizes[:stage]), sum(sizes[: stage + 1]))
    if num_layers < num_stages:
        raise ConfigError(
            what=f"{num_layers} layers can't be split over {num_stages} stages",
            why="some stages would have none",
            fix=f"choose a --pp-size of at most {num_layers}",
            param="pp_size",
        )
    return range(-(-num_layers * stage // num_stages), -(-num_layers * (stage + 1) // num_stages))


def rank_parameters(facts: ModelFacts, layout: Layout, rank: int) -> int:
    """Number of weights that a rank holds, computed from shapes."""
    stage = layout.place(rank)["pp"]
    rows = -(-facts.vocab // layout.heads)
    total = facts.end_parameters(rows=rows) if stage in (0, layout.pp - 1) else 0
    if total and layout.pp > 1 and not facts.tie_embeddings:
        total -= rows * facts.hidden  # the embedding is on the first stage, the head on the last
    if facts.tower is not None and stage == 0:
        total += facts.tower.num_parameters  # every rank that begins the model holds all of it
    for layer in _held_layers(facts, layout, rank):
        mixers = tuple(rank_mixer(mixer, layout, rank) for mixer in layer.mixers)
        mine = None if layer.ffn is None else rank_ffn(layer.ffn, layout, rank)
        total += facts.block_parameters + replace(layer, mixers=mixers, ffn=mine).num_parameters(facts.hidden)
        if isinstance(layer.ffn, Moe) and isinstance(mine, Moe):
            # The router is whole on each rank, and knows nothing of copies.
            total += facts.hidden * (layer.ffn.num_experts - mine.num_experts)
    return total


def rank_kv_values(facts: ModelFacts, layout: Layout, rank: int) -> int:
    """Values per token in a rank's KV cache; the average if ranks share the tokens of a sequence."""
    held = _held_layers(facts, layout, rank)
    values = sum(sum(rank_mixer(mixer, layout, rank).planes) for layer in held for mixer in layer.kv_mixers)
    return -(-values // layout.cp)


def rank_state_values(facts: ModelFacts, layout: Layout, rank: int) -> int:
    """Values of a request's state on a rank, in the layers that keep one."""
    return sum(mixer.state_values for mixer in rank_states(facts, layout, rank))


def rank_states(facts: ModelFacts, layout: Layout, rank: int) -> list[StateMixer]:
    """What a rank holds of the mixers that keep a state."""
    mixers = [mixer for layer in _held_layers(facts, layout, rank) for mixer in layer.state_mixers]
    mine = [rank_mixer(mixer, layout, rank) for mixer in mixers]
    return [mixer for mixer in mine if isinstance(mixer, StateMixer)]


def rank_kv_vectors(facts: ModelFacts, layout: Layout, rank: int) -> int:
    """The same, counted as key and value vectors, one per head."""
    held = _held_layers(facts, layout, rank)
    vectors = sum(kv_vectors(rank_mixer(mixer, layout, rank)) for layer in held for mixer in layer.kv_mixers)
    return -(-vectors // layout.cp)


def kv_vectors(mixer: Mixer) -> int:
    """Vectors per token in the KV cache: one per head, for keys and for values."""
    return len(mixer.planes) * mixer.num_kv_heads


def _held_layers(facts: ModelFacts, layout: Layout, rank: int) -> list[LayerFacts]:
    stage = layout.place(rank)["pp"]
    return [facts.layers[each] for each in stage_layers(facts.num_layers, layout.pp, stage, layout.stage_sizes)]


def largest_share(facts: ModelFacts, layout: Layout) -> float:
    """The largest share of the weights on one rank, which must fit into memory."""
    return max(rank_parameters(facts, layout, rank) for rank in range(layout.size)) / facts.num_parameters()


def uneven_heads(facts: ModelFacts, layout: Layout) -> str:
    """A sentence for the log if ranks have unequal numbers of heads; otherwise empty."""
    for mixer in facts.mixers:
        held = [rank_mixer(mixer, layout, rank).num_heads for rank in range(layout.tp)]
        if max(held) != min(held):
            more = max(held) * len(held) / sum(held) - 1
            return (
                f"{mixer.num_heads} attention heads are split unevenly over {layout.heads} ranks "
                f"({', '.join(map(str, held))}): the fullest computes {more:.0%} more than the mean"
            )
    return ""
