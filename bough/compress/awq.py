"""AWQ: input channels that matter are scaled up before rounding, and what produces them is scaled down by as much.

The model computes the same as before, but the weights of channels with large inputs lose less when they are rounded. Scales
go into the norm before a projection, or into the rows of the projection before it (values before the attention's output, up
before down). O rows, D columns: the channels that are scaled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bough.compress.grid import output_error, plain_grid
from bough.compress.open_model import OpenModel
from bough.layers.attention import Attention
from bough.layers.blocks import ParallelBlock, PreNormBlock, SandwichBlock, TwoNormParallelBlock
from bough.layers.mlp import GatedMlp, Mlp
from bough.layers.moe import MixtureOfExperts
from bough.layers.norm import LayerNorm, RMSNorm

_POWERS = tuple(0.05 * step for step in range(1, 21))
"""Of a channel's size, that its scale may be."""
_ROWS = 1024
"""Rows of a weight that are tried, at most."""


@dataclass(frozen=True, slots=True)
class Fold:
    """A place where scales can be hidden. All names are slots without their last word, `layers.0.attn.qkv.q`."""

    consumers: tuple[str, ...]
    """Projections that read the channels and are rounded."""
    others: tuple[str, ...] = ()
    """Those that read them and are not."""
    norm: str = ""
    offset: float = 0.0
    """The norm that writes the channels, and what it adds to its weights..."""
    producer: str = ""
    repeat: tuple[int, int] = (1, 1)
    """...or the projection that does: each run of `repeat[1]` of its rows `repeat[0]` times (values that several heads
    read)."""


def folds_of(opened: OpenModel, prefix: str) -> Iterator[Fold]:
    """The places in one block, in an order in which they can be used one after the other."""
    block = opened.model.get_submodule(prefix.removesuffix("."))
    known = isinstance(block, PreNormBlock | SandwichBlock | ParallelBlock | TwoNormParallelBlock)
    if not known:
        return
    parts = dict(block.named_children())
    attn, mlp = parts["attn"], parts["mlp"]
    attn_reads = _attention_reads(attn, f"{prefix}attn")
    mlp_reads, mlp_others = _mlp_reads(mlp, f"{prefix}mlp")
    if isinstance(block, ParallelBlock):
        found = [(f"{prefix}attn_norm", parts["attn_norm"], (*attn_reads, *mlp_reads), mlp_others)]
        found = found if attn_reads and mlp_reads else []
    else:
        found = [
            (f"{prefix}attn_norm", parts["attn_norm"], attn_reads, ()),
            (f"{prefix}mlp_norm", parts["mlp_norm"], mlp_reads, mlp_others),
        ]
    for name, norm, reads, others in found:
        if reads and f"{name}.weight" in opened.source_of and isinstance(norm, RMSNorm | LayerNorm):
            offset = norm.offset if isinstance(norm, RMSNorm) else 0.0
            yield Fold(reads, others, norm=name, offset=offset)
    yield from _between(attn, mlp, prefix)


def _attention_reads(attn: nn.Module, name: str) -> tuple[str, ...]:
    return tuple(f"{name}.qkv.{part}" for part in "qkv") if isinstance(attn, Attention) else ()


def _mlp_reads(mlp: nn.Module, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(what is rounded, what is not) of what reads the norm before it."""
    if isinstance(mlp, GatedMlp):
        return (f"{name}.gate_up.gate", f"{name}.gate_up.up"), ()
    if isinstance(mlp, Mlp):
        return (f"{name}.up",), ()
    if not isinstance(mlp, MixtureOfExperts) or mlp.facts.clamped is not None or not mlp.facts.gated:
        return (), ()
    experts = range(mlp.experts.num_experts)
    reads = [f"{name}.experts.{expert}.{part}" for expert in experts for part in ("gate", "up")]
    others = [f"{name}.router"]
    if mlp.shared is not None:
        reads += [f"{name}.shared.gate_up.gate", f"{name}.shared.gate_up.up"]
        others += [] if mlp.shared.gate is None else [f"{name}.shared.gate"]
    return tuple(reads), tuple(others)


def _between(attn: nn.Module, mlp: nn.Module, prefix: str) -> Iterator[Fold]:
    """Projections whose outputs reach another one channel by channel."""
    if isinstance(attn, Attention) and attn.facts.clip is None:
        repeat = (attn.facts.num_heads // attn.facts.num_kv_heads, attn.facts.head_dim)
        yield Fold((f"{prefix}attn.out",), producer=f"{prefix}attn.qkv.v", repeat=repeat)
    if isinstance(mlp, GatedMlp):
        yield Fold((f"{prefix}mlp.down",), producer=f"{prefix}mlp.gate_up.up")
    if isinstance(mlp, MixtureOfExperts) and mlp.facts.clamped is None and mlp.facts.gated:
        for expert in range(mlp.experts.num_experts):
            here = f"{prefix}mlp.experts.{expert}"
            yield Fold((f"{here}.down",), producer=f"{here}.up")


def fold_scales(opened: OpenModel, fold: Fold, grams: dict[str, Tensor], bits: int, group: int) -> None:
    """Finds the scales that lose least, and puts them into the model; Gram matrices become those of the scaled inputs."""
    seen = [name for name in fold.consumers if name in grams]
    names = [opened.source_of[f"{name}.weight"][0] for name in seen]
    if not seen or any(len(opened.tensors[name].shape) != 2 or opened.tensors[name].shape[1] % group for name in names):
        return
    tried: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}  # tensors of one input together, each once
    for slot, name in zip(seen, names, strict=True):
        tried.setdefault(id(grams[slot]), (grams[slot], {}))[1].setdefault(name, opened.weight(name))
    pairs = [(gram, _some(torch.cat(list(weights.values())))) for gram, weights in tried.values()]
    sizes_D = torch.stack([gram.diagonal() for gram, _ in pairs]).sum(0).sqrt()
    scale_D = _best(_shared(sizes_D, fold.repeat), pairs, bits, group)
    if scale_D is None:
        return
    _apply(opened, fold, scale_D)
    for gram, _ in pairs:
        scaled = gram / scale_D / scale_D[:, None]
        grams |= {slot: scaled for slot in seen if grams[slot] is gram}


def _some(weight_OD: Tensor) -> Tensor:
    """Evenly spread rows."""
    return weight_OD[:: max(1, len(weight_OD) // _ROWS)]


def _shared(sizes_D: Tensor, repeat: tuple[int, int]) -> Tensor:
    """Channels that come from one row of the producer get one size."""
    times, run = repeat
    if times == 1:
        return sizes_D
    by_row = sizes_D.view(-1, times, run).square().mean(1, keepdim=True).sqrt()
    return by_row.expand(-1, times, -1).reshape(-1)


def _best(sizes_D: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], bits: int, group: int) -> Tensor | None:
    """The scales with the least error; None: those without any."""

    def error_of(scale_D: Tensor) -> float:
        total = 0.0
        for gram, weight_OD in pairs:
            scaled = weight_OD * scale_D
            rounded = plain_grid(scaled, bits, group, torch.float16).rounded(scaled) / scale_D
            total += output_error(rounded - weight_OD, gram)
        return total

    best, least = None, error_of(torch.ones_like(sizes_D))
    sizes_D = sizes_D.clamp(min=1e-8)
    for power in _POWERS:
        scale_D = sizes_D.pow(power).clamp(min=1e-4)
        scale_D = scale_D / (scale_D.max() * scale_D.min()).sqrt()
        error = error_of(scale_D)
        if error < least:
            best, least = scale_D, error
    return best


def _apply(opened: OpenModel, fold: Fold, scale_D: Tensor) -> None:
    slots = (*fold.consumers, *fold.others)
    for name in dict.fromkeys(opened.source_of[f"{slot}.weight"][0] for slot in slots):
        opened.replace(name, opened.weight(name) * scale_D)
    if fold.norm:
        for last, offset in (("weight", fold.offset), ("bias", 0.0)):
            if f"{fold.norm}.{last}" in opened.source_of:
                name, _ = opened.source_of[f"{fold.norm}.{last}"]
                opened.replace(name, (opened.weight(name) + offset) / scale_D - offset)
        return
    times, run = fold.repeat
    by_row = scale_D.view(-1, times, run)[:, 0].flatten() if times > 1 else scale_D
    for last in ("weight", "bias"):
        if f"{fold.producer}.{last}" not in opened.source_of:
            continue
        name, rows = opened.rows_of(f"{fold.producer}.{last}")
        value = opened.weight(name)
        divisor = by_row if last == "bias" else by_row[:, None]
        value[rows.to(value.device)] /= divisor
        opened.replace(name, value)
