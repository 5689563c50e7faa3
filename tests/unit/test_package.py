"""Importing the package is quick, brings no torch, and offers every name it promises."""

import subprocess
import sys

import bough
import bough.lang


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_is_quick_and_brings_no_torch():
    """One file of its own and a handful of the standard library's: the rest comes when it is asked for."""
    brought = "import sys; before = set(sys.modules); import bough; print(*sorted(set(sys.modules) - before))"
    modules = run(brought).split()
    assert [name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names] == ["bough"]
    assert len(modules) < 50


def test_the_language_brings_no_torch():
    assert run("import bough, sys; bough.gen; bough.function; print('torch' in sys.modules)") == "False"


def test_every_name_of_the_language_is_the_package_s_too():
    for name in bough.lang.__all__:
        assert getattr(bough, name) is getattr(bough.lang, name)
    assert set(bough.lang.__all__) <= set(dir(bough))
