"""`bough doctor` for several machines."""

from __future__ import annotations

from bough.cli.doctor import commands
from bough.config.concerns import ParallelConfig


def test_what_to_type_on_each_machine() -> None:
    machines = ["--tp-size", "4", "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "a:1"]
    flags = ["org/model", *machines, "--dist-secret=hidden"]
    first, second = [each.what for each in commands(flags, ParallelConfig(tp_size=4, nnodes=2))]
    assert "on machine 0, for ranks 0 to 1:" in first
    assert first.endswith("bough serve org/model --tp-size 4 --nnodes 2 --dist-init-addr a:1 --node-rank 0")
    assert "for ranks 2 to 3" in second
    assert second.endswith("--node-rank 1")
    assert "hidden" not in first + second
    assert not list(commands(["org/model"], ParallelConfig()))
