"""A router's product and choice in one launch, and the choice alone, against the reference.

TRITON_INTERPRET=1 python routing_cases.py SEED [PART PARTS]        (the CPU; without the variable set, a GPU)
"""

from __future__ import annotations

import os
import random
import sys
from itertools import product

import torch
from interpreting import quicken
from torch import Tensor

from bough.kernels.moe import Choosing, Scoring, reference, routing

SHAPES = ((16, 4, 2, 3, 40), (12, 1, 1, 2, 1030), (6, 1, 1, 6, 70), (64, 4, 2, 3, 140))
LARGE = ((64, 1, 1, 6, 2048), (256, 8, 4, 8, 7168), (128, 1, 1, 4, 2880), (32, 1, 1, 4, 2880), (160, 1, 1, 6, 5120))
"""Experts, groups, groups that are kept, experts of a token, width."""


def main(seed: int, device: torch.device, part: int = 0, parts: int = 1) -> int:
    """How many cases there were; one of `parts` of them."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    large = device.type == "cuda"
    counts = (1, 5, 32, 33, 100, 512) if large else (1, 5, 18)
    every = list(product(LARGE if large else SHAPES, ("softmax", "scored"), counts))
    for shape, kind, tokens in every[part::parts]:
        case(rng, device, shape, kind, tokens)
    return len(every[part::parts])


def case(rng: random.Random, device: torch.device, shape: tuple[int, ...], kind: str, tokens: int) -> None:
    experts, groups, kept, per_token, width = shape
    loc = torch.arange(tokens, device=device) % 4 - 1 if rng.random() < 0.5 else None
    forced = None
    if rng.random() < 0.4:
        forced = torch.rand(3, experts, device=device).topk(per_token, 1).indices.to(torch.int32)
    always = rng.choice((0, 2))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    if kind == "softmax":  # of whole numbers, whose sums are exact: with equal logits, and rounded ones
        x, router = whole(device, tokens, width).to(dtype), whole(device, experts, width).to(dtype)
        x /= 16
        bias = whole(device, experts).to(dtype) if rng.random() < 0.5 else None
        how = Choosing(per_token, rng.random() < 0.5, forced_nk=forced, always=always, always_weight=0.5)
    else:
        x = torch.randn(tokens, width, device=device).to(dtype)
        router, bias = torch.randn(experts, width, device=device) / width**0.5, None
        scoring = Scoring(
            rng.random() < 0.5, groups, kept, rng.random() < 0.5, rng.random() < 0.5, rng.choice((0.0, 0.3)), 2.5
        )
        scored_bias = torch.randn(experts, device=device) if rng.random() < 0.5 else None
        how = Choosing(per_token, scoring.renormalise, scoring, scored_bias, forced, always, 0.5)
    wide = torch.cat((x, x), 1)[:, :width]  # rows that don't lie side by side
    name = f"{kind} {shape} {tokens} tokens {how}"
    most = 32 if experts < 64 else 512 if router.dtype == torch.float32 else 64
    # The interpreter can't multiply bf16, the only type beside which float32 routers of many tokens are served.
    if routing.suits(wide.bfloat16() if kind == "scored" else wide, router, how) != (tokens <= most):
        raise AssertionError(f"served or not: {name}")
    logits = torch.nn.functional.linear(x.double(), router.double(), None if bias is None else bias.double())
    want = reference.choose(logits.to(router.dtype), how, loc)
    ways = [routing.route] if tokens <= most else []
    if device.type == "cpu" and tokens > 5:
        ways = [routing.route_many]
    for way in ways:
        agree(way(wide, router, bias, how, loc), want, name)
        agree(way(wide, router, bias, how, loc), want, name + " again")
    agree(routing.choose(logits.to(router.dtype), how, loc), want, name + " of logits")


def whole(device: torch.device, *shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, device=device).float()


def agree(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], name: str) -> None:
    if not torch.equal(got[1], want[1]):
        raise AssertionError(f"experts differ: {name}\n{got[1]}\n{want[1]}")
    torch.testing.assert_close(got[0], want[0], atol=1e-5, rtol=1e-4, msg=lambda text: f"{name}: {text}")


if __name__ == "__main__":
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted:
        quicken()
    where = torch.device("cpu" if interpreted else "cuda")
    print(main(int(sys.argv[1]), where, *map(int, sys.argv[2:])), "cases of routing agree")
