"""What ranks do together. Each call is made by every rank of the mesh, in the same order."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from bough.distributed.mesh import Mesh


def all_reduce(x: Tensor, mesh: Mesh) -> Tensor:
    """The sum of `x` over all ranks, in place of `x`."""
    if mesh.size > 1:
        dist.all_reduce(x, group=mesh.group)
    return x


def all_gather(x_TS: Tensor, mesh: Mesh) -> Tensor:
    """[T, S] on each rank -> [T, size * S] on all, columns in order of rank."""
    if mesh.size == 1:
        return x_TS
    num_rows, share = x_TS.shape
    out = torch.empty(mesh.size * num_rows, share, dtype=x_TS.dtype, device=x_TS.device)
    dist.all_gather_into_tensor(out, x_TS.contiguous(), group=mesh.group)
    return out.view(mesh.size, num_rows, share).transpose(0, 1).reshape(num_rows, mesh.size * share)
