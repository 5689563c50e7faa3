"""`bough shard MODEL OUT --tp-size 8`: cuts a checkpoint into one file per rank."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from bough.cli.config_flags import parse
from bough.config.command_line import CommandParser
from bough.config.memory_plan import show_bytes


def parser() -> CommandParser:
    made = CommandParser(
        prog="bough shard",
        description="Writes a checkpoint as a file for each rank of an engine, with the parts of tensors that the rank "
        "reads. `bough serve OUT` with the same sizes reads them; a machine needs the files of its own ranks, and those "
        "without weights. It pays where storage is slow or far away, or where the same model starts often.",
        epilog="Every flag of `bough serve` may follow: --tp-size, --pp-size, --ep-size, --attn-dp-size ... say which "
        "ranks there are.",
        usage="bough shard MODEL OUT --tp-size N [--flag value ...]",
        allow_abbrev=False,
    )
    made.add_argument("model", metavar="MODEL", help="directory or hub id of a checkpoint in safetensors")
    made.add_argument("out", metavar="OUT", help="directory to write; it must not exist")
    made.add_argument("flags", nargs=argparse.REMAINDER, help="flags of `bough serve`")
    return made


def run(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(list(argv))
    config = parse([arguments.model, *arguments.flags]).loaded.config
    from bough.engine.decide import decide
    from bough.engine.shard import shard_checkpoint
    from bough.platform.facts import detect

    out = Path(arguments.out)
    begin = time.perf_counter()
    decided = decide(config, detect(config.device.device))
    sizes = shard_checkpoint(decided, out, lambda name: print(f"{name} written", flush=True))
    whole = sum(each.nbytes for each in decided.checkpoint.tensors.values())
    print(
        f"{out}: {len(sizes)} files of {show_bytes(min(sizes))} to {show_bytes(max(sizes))}, from {show_bytes(whole)}, "
        f"in {time.perf_counter() - begin:.0f} s"
    )
    return 0
