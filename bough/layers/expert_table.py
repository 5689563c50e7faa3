"""Which slots hold the experts of one layer. T tokens, k experts per token, E experts, C copies of one at most, P slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bough.config.concerns import CopyChoice
from bough.config.shares import expert_slots
from bough.distributed.mesh import Axis


class ExpertTable:
    """From experts to slots, on the device. The tensors stay where they are when experts move, for graphs that read them."""

    def __init__(
        self,
        slots: Sequence[int],
        num_experts: int,
        axis: Axis,
        device: torch.device,
        *,
        moves: bool = False,
        copies: CopyChoice = "dynamic",
    ) -> None:
        """`slots`: the expert of each slot; `axis`: the ranks that hold runs of them."""
        self.num_experts = num_experts
        self.axis = axis
        self.slots: npt.NDArray[np.int64] = np.array(slots, np.int64)
        redundant = len(slots) - num_experts
        runs = [expert_slots(num_experts, redundant, axis.size, rank) for rank in range(axis.size)]
        self.mine: slice = runs[axis.rank]
        self.is_plain = not moves and list(slots) == list(range(num_experts))
        """Slot i holds expert i, and always will."""
        self.ranks = [rank for rank, run in enumerate(runs) for _ in range(run.start, run.stop)]
        self.rank_of_P = torch.tensor(self.ranks, device=device)
        self.first_of_R = torch.tensor([run.start for run in runs], dtype=torch.int32, device=device)
        """int64 [P] and int32 [ranks]: the rank of each slot, and the first slot of each rank."""
        self._turns = copies == "dynamic"
        self._slot_EC = torch.zeros(num_experts, redundant + 1, dtype=torch.int32, device=device)
        self._count_E = torch.ones(num_experts, dtype=torch.int64, device=device)
        self.assign(self.slots)

    def assign(self, slots: npt.NDArray[np.int64]) -> None:
        """From now on, slots hold these experts."""
        self.slots = slots.copy()
        table = np.zeros(tuple(self._slot_EC.shape), np.int32)
        counts = np.zeros(self.num_experts, np.int64)
        for slot, expert in enumerate(self.slots.tolist()):
            table[expert, counts[expert]] = slot
            counts[expert] += 1
        if not self._turns:  # one for each expert: this rank's own, or one that depends on the rank
            near = range(self.mine.start, self.mine.stop)
            for expert, count in enumerate(counts.tolist()):
                held = table[expert, :count].tolist()
                own = [slot for slot in held if slot in near]
                table[expert, 0] = own[0] if own else held[self.axis.rank % count]
            counts[:] = 1
        self._slot_EC.copy_(torch.from_numpy(table))
        self._count_E.copy_(torch.from_numpy(counts))

    def slot_ids(self, ids_Tk: Tensor) -> Tensor:
        """int32 [T, k]: the slots of chosen experts; -1 where none is chosen. Copies take turns from token to token."""
        if self.is_plain:
            return ids_Tk
        at_Tk = ids_Tk.clamp(min=0).long()
        turn_T1 = torch.arange(len(ids_Tk), device=ids_Tk.device)[:, None]
        slots_Tk = self._slot_EC[at_Tk, turn_T1 % self._count_E[at_Tk]]
        return torch.where(ids_Tk < 0, -1, slots_Tk)
