"""The wheel's CPU kernels beside kernels that are compiled here for this very CPU. Run by hand:

    python benchmarks/prebuilt_kernels.py [--rounds 12]

Both libraries are loaded into one process, and the default model uses them by turns, with one thread: a prompt, then an
answer. What is compared is CPU time, as medians of the rounds and of the ratios within each round, so that other work on the
machine matters little. The variant of the wheel is the one that this CPU would get.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bough.config.hf import open_checkpoint
from bough.core.sampling import SamplingParams
from bough.kernels.cpu_build import compiling, shared_library
from bough.kernels.cpu_build.compiler import Recipe, build, find_recipe
from bough.models.load import build_model
from bough.platform.prebuilt import VARIANTS
from bough.platform.processor import processor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "grid"))
from in_process import InProcess, Setup

CONTEXT = 1024


class Switched:
    """Stands in for the library: functions are those of the one that is chosen."""

    def __init__(self, libraries: dict[str, ctypes.CDLL]) -> None:
        self.libraries = libraries
        self.chosen = next(iter(libraries))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.libraries[self.chosen], name)


def install(switched: Switched) -> None:
    """Makes all kernels of this process use it."""
    for module in list(sys.modules.values()):
        found = vars(module).get("library")
        if module.__name__.startswith("bough.") and callable(found):
            module.library = lambda: switched  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--answer", type=int, default=32, help="tokens")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    shared_library.share_openmp()
    recipe = find_recipe()
    variant = next((each for each in VARIANTS if each.needs <= processor().flags), None)
    if variant is None:
        raise SystemExit("the wheel has no kernels for this CPU")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / variant.file_name
        jobs = os.cpu_count() or 1
        compiling.compile_library(recipe.compiler, variant.machine, target, sources=compiling.SOURCES, jobs=jobs)
        wheel = shared_library.load(target)
    switched = Switched({"native": shared_library.load(build(Recipe(recipe.compiler))), variant.name: wheel})
    install(switched)
    checkpoint = open_checkpoint("")
    model = build_model(
        checkpoint, dtype=torch.float32, device=torch.device("cpu"), quantization="gguf", context_length=CONTEXT
    )
    install(switched)
    setup = Setup(attention="cpu", context_length=CONTEXT, stream=False, radix_cache=False, overlap=False)
    engine = InProcess(model, checkpoint.vocab, setup)
    dice = random.Random(1)
    prompt = [dice.randrange(300, 40_000) for _ in range(asked.prompt)]
    work = {"prefill": (prompt, 1), "decode": (prompt[:16], asked.answer)}
    times: dict[tuple[str, str], list[float]] = {(kind, name): [] for kind in work for name in switched.libraries}
    for number in range(asked.rounds + 1):
        for name in list(switched.libraries)[:: 1 if number % 2 else -1]:
            switched.chosen = name
            for kind, (tokens, count) in work.items():
                before = time.process_time()
                engine.generate([tokens], SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True))
                if number:  # the first round warms up
                    times[kind, name].append(time.process_time() - before)
    print(f"{asked.prompt} prompt tokens; {asked.answer} tokens of an answer; one thread; {asked.rounds} rounds\n")
    print("| | kernels | CPU s, best | median | ratio to native, median of rounds | of best |\n|" + "---|" * 6)
    for (kind, name), seconds in times.items():
        base = times[kind, "native"]
        ratio = statistics.median(mine / other for mine, other in zip(seconds, base, strict=True))
        best, middle = min(seconds), statistics.median(seconds)
        print(f"| {kind} | {name} | {best:.3f} | {middle:.3f} | {ratio:.3f} | {best / min(base):.3f} |")


if __name__ == "__main__":
    main()
