"""The table: cases by operation, and how they are run."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice

import numpy as np
import torch

from triton_cases import (
    attention,
    experts,
    latent,
    linear,
    lora,
    packed,
    plan,
    sampling,
    segments,
    shared,
    small,
    states,
    steps,
)
from triton_cases.bed import Amount, Bed, Cases

OPS: dict[str, Callable[[Bed], Cases]] = {
    "norm": small.norm_cases,
    "rows": small.row_cases,
    "activation": small.activation_cases,
    "rotary": small.rotary_cases,
    "linear": linear.linear_cases,
    "lora": lora.lora_cases,
    "attention": attention.attention_cases,
    "shared": shared.shared_cases,
    "tail": attention.tail_cases,
    "latent": latent.latent_cases,
    "sparse": latent.sparse_cases,
    "rope": attention.rope_cases,
    "plan": plan.plan_cases,
    "segments": segments.segment_cases,
    "sampling": sampling.sampling_cases,
    "masks": sampling.mask_cases,
    "pages": steps.page_cases,
    "start": steps.start_cases,
    "end": steps.end_cases,
    "tree": steps.tree_cases,
    "chain": steps.chain_cases,
    "states": states.state_cases,
    "moe": experts.moe_cases,
    "grouping": experts.grouping_cases,
    "packed": packed.packed_cases,
    "gguf": packed.gguf_cases,
    "packed_moe": packed.packed_moe_cases,
}


def run(op: str, device: torch.device, seed: int, part: int = 0, parts: int = 1, *, amount: Amount = "all") -> int:
    """Runs the cases of an operation, or one of `parts` of them, and returns how many there were; raises with the case's
    name at the first failure."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    torch.utils.deterministic.fill_uninitialized_memory = True
    count = 0
    cases = OPS[op](Bed(device, device.type == "cuda", random.Random(seed), amount))
    for name, check in islice(cases, part, None, parts):
        try:
            check()
        except Exception as problem:
            raise AssertionError(f"{name} (seed {seed}): {problem}") from problem
        count += 1
    return count
