"""`make mutate`: puts realistic faults into a copy of the code, one at a time, and asks whether the tests notice.

    python tests/mutants/mutate.py                      all faults whose result is not known yet
    python tests/mutants/mutate.py ipc outbox-resends   those of an area, or one by its name
    python tests/mutants/mutate.py --minutes 20         as many as fit into the time; the next run goes on from there
    python tests/mutants/mutate.py --again              known results are forgotten first
    python tests/mutants/mutate.py --report             what is known, without running anything

Faults are data: one YAML file per area beside this one. Each names a file, a text that occurs in it once, what stands there
instead, and the tests that should notice. A fault is noticed if these tests fail with it (or hang, or end their process);
they pass without it. Results are kept in `.mutate.json` and hold as long as neither the file nor the tests have changed.
Every bug that is found adds a fault. The exit status is 1 if less than nine tenths of an area's faults are noticed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).resolve().parent
KNOWN = ".mutate.json"
LEAST = 0.9
"""Share of an area's faults that tests must notice."""
TEST_TIMEOUT_S = 300.0
MOST_MEMORY_BYTES = 6 * 2**30
"""Of each process of the tests: some faults would take all there is."""
NOTICED, SURVIVED, BROKEN = "noticed", "survived", "broken"
"""`broken`: the tests fail without the fault, or there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    area: str
    name: str
    file: str
    find: str
    put: str
    tests: tuple[str, ...]
    why: str
    """What goes wrong with it."""


def load(directory: Path = FAULTS) -> list[Fault]:
    """Every fault, by area. Raises `ValueError` for one that can't be meant."""
    found: list[Fault] = []
    for path in sorted(directory.glob("*.yaml")):
        for name, fields in yaml.safe_load(path.read_text()).items():
            unknown = set(fields) ^ {"file", "find", "put", "tests", "why"}
            if unknown:
                raise ValueError(f"{path.name}, {name}: {', '.join(sorted(unknown))} missing or unknown")
            fault = Fault(area=path.stem, name=name, **{**fields, "tests": tuple(fields["tests"])})
            found.append(fault)
    names = [fault.name for fault in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"several faults are called {twice[0]}")
    return found


def mutated(fault: Fault, text: str) -> str:
    """The file with the fault. Raises `ValueError` if its place is not there, or not the only one."""
    if text.count(fault.find) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has its text {text.count(fault.find)} times")
    return text.replace(fault.find, fault.put)


def key(fault: Fault, root: Path) -> str:
    """Changes when the fault, its file or its tests do."""
    digest = hashlib.sha256(repr(fault).encode())
    for path in [root / fault.file, *(each for test in fault.tests for each in _files(root / test.split("::")[0]))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


class Copy:
    """A copy of the code to be broken. It is made once, and set right after every fault."""

    def __init__(self, root: Path) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="bough-mutants-")
        self.root = Path(self._directory.name)
        for name in tracked(root):
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target)

    def close(self) -> None:
        self._directory.cleanup()

    def run(self, tests: Sequence[str]) -> bool:
        """Whether the tests pass. Raises `LookupError` if there are none."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not long and not gpu",
            *tests,
        ]
        environ = {**os.environ, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            ended = subprocess.run(
                command, cwd=self.root, env=environ, capture_output=True, timeout=TEST_TIMEOUT_S, check=False,
                preexec_fn=_bound_memory,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        if ended.returncode < 0:  # it crashed, or took all the memory it may
            return False
        if ended.returncode not in (0, 1, 2):
            raise LookupError(
                ended.stdout.decode(errors="replace")[-300:] + ended.stderr.decode(errors="replace")[-300:]
            )
        return ended.returncode == 0

    def try_out(self, fault: Fault) -> str:
        """Whether the fault's tests notice it."""
        path = self.root / fault.file
        whole = path.read_text()
        path.write_text(mutated(fault, whole))
        try:
            return SURVIVED if self.run(fault.tests) else NOTICED
        finally:
            path.write_text(whole)


def _bound_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))


def tracked(root: Path) -> list[str]:
    """Files of the repository: those that git knows, and new ones that it does not ignore."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, check=True)
    return [name for name in listed.stdout.decode().splitlines() if (root / name).is_file()]


class Results:
    """What is known, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, fault: Fault, root: Path) -> str | None:
        known = self._known.get(fault.name)
        return known["result"] if known is not None and known["key"] == key(fault, root) else None

    def put(self, fault: Fault, root: Path, result: str) -> None:
        self._known[fault.name] = {"key": key(fault, root), "result": result}
        self._path.write_text(json.dumps(self._known, indent=1, sort_keys=True) + "\n")

    def forget(self, faults: Iterable[Fault]) -> None:
        for fault in faults:
            self._known.pop(fault.name, None)


def work(faults: Sequence[Fault], results: Results, *, root: Path, until_s: float) -> Iterator[tuple[Fault, str]]:
    """Tries every fault whose result is not known, and yields it, until the time is up."""
    left = [fault for fault in faults if results.get(fault, root) is None]
    if not left:
        return
    copy, healthy = Copy(root), dict[tuple[str, ...], bool]()
    try:
        for fault in left:
            if time.monotonic() >= until_s:
                return
            if fault.tests not in healthy:
                healthy[fault.tests] = copy.run(fault.tests)
            result = copy.try_out(fault) if healthy[fault.tests] else BROKEN
            results.put(fault, root, result)
            yield fault, result
    finally:
        copy.close()


def report(faults: Sequence[Fault], results: Results, root: Path) -> tuple[str, bool]:
    """What is known of each area, and whether every area has enough noticed."""
    lines, enough = [], True
    by_area: dict[str, list[str | None]] = {}
    for fault in faults:
        by_area.setdefault(fault.area, []).append(results.get(fault, root))
    for area, found in by_area.items():
        known = [each for each in found if each is not None]
        noticed = known.count(NOTICED)
        share = noticed / len(known) if known else 0.0
        enough = enough and (not known or share >= LEAST)
        lines.append(
            f"{area:<12} {noticed:>3} of {len(known):>3} noticed ({share:4.0%}), {len(found) - len(known)} not tried"
        )
    bad = [(fault, result) for fault in faults if (result := results.get(fault, root)) in (SURVIVED, BROKEN)]
    lines += [f"{result}: {fault.name} ({fault.file}): {fault.why}" for fault, result in bad]
    return "\n".join(lines), enough


def chosen(faults: Sequence[Fault], names: Sequence[str]) -> list[Fault]:
    """Faults of the named areas, and the named faults; all, if nothing is named."""
    known = {fault.area for fault in faults} | {fault.name for fault in faults}
    unknown = sorted(set(names) - known)
    if unknown:
        raise SystemExit(f"there is no area or fault {unknown[0]}")
    return [fault for fault in faults if not names or {fault.area, fault.name} & set(names)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="areas or faults; none: all")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no fault after so many")
    parser.add_argument("--again", action="store_true", help="forget known results first")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    faults = chosen(load(), options.names)
    results = Results(ROOT / KNOWN)
    if options.again:
        results.forget(faults)
    if not options.report:
        until_s = time.monotonic() + 60 * options.minutes
        for fault, result in work(faults, results, root=ROOT, until_s=until_s):
            print(f"{result:<9} {fault.area:<12} {fault.name}", flush=True)
    text, enough = report(faults, results, ROOT)
    print(text)
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
