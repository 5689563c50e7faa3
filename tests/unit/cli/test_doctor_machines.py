"""`bough doctor` for several machines."""

from __future__ import annotations

import pytest

from bough.cli.doctor import commands, run
from bough.config.concerns import ParallelConfig
from bough.core.errors import ConfigError


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


def test_machines_may_be_asked_about_before_they_have_addresses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("machine", "fits"):
        monkeypatch.setattr(f"bough.cli.doctor.{name}", lambda config: [])
    assert run(["--tp", "4", "--nnodes", "2", "org/model"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("bough serve --tp 4 --nnodes 2 org/model --dist-init-addr MACHINE_0:20000 --node-rank 0")
    assert second.endswith("--node-rank 1")
    with pytest.raises(ConfigError, match="there is one machine"):
        run(["--dist-init-addr", "a:1", "org/model"])
