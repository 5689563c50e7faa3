"""Features that were never run on the hardware they are made for. The list is logged when an engine uses one, and is in
docs/parallel.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bough.config.concerns import ParallelConfig


@dataclass(frozen=True, slots=True)
class Unproven:
    """A way to distribute a model."""

    what: str
    tried: str
    """On what it was tried."""
    uses: Callable[[ParallelConfig, bool], bool]
    """Whether an engine with these settings, on GPUs or not, uses it."""


UNPROVEN = (
    Unproven(
        "NCCL between several GPUs",
        "world size 1 on an H200, eagerly and in captured graphs",
        lambda p, gpu: gpu and p.tp_size * p.pp_size > 1,
    ),
    Unproven(
        "sums by reading other GPUs' memory (--custom-all-reduce)",
        "two processes on one H200, and two ranks as streams of one process",
        lambda p, gpu: gpu and p.custom_all_reduce and p.tp_size > 1,
    ),
    Unproven("stages (--pp-size) on GPUs", "processes of one machine, CPU", lambda p, gpu: gpu and p.pp_size > 1),
    Unproven("replicas (--dp-size) on GPUs", "processes of one machine, CPU", lambda p, gpu: gpu and p.dp_size > 1),
    Unproven(
        "replicas of attention (--attn-dp-size) on GPUs",
        "processes of one machine, CPU",
        lambda p, gpu: gpu and p.attn_dp_size > 1,
    ),
    Unproven(
        "shared contexts (--attn-cp-size) on GPUs",
        "processes of one machine, CPU",
        lambda p, gpu: gpu and p.attn_cp_size > 1,
    ),
    Unproven(
        "experts on several GPUs (--ep-size)", "processes of one machine, CPU", lambda p, gpu: gpu and p.ep_size > 1
    ),
    Unproven(
        "several machines (--nnodes)",
        "processes on loopback addresses, CPU, gloo",
        lambda p, gpu: p.nnodes > 1,
    ),
)


def unproven(parallel: ParallelConfig, device: str) -> list[str]:
    """One line per such feature that an engine uses."""
    return [
        f"{each.what}: not run on this hardware before a release; tried with {each.tried}"
        for each in UNPROVEN
        if each.uses(parallel, device == "cuda")
    ]
