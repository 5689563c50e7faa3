"""Keeps the load of ranks that hold different experts even: counts tokens by expert, and moves experts from time to time.

Every rank of an engine launches the same steps in the same order, so that ranks agree on when experts move by counting
steps, and on where to by computing it from the same sums.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from bough.config.concerns import ParallelConfig
from bough.core.messages import ExpertRecord
from bough.distributed.balance import balance_experts, balancedness, rank_loads
from bough.distributed.mesh import Axis
from bough.layers.expert_moves import move_experts
from bough.layers.moe import MixtureOfExperts

_log = logging.getLogger(__name__)

LOOK_EVERY: Final = 100
"""Steps between two looks at the counts: on a GPU the host waits for the device then."""

Counts = list[npt.NDArray[np.int64]]
"""By mixture layer: tokens that chose each expert."""


def has_mixtures(model: nn.Module) -> bool:
    """Whether a model, or the stage of it that is here, has mixtures of experts."""
    return any(isinstance(each, MixtureOfExperts) for each in model.modules())


@dataclass(frozen=True, slots=True)
class BalanceRules:
    """When experts move."""

    every: int
    """Steps; 0: never, tokens are only counted."""
    layers_at_once: int
    least_uneven: float
    """They stay where they are if balancedness was above this."""

    @classmethod
    def of(cls, parallel: ParallelConfig) -> BalanceRules:
        return cls(
            parallel.eplb_rebalance_num_iterations if parallel.eplb else 0,
            parallel.eplb_rebalance_layers_per_chunk,
            parallel.eplb_min_rebalancing_utilization_threshold,
        )


class ExpertBalancer:
    """One rank's part of it. `before_step` is called before every step, on every rank of the engine."""

    def __init__(
        self, model: nn.Module, tokens: Axis, rules: BalanceRules, *, groups: int = 1, num_nodes: int = 1
    ) -> None:
        """`tokens`: ranks that compute different tokens; `groups`: groups of experts that a token's choice is limited to;
        `num_nodes`: machines that the ranks with different experts are on."""
        self._mixtures = [each for each in model.modules() if isinstance(each, MixtureOfExperts)]
        self._tokens = tokens
        self._rules = rules
        ep = self._mixtures[0].experts.table.axis
        self._num_ranks = ep.size
        self._groups, self._nodes = (groups, num_nodes) if ep.size % num_nodes == 0 else (1, 1)
        self._steps = 0
        self._pending: deque[tuple[int, npt.NDArray[np.int64]]] = deque()
        self.counts: Counts = [np.zeros(each.experts.num_experts, np.int64) for each in self._mixtures]
        """Since the start, as of the last look..."""
        self._base: Counts = [each.copy() for each in self.counts]
        """...and when experts moved last."""
        self._begun: Counts = [each.copy() for each in self.counts]
        self._stopped: Counts | None = None
        self.balancedness = 1.0
        self.moves = 0
        self.moved_experts = 0

    def before_step(self) -> None:
        """Looks or moves, if it is time to."""
        self._steps += 1
        if self._pending:
            self._move()
        elif self._rules.every and self._steps % self._rules.every == 0:
            self._look()
            self._rebalance()
        elif self._steps % LOOK_EVERY == 0:
            self._look()

    def info(self) -> dict[str, Any]:
        return {
            "balancedness": round(self.balancedness, 4),
            "rebalances": self.moves,
            "moved_experts": self.moved_experts,
            "steps": self._steps,
        }

    def record(self, message: ExpertRecord) -> dict[str, Any]:
        """Counts by layer, in the form that `--init-expert-location` takes. Where ranks compute different tokens, as of
        the last look."""
        if self._tokens.size == 1:
            self._look()
        match message.action:
            case "start":
                self._begun, self._stopped = self.counts, None
            case "stop":
                self._stopped = self.counts
            case "dump":
                counts = zip(self._stopped or self.counts, self._begun, strict=True)
                return {
                    "logical_count": [(now - begun).tolist() for now, begun in counts],
                    **self.info(),
                }
        return {}

    def _look(self) -> None:
        """Sums what all ranks have counted. All ranks do so at the same step."""
        held = [each.chosen_E for each in self._mixtures if each.chosen_E is not None]
        flat = torch.cat(held)
        if self._tokens.size > 1:
            flat = self._tokens.talk.all_reduce(flat)
        sizes = np.cumsum([len(each) for each in held])[:-1]
        self.counts = np.split(flat.cpu().numpy(), sizes)
        even = [balancedness(rank_loads(load, slots, self._num_ranks)) for load, slots in self._since_moved()]
        self.balancedness = float(np.mean(even))

    def _since_moved(self) -> list[tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]]:
        return [
            ((now - base).astype(np.float64)[None], each.experts.table.slots[None])
            for now, base, each in zip(self.counts, self._base, self._mixtures, strict=True)
        ]

    def _rebalance(self) -> None:
        if self.balancedness > self._rules.least_uneven:
            return
        for number, (load, slots) in enumerate(self._since_moved()):
            found = balance_experts(
                load, slots.shape[1], self._num_ranks, num_groups=self._groups, num_nodes=self._nodes, held=slots
            )
            before, after = (rank_loads(load, each, self._num_ranks).max() for each in (slots, found))
            if after < before:
                self._pending.append((number, found[0]))
        self._base = [each.copy() for each in self.counts]
        if self._pending:
            self.moves += 1
            self._move()

    def _move(self) -> None:
        began = time.perf_counter()
        count = min(self._rules.layers_at_once or len(self._pending), len(self._pending))
        moved = 0
        for _ in range(count):
            number, slots = self._pending.popleft()
            moved += move_experts(self._mixtures[number].experts, slots)
        self.moved_experts += moved
        took_s = time.perf_counter() - began
        _log.debug("experts of %d layers moved, %d of them between ranks, in %.3f s", count, moved, took_s)
