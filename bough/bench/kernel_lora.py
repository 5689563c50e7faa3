"""What adapters add to the matrices of a layer on a GPU: those of Phi-4-multimodal, and eight small ones of a Llama."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from bough.kernels.linear.tuning import time_us
from bough.kernels.lora import LoraStack, TokenAdapters, add_lora

PHI4 = ((3072, (5120,)), (3072, (3072,)), (3072, (16384,)), (8192, (3072,)))
"""Inputs and parts of the four matrices: one narrow product for all parts."""
LLAMA_8B = ((4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,)))
CASES = {"Phi-4 r256+r320": (PHI4, (256, 320)), "8 of r16, Llama-3.1-8B": (LLAMA_8B, (16,) * 8)}
TOKENS = (1, 8, 64, 256, 4096)


@dataclass(frozen=True, slots=True)
class TimedAdapters:
    """One case: all matrices of a layer."""

    case: str
    us: float
    num_bytes: int
    """Of adapters that are read once."""
    flops: int


def layers(device: torch.device) -> Iterator[TimedAdapters]:
    """Tokens have adapters in turn, in runs as those of prompts where they are many."""
    for name, (shapes, ranks) in CASES.items():
        for tokens in TOKENS:
            run = 1 if tokens <= 256 else 512
            of_T = (torch.arange(tokens, device=device) // run % len(ranks) + 1).to(torch.int32)
            used = len(set(of_T.tolist()))
            total = TimedAdapters(f"{name}, {tokens} tokens", 0.0, 0, 0)
            for depth, widths in shapes:
                stacks = [_stack(depth, widths, ranks, device) for _ in range(4)]
                x_TD = torch.randn(tokens, depth, dtype=torch.bfloat16, device=device)
                out_TO = torch.randn(tokens, sum(widths), dtype=torch.bfloat16, device=device)
                given = TokenAdapters(of_T)
                took = time_us([partial(add_lora, out_TO, x_TD, stack, given) for stack in stacks])
                values = len(widths) * depth + sum(widths)
                total = TimedAdapters(
                    total.case,
                    total.us + took,
                    total.num_bytes + 2 * values * sum(ranks[:used]),
                    total.flops + 2 * values * ranks[0] * tokens,
                )
            yield total


def _stack(depth: int, widths: tuple[int, ...], ranks: tuple[int, ...], device: torch.device) -> LoraStack:
    parts, outputs = len(widths), sum(widths)
    to = partial(torch.tensor, dtype=torch.int32, device=device)
    return LoraStack(
        torch.randn(parts * sum(ranks), depth, dtype=torch.bfloat16, device=device) * 0.02,
        torch.randn(outputs, sum(ranks), dtype=torch.bfloat16, device=device) * 0.02,
        torch.ones(len(ranks), device=device),
        to(ranks),
        to([sum(ranks[:slot]) for slot in range(len(ranks))]),
        to([sum(widths[:part]) for part in range(parts + 1)]),
        parts,
        max(widths),
        max(ranks),
    )
