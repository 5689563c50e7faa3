"""The convolution in plain torch, on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def conv_row(x_LC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, state_CW: Tensor) -> Tensor:
    seen_CL = torch.cat((state_CW, x_LC.float().T), 1)
    state_CW.copy_(seen_CL[:, seen_CL.shape[1] - state_CW.shape[1] :])
    return F.silu(F.conv1d(seen_CL, weight_CW[:, None], bias_C, groups=len(seen_CL))).T


def conv_ones(x_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, states_SCW: Tensor, at_N: Tensor) -> Tensor:
    seen_NCW = torch.cat((states_SCW[at_N], x_NC.float()[:, :, None]), 2)
    states_SCW[at_N] = seen_NCW[:, :, 1:]
    out_NC = (seen_NCW * weight_CW).sum(2)
    return F.silu(out_NC if bias_C is None else out_NC + bias_C)
