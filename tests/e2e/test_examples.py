"""The programs in examples/ run on the default model through every local backend."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import bough as sgl
from tests.covers import long

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if path.stem != "backends")

APIS = ("native", "openai-chat", "openai-completion")
FEW = ["best_of_n", "json_extraction"]
"""Examples that run on every kind of backend in the short form; `long` runs all of them on all."""
OTHERS = [name for name in EXAMPLES if name not in FEW]
LONG = [long(name, api) for name in EXAMPLES for api in APIS]

# All examples in one process, on one engine: their own `use_backend` is told to use it.
ON_ENGINE = """
import runpy, sys
import bough as sgl

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    engine = sgl.Engine(log_level="warning")
    try:
        import backends
        backends.use_backend = lambda options: sgl.set_default_backend(engine)
        for name in sys.argv[2].split(","):
            sys.argv[1:] = []
            print("example", name, flush=True)
            runpy.run_path(f"{sys.path[0]}/{name}.py", run_name="__main__")
    finally:
        engine.shutdown()
"""


@pytest.fixture(scope="module")
def runtime() -> Iterator[sgl.Runtime]:
    """A server with the default model on a free port."""
    with sgl.Runtime(log_level="warning") as started:
        yield started


@pytest.fixture
def server_url(runtime: sgl.Runtime) -> str:
    return runtime.url


def run_script(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=500, env=environment, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(("name", "api"), [*zip([*FEW, "llm_judge"], APIS, strict=True), *LONG])
def test_example_on_a_server(name: str, api: str, server_url: str) -> None:
    out = run_script(str(ROOT / "examples" / f"{name}.py"), "--backend-url", server_url, "--api", api)
    assert len(out.splitlines()) >= 2


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_example_on_a_runtime(
    name: str, runtime: sgl.Runtime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The `Runtime` itself is the backend, in the process that started it."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(sgl.global_config, "default_backend", None)
    monkeypatch.setattr("backends.use_backend", lambda options: sgl.set_default_backend(runtime))
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 2


@pytest.mark.parametrize("names", [FEW, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["few", "others"])
@pytest.mark.long
def test_examples_on_an_engine(tmp_path: Path, names: list[str]) -> None:
    script = tmp_path / "on_engine.py"
    script.write_text(ON_ENGINE)
    out = run_script(str(script), str(ROOT / "examples"), ",".join(names))
    assert [line.split()[1] for line in out.splitlines() if line.startswith("example ")] == names


def test_a_batch_shares_its_prefix_on_the_server(server_url: str) -> None:
    """The second half of the few-shot prompt is all that a member computes, but for the first, which brings the examples."""
    examples = "".join(f"Question: what is {i} plus {i}? Answer: {i + i}.\n" for i in range(40))

    @sgl.function
    def few_shot(s, question):
        s += examples
        s += f"Question: {question} Answer:" + sgl.gen("answer", max_tokens=4, stop="\n")

    backend = sgl.RuntimeEndpoint(server_url)
    # As soon as nothing runs: what ended at a stop string is still computed for a step or two.
    assert httpx.post(f"{server_url}/flush_cache?timeout=60", timeout=90).status_code == 200
    states = few_shot.run_batch(
        [{"question": f"what is {i} plus 1?"} for i in range(8)], backend=backend, temperature=0
    )
    metas = [state.get_meta_info("answer") for state in states]
    prompt, cached = (sum(meta[key] for meta in metas) for key in ("prompt_tokens", "cached_tokens"))
    shared_tokens = min(meta["prompt_tokens"] for meta in metas) - 32
    assert cached >= 7 * shared_tokens, f"{cached} of {prompt} prompt tokens came from the cache"


def test_select_prefers_the_obvious(server_url: str) -> None:
    @sgl.function
    def program(s):
        s += "Paris is the capital of" + sgl.select("country", [" France", " Bolivia", " Wednesday"])

    state = program.run(backend=sgl.RuntimeEndpoint(server_url))
    assert state["country"] == " France"
