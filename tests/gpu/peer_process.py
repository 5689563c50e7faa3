"""One rank that sums with another process on the same GPU. usage: RANK ADDRESS"""

from __future__ import annotations

import sys

import torch

from bough.distributed.collectives import ALONE, ordered_sum
from bough.distributed.peers import PeerCollectives, open_peers
from bough.ipc.store import Store
from bough.kernels.norm import reference


def main(rank: int, address: str) -> None:
    device = torch.device("cuda", 0)
    store = Store(address)
    talk = open_peers(ALONE, store, "test", rank, 2, device, 60.0, print)
    assert isinstance(talk, PeerCollectives), "memory can't be shared here"
    draw = torch.Generator(device).manual_seed(7)  # the same on both ranks
    for tokens in (1, 3, 64, 1, 128):
        parts = [torch.randn(tokens, 1024, device=device, generator=draw).bfloat16() for _ in range(2)]
        residual = torch.randn(tokens, 1024, device=device, generator=draw).bfloat16()
        weight = torch.randn(1024, device=device, generator=draw).bfloat16()
        summed = talk.all_reduce(parts[rank].clone())
        assert torch.equal(summed, ordered_sum(parts))
        normed, total = talk.add_norm(parts[rank], residual, weight, 1e-5, 0.0)
        expected, whole = reference.add_rms_norm(ordered_sum(parts), residual, weight, 1e-5)
        assert torch.equal(total, whole)
        torch.testing.assert_close(normed, expected)
    torch.cuda.synchronize()
    store.set(f"done/{rank}", b"1")
    store.get(f"done/{1 - rank}", 60.0)  # memory stays until both are done
    talk.close()
    print("same")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
