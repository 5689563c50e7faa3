"""Start-up: from process start to the first token, phase by phase.

    bough bench startup MODEL --repeat 3

The first start may have an empty page cache and no compiled kernels; later ones show the time without these.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

from bough.bench.engine_settings import NOTE, parse_with_settings
from bough.config.command_line import CommandParser

Json = dict[str, Any]


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="bough bench startup",
        usage="bough bench startup [MODEL] [options]",
        description=__doc__,
        epilog=NOTE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--repeat", type=int, default=3, metavar="N", help="starts, one after the other (default: 3)")
    made.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return made


def main() -> None:
    options, settings = parse_with_settings(parser(), sys.argv[1:])
    starts = [measure(settings) for _ in range(max(1, options.repeat))]
    if options.json:
        print(json.dumps({"starts": starts, "median_s": statistics.median(start["total_s"] for start in starts)}))
        return
    names = list(starts[0]["phases_s"])
    heads = ["first" if number == 0 else f"start {number + 1}" for number in range(len(starts))]
    print(f"{'seconds':<36}" + "".join(f"{head:>10}" for head in heads))
    for name in names:
        print(f"{name:<36}" + "".join(f"{start['phases_s'].get(name, 0.0):>10.3f}" for start in starts))
    print(f"{'to the first token':<36}" + "".join(f"{start['total_s']:>10.3f}" for start in starts))


def measure(settings: Json) -> Json:
    """Starts an engine, generates one token, ends it. `phases_s` add up to `total_s`."""
    began = time.perf_counter()
    from bough.offline import Engine

    imported = time.perf_counter()
    with Engine(**settings) as engine:
        ready = time.perf_counter()
        engine.generate(input_ids=[1, 2, 3, 4], sampling_params={"temperature": 0.0, "max_new_tokens": 1})
        answered = time.perf_counter()
        phases: dict[str, float] = engine.get_server_info()["startup_s"]
    around = ready - imported - sum(phases.values())
    return {
        "phases_s": {
            "importing bough": imported - began,
            "starting processes, tokenizer": around,
            **phases,
            "first token": answered - ready,
        },
        "total_s": answered - began,
    }


if __name__ == "__main__":
    main()
