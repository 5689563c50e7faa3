"""The start of a step in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def start_step(
    table_P: Tensor, at_U: Tensor, pages_U: Tensor, ids_T: Tensor, slots_T: Tensor, last_token_S: Tensor
) -> Tensor:
    table_P.scatter_(0, at_U, pages_U)
    return torch.where(ids_T < 0, last_token_S[slots_T], ids_T)
