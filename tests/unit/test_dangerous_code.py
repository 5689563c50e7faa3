"""No code of ours runs data: no pickle, no eval, no unsafe loaders, no shell, and no check that `python -O` removes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "bough"
FILES = sorted(ROOT.rglob("*.py"))

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "rpyc", "jsonpickle", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    ("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("torch", "load"), ("torch", "save"),
    ("os", "system"), ("os", "popen"), ("np", "load"), ("numpy", "load"), ("tempfile", "mktemp"),
}  # fmt: skip


def problems(tree: ast.AST) -> Iterator[str]:
    """What is wrong, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for each in names:
                    if each.name.split(".")[0] in MODULES:
                        yield f"line {node.lineno}: imports {each.name}"
            case ast.ImportFrom(module=str(module)):
                if module.split(".")[0] in MODULES:
                    yield f"line {node.lineno}: imports from {module}"
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield f"line {node.lineno}: calls {name}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)) if (owner, name) in ATTRIBUTES:
                yield f"line {node.lineno}: calls {owner}.{name}"
            case ast.Call(keywords=keywords):
                for each in keywords:
                    if each.arg == "shell" and not (isinstance(each.value, ast.Constant) and each.value.value is False):
                        yield f"line {node.lineno}: runs a shell"
                    if each.arg == "allow_pickle" and getattr(each.value, "value", None) is not False:
                        yield f"line {node.lineno}: allows pickle"


def test_nothing_runs_data() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {problem}"
        for path in FILES
        for problem in problems(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert FILES
    assert not found, "\n".join(found)


def test_the_search_finds_what_it_looks_for() -> None:
    bad = """
import pickle
from dill import loads
eval("1")
yaml.load(x)
torch.load(path)
subprocess.run(x, shell=True)
np.load(p, allow_pickle=True)
os.system("ls")
"""
    assert len(list(problems(ast.parse(bad)))) == 8


CHECKED = ("entrypoints", "engine_client", "tokenizer", "config", "ipc", "scheduler/accept.py")


def test_no_check_of_clients_input_is_an_assert() -> None:
    """`python -O` drops asserts: where client data is judged, an assert may only state what types can't."""
    found = []
    for path in FILES:
        relative = str(path.relative_to(ROOT))
        if not relative.startswith(CHECKED):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assert):
                names = {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)}
                if names & {"request", "body", "data", "raw", "given", "headers", "asked"}:
                    found.append(f"{relative}:{node.lineno}: {ast.unparse(node.test)}")
    allowed = {"is not None", "isinstance"}
    assert [each for each in found if not any(word in each for word in allowed)] == []
