"""One rank as a process: makes every collective on every axis. usage: RANK TP EP PP FOLDER

Three times: over gloo (every rank pretends to be on a machine of its own), in shared memory, and there without anything
compiled. FOLDER has a meeting place for each.
"""

from __future__ import annotations

import sys

import torch
from calls import check

from bough.config.layout import AXES, Layout
from bough.distributed.join import join_mesh
from bough.ipc.store import Store
from bough.kernels.cpu_build import forbid_custom_kernels

KINDS = ("gloo", "shared", "python")


def main(rank: int, layout: Layout, folder: str) -> None:
    torch.set_num_threads(1)
    for kind in KINDS:
        if kind == "python":
            forbid_custom_kernels()
        said: list[str] = []
        mesh = join_mesh(
            layout, rank, Store(f"{folder}/{kind}"), device=torch.device("cpu"), timeout_s=120, say=said.append,
            hosts=list(range(layout.size)) if kind == "gloo" else None,
        )  # fmt: skip
        assert all(("gloo" if kind == "gloo" else "shared memory") in line for line in said), said
        for name in AXES:
            check(getattr(mesh, name))
        mesh.close()


if __name__ == "__main__":
    tp, ep, pp = map(int, sys.argv[2:5])
    main(int(sys.argv[1]), Layout(tp=tp, ep=ep, pp=pp), sys.argv[5])
