"""The trap: a CPU that advertises instructions which kill the process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bough.platform import environment
from bough.platform.environment import ISA_VARIABLE, ISA_WITHOUT_AMX, needs_isa_cap, prepare_environment
from bough.platform.processor import CpuFacts, processor

AMX_CPU = CpuFacts(
    model="Sapphire",
    vendor="GenuineIntel",
    flags=frozenset({"avx512_vnni", "amx_tile", "amx_bf16"}),
    physical_cores=2,
    logical_cpus=2,
)


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Probe:
    """Stands for the child: survives only as told."""

    def __init__(self, *, uncapped: bool, capped: bool) -> None:
        self.answers = {False: uncapped, True: capped}
        self.asked: list[bool] = []

    def __call__(self, capped: bool) -> bool:
        self.asked.append(capped)
        return self.answers[capped]


def test_cap_is_needed_where_only_the_capped_child_survives() -> None:
    probe = Probe(uncapped=False, capped=True)
    assert needs_isa_cap(AMX_CPU, probe)
    assert probe.asked == [False, True]


@pytest.mark.parametrize("probe", [Probe(uncapped=True, capped=True), Probe(uncapped=False, capped=False)])
def test_cap_is_not_set_where_it_changes_nothing(probe: Probe) -> None:
    assert not needs_isa_cap(AMX_CPU, probe)


def test_probe_runs_once_for_a_cpu_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(uncapped=False, capped=True)
    assert needs_isa_cap(AMX_CPU, probe)
    assert needs_isa_cap(AMX_CPU, probe)
    assert len(probe.asked) == 2
    monkeypatch.setattr(environment, "_torch_version", lambda: "another")
    assert needs_isa_cap(AMX_CPU, probe)
    assert len(probe.asked) == 4


def test_no_probe_on_cpus_that_never_had_amx() -> None:
    probe = Probe(uncapped=False, capped=True)
    amd = replace(AMX_CPU, vendor="AuthenticAMD", flags=frozenset({"avx512_vnni"}))
    assert not needs_isa_cap(amd, probe)
    assert probe.asked == []


def test_child_killed_by_sigill_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    deadly = f"import os, signal; os.environ.get('{ISA_VARIABLE}') or os.kill(os.getpid(), signal.SIGILL)"
    monkeypatch.setattr(environment, "PROBE", deadly)
    assert not environment.survives_matmul(False)
    assert environment.survives_matmul(True)


def test_probe_itself_runs_with_the_installed_torch() -> None:
    assert environment.survives_matmul(True)


def test_tests_are_limited_whichever_of_them_runs_alone() -> None:
    assert os.environ[ISA_VARIABLE]


def test_users_variables_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "known_isa_cap", lambda cpu: True)
    mine = {ISA_VARIABLE: "AVX2", "OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "active"}
    before = dict(mine)
    assert prepare_environment(environment=mine) == []
    assert mine == before


def test_what_is_missing_is_set_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "known_isa_cap", lambda cpu: True)
    empty: dict[str, str] = {}
    said = prepare_environment(environment=empty)
    assert empty == {
        ISA_VARIABLE: ISA_WITHOUT_AMX,
        "OMP_NUM_THREADS": str(processor().physical_cores),
        "GOMP_SPINCOUNT": environment.IDLE_SPINS,
    }
    assert [line.split("=")[0] for line in said] == ["OMP_NUM_THREADS", "GOMP_SPINCOUNT", ISA_VARIABLE]
    fixed: dict[str, str] = {}
    prepare_environment(threads=5, environment=fixed)
    assert fixed["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize("on_gpu", [False, True])
def test_no_probe_is_waited_for_where_a_gpu_computes(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    probe = Probe(uncapped=True, capped=True)
    monkeypatch.setattr(environment, "processor", lambda: AMX_CPU)
    monkeypatch.setattr(environment, "survives_matmul", probe)
    variables: dict[str, str] = {}
    prepare_environment(environment=variables, on_gpu=lambda: on_gpu)
    assert (variables.get(ISA_VARIABLE), probe.asked) == ((ISA_WITHOUT_AMX, []) if on_gpu else (None, [False]))
    # The next start on the CPU tries, and then all know.
    variables.clear()
    prepare_environment(environment=variables)
    assert (variables.get(ISA_VARIABLE), probe.asked) == (None, [False])
    variables.clear()
    prepare_environment(environment=variables, on_gpu=lambda: pytest.fail("it is known"))
    assert ISA_VARIABLE not in variables


def test_facts_and_environment_need_no_torch() -> None:
    code = (
        "import sys; from bough.platform import detect, prepare_environment; prepare_environment(); detect('auto');"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ), timeout=120)
