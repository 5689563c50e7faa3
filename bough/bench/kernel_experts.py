"""Experts of many tokens: the grouped Hopper kernel in each of its tilings, compared with the portable kernel and
torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bough.kernels.activation import silu_mul
from bough.kernels.linear.tuning import time_us
from bough.kernels.moe import grouped_hopper, reference, triton as portable
from bough.kernels.moe.grouped_hopper import HIGH, LOW, MIDDLE, GroupedTilings, Weights
from bough.kernels.moe.grouping import group_tokens, sum_parts

EXPERTS, WIDTH, INNER, PER_TOKEN = 128, 2048, 768, 8
"""Qwen3-30B-A3B's."""
CUTS = {
    "256 rows": GroupedTilings(HIGH[0], HIGH[1]),
    "128 rows": GroupedTilings(MIDDLE[0], MIDDLE[0]),
    "64 rows": GroupedTilings(LOW[0], LOW[0]),
}
FP8_CUTS = {
    "FP8, 256 rows": GroupedTilings(HIGH[0], HIGH[2]),
    "FP8, 128 rows": CUTS["128 rows"],
    "FP8, 64 rows": CUTS["64 rows"],
}


def prepare(device: torch.device) -> None:
    """Compiles all kernels that are timed."""
    grouped_hopper.load_cuts(list(CUTS.values()), device, fp8=False)
    grouped_hopper.load_cuts(list(FP8_CUTS.values()), device, fp8=True)


@dataclass(frozen=True, slots=True)
class TimedExperts:
    """One way of computing a layer's experts."""

    case: str
    us: float
    flops: float
    error: float
    """Error relative to float32."""


@dataclass(frozen=True, slots=True)
class _Given:
    x: Tensor
    weights: Weights
    choice: tuple[Tensor, Tensor]

    def portable(self) -> Tensor:
        return portable.portable_experts(self.x, self.weights.gate_up_E2FD, self.weights.down_EDF, *self.choice)

    def grouped(self, cut: GroupedTilings | None = None, weights: Weights | None = None) -> Tensor:
        out = torch.empty_like(self.x)
        grouped_hopper.experts(self.x, weights or self.weights, *self.choice, out, cut)
        return out

    def library(self) -> Tensor:
        """By torch's own grouped product, over rows laid out as ours are."""
        grouping, rows, _ = group_tokens(self.x, self.choice[1], EXPERTS, 64)
        ids = self.choice[1].flatten().long()
        counts = torch.zeros(EXPERTS, dtype=torch.int64, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))
        ends = ((counts + 63) // 64 * 64).cumsum(0).to(torch.int32)
        hidden = silu_mul(torch._grouped_mm(rows, self.weights.gate_up_E2FD.transpose(1, 2), offs=ends))
        parts = torch._grouped_mm(hidden, self.weights.down_EDF.transpose(1, 2), offs=ends)
        out = torch.empty_like(self.x)
        sum_parts(parts, self.choice[0], grouping, out)
        return out


def rounded(weights: Weights) -> Weights:
    """The same in e4m3, with a scale per row."""

    def each(stack: Tensor) -> tuple[Tensor, Tensor]:
        scale = stack.abs().amax(-1).float().clamp_min(1e-12) / 448
        return (stack.float() / scale[..., None]).to(torch.float8_e4m3fn), scale

    gate_up, gate_up_scale = each(weights.gate_up_E2FD)
    down, down_scale = each(weights.down_EDF)
    return Weights(gate_up, down, gate_up_scale, down_scale)


def ways(device: torch.device, tokens: int, *, skewed: bool, compare: bool) -> Iterator[TimedExperts]:
    """Times of a layer's experts. `skewed`: most tokens go to few experts. `compare`: also print the error of each
    variant."""
    torch.manual_seed(tokens)

    def random(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device) * scale

    weights = Weights(random(EXPERTS, 2 * INNER, WIDTH, scale=0.02), random(EXPERTS, WIDTH, INNER, scale=0.02))
    logits = random(tokens, EXPERTS, scale=1.0)
    if skewed:
        logits += random(1, EXPERTS, scale=3.0)
    given = _Given(random(tokens, WIDTH, scale=1.0), weights, portable.topk_softmax(logits, PER_TOKEN, True))
    fp8 = rounded(weights)
    runs: dict[str, Callable[[], Tensor]] = {"portable": given.portable, "torch._grouped_mm": given.library}
    runs |= {name: partial(given.grouped, cut) for name, cut in CUTS.items()}
    runs |= {name: partial(given.grouped, cut, fp8) for name, cut in FP8_CUTS.items()}
    some = slice(0, min(tokens, 128))
    wanted = None
    if compare:
        stacks = (weights.gate_up_E2FD.float(), weights.down_EDF.float())
        shares, ids = given.choice
        wanted = reference.fused_experts(given.x[some].float(), *stacks, shares[some], ids[some])
    for name, run in runs.items():
        case = f"T={tokens}{' skewed' if skewed else ''} {name}"
        try:
            error = float("nan")
            if wanted is not None:
                got = run()[some].float()
                error = float((got - wanted).norm() / wanted.norm())
            took = time_us([run, run])
        except Exception as failed:
            yield TimedExperts(f"{case}: {type(failed).__name__}: {str(failed)[:120]}", float("inf"), 0.0, float("nan"))
            continue
        yield TimedExperts(case, took, tokens * PER_TOKEN * 6.0 * INNER * WIDTH, error)


def parts(device: torch.device, tokens: int) -> Iterator[TimedExperts]:
    """Times of the launches of one way, one by one."""
    weights = Weights(
        torch.randn(EXPERTS, 2 * INNER, WIDTH, dtype=torch.bfloat16, device=device) * 0.02,
        torch.randn(EXPERTS, WIDTH, INNER, dtype=torch.bfloat16, device=device) * 0.02,
    )
    x = torch.randn(tokens, WIDTH, dtype=torch.bfloat16, device=device)
    choice = portable.topk_softmax(torch.randn(tokens, EXPERTS, device=device), PER_TOKEN, True)
    cut = grouped_hopper.cut_for(tokens * PER_TOKEN, EXPERTS, INNER, WIDTH)
    grouping, rows, _ = group_tokens(x, choice[1], EXPERTS, cut.height)
    hidden = torch.empty((grouping.num_rows, INNER), dtype=torch.bfloat16, device=device)
    out, per_row = torch.empty_like(x), 2.0 * tokens * PER_TOKEN * INNER * WIDTH
    run = grouped_hopper.product
    steps: dict[str, tuple[Callable[[], object], float]] = {
        "layout": (partial(group_tokens, x, choice[1], EXPERTS, cut.height), 0.0),
        "gate_up": (
            partial(run, rows, weights.gate_up_E2FD, hidden, grouping, cut.gate_up, None, None, gated=True),
            2 * per_row,
        ),
        "down": (partial(run, hidden, weights.down_EDF, rows, grouping, cut.down, None, None, gated=False), per_row),
        "sum": (partial(sum_parts, rows, choice[0], grouping, out), 0.0),
    }
    for name, (call, flops) in steps.items():
        yield TimedExperts(f"T={tokens} {name}", time_us([call, call]), flops, float("nan"))
