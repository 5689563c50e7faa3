"""The faults of `make mutate` are those of this code: each has its place, once, and tests that could notice it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.mutate import FAULTS, NOTICED, ROOT, SURVIVED, Fault, Results, chosen, load, mutated, report

AREAS = {"scheduler", "cache", "engine", "sampler", "weights", "layers", "engine_client", "entrypoints", "ipc"}


@pytest.mark.parametrize("fault", load(), ids=lambda fault: f"{fault.area}/{fault.name}")
def test_a_fault_can_be_put_in(fault: Fault) -> None:
    text = mutated(fault, (ROOT / fault.file).read_text())
    ast.parse(text)
    for test in fault.tests:
        assert (ROOT / test.partition("::")[0]).exists(), test


def test_all_areas_have_faults() -> None:
    by_area = [fault.area for fault in load()]
    assert set(by_area) >= AREAS
    assert min(by_area.count(area) for area in AREAS) >= 8


def a_fault(**changes: str) -> Fault:
    fields = {"area": "a", "name": "n", "file": "f.py", "find": "x = 1", "put": "x = 2", "why": "w", **changes}
    return Fault(**fields, tests=("test_f.py",))  # type: ignore[arg-type]


def test_a_place_must_be_there_once() -> None:
    assert mutated(a_fault(), "x = 1\n") == "x = 2\n"
    for text in ("", "x = 1\nx = 1\n"):
        with pytest.raises(ValueError, match="has its text"):
            mutated(a_fault(), text)


def test_results_hold_until_something_changes(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("x = 1\n")
    (tmp_path / "test_f.py").write_text("")
    faults = [a_fault(name=str(at)) for at in range(10)]
    results = Results(tmp_path / "known.json")
    for at, fault in enumerate(faults):
        results.put(fault, tmp_path, SURVIVED if at < 2 else NOTICED)
    text, enough = report(faults, Results(tmp_path / "known.json"), tmp_path)
    assert "8 of  10 noticed ( 80%)" in text
    assert not enough
    (tmp_path / "f.py").write_text("x = 1  # changed\n")
    text, enough = report(faults, results, tmp_path)
    assert "10 not tried" in text
    assert enough


def test_faults_are_chosen_by_area_or_name() -> None:
    faults = [a_fault(), a_fault(area="b", name="m")]
    assert chosen(faults, []) == faults
    assert chosen(faults, ["b"]) == chosen(faults, ["m"]) == faults[1:]
    with pytest.raises(SystemExit):
        chosen(faults, ["c"])


def test_what_can_not_be_meant_is_refused(tmp_path: Path) -> None:
    assert len({fault.name for fault in load(FAULTS)}) == len(load(FAULTS))
    (tmp_path / "a.yaml").write_text("n: {file: f, find: x, put: y, tests: []}\n")
    with pytest.raises(ValueError, match="why missing or unknown"):
        load(tmp_path)
