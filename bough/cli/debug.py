"""`bough debug compare A B`: compares two runs of one request layer by layer, and shows where they diverge."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bough.config.command_line import CommandParser
from bough.core.errors import ConfigError

Tensors = Mapping[str, npt.NDArray[Any]]

_NOT_COMPARED = ("positions", "ids", "logits_at")


@dataclass(frozen=True, slots=True)
class Difference:
    """How one tensor differs between two runs, over the tokens that both have."""

    name: str
    tokens: int
    largest: float
    mean: float
    relative: float
    """Norm of the difference over the norm of the first; not finite if either has such values."""


def parser() -> CommandParser:
    made = CommandParser(
        prog="bough debug",
        description="Compares what two runs made of one request. Exit status: 0 they agree, 1 they differ.",
        epilog="Files come from a server with --tensor-dump-dir DIRECTORY and a request whose rid begins with 'dump-'.",
    )
    actions = made.add_subparsers(dest="command", required=True, parser_class=CommandParser)
    compared = actions.add_parser("compare", help="two dumps, layer by layer")
    compared.add_argument("first", help="a file that --tensor-dump-dir wrote")
    compared.add_argument("second", help="another one, of the same prompt")
    compared.add_argument("--tolerance", type=float, default=0.02, metavar="X",
                          help="relative difference that counts as none (%(default)s)")  # fmt: skip
    compared.add_argument("--all", action="store_true", help="show every tensor, not only blocks and what differs")
    compared.add_argument("--json", action="store_true", help="print as JSON")
    return made


def run(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(list(argv))
    first, second = read(arguments.first), read(arguments.second)
    shared = shared_tokens(first, second)
    differences = compare(first, second, shared)
    apart = [each for each in differences if not each.relative <= arguments.tolerance]
    if arguments.json:
        report_ = {
            "shared_tokens": shared,
            "differs": [each.name for each in apart],
            "tensors": [asdict(d) for d in differences],
        }
        print(json.dumps(report_, indent=1))
    else:
        print(report(differences, apart, first, second, shared, arguments.tolerance, everything=arguments.all))
    return 1 if apart else 0


def read(name: str) -> Tensors:
    """A dump's tensors. Raises `ConfigError`."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    path = Path(name).expanduser()
    try:
        tensors: Tensors = load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no safetensors file"
        raise ConfigError(
            what=f"can't read {path}", why=why or "", fix="name a file that --tensor-dump-dir wrote"
        ) from error
    if not {"ids", "positions"} <= set(tensors):
        raise ConfigError(
            what=f"{path} is no dump of a request",
            why="it has no ids and positions",
            fix="name a file of --tensor-dump-dir",
        )
    return tensors


def shared_tokens(first: Tensors, second: Tensors) -> int:
    """Number of first positions with the same tokens in both. Raises `ConfigError` if there are none."""
    common, at_first, at_second = np.intersect1d(first["positions"], second["positions"], return_indices=True)
    same = first["ids"][at_first] == second["ids"][at_second]
    count = len(common) if same.all() else int(np.argmin(same))
    if not count:
        raise ConfigError(
            what="the two dumps have no token in common",
            why="they are of different prompts, or a cached prefix was not computed again",
            fix="dump the same prompt twice, with --disable-radix-cache or after /flush_cache",
        )
    return count


def compare(first: Tensors, second: Tensors, shared: int) -> list[Difference]:
    """All tensors in both dumps, in the order in which the model computes them."""
    common = np.intersect1d(first["positions"], second["positions"])[:shared]
    found = []
    for name in sorted((set(first) & set(second)) - set(_NOT_COMPARED), key=_order):
        at = "logits_at" if name == "logits" else "positions"
        wanted = np.intersect1d(np.intersect1d(first[at], second[at]), common)
        one = first[name][np.searchsorted(first[at], wanted)].astype(np.float64)
        other = second[name][np.searchsorted(second[at], wanted)].astype(np.float64)
        if one.shape != other.shape or not len(wanted):
            continue
        gap = np.abs(one - other)
        norm = float(np.linalg.norm(one))
        relative = float(np.linalg.norm(one - other)) / (norm or 1.0)
        found.append(Difference(name, len(wanted), float(gap.max()), float(gap.mean()), relative))
    return found


def _order(name: str) -> tuple[int, int, list[int], str]:
    """Sort key: the embedding, then the parts and the output of each block, then the logits. A part comes after its
    inputs."""
    if not name.startswith("layers."):
        return (0 if name == "embed" else 2, 0, [], name)
    _, number, *path = name.split(".")
    stages = ("attn", "mlp", "qkv", "router", "gate_up", "up", "experts", "down", "out", "shared")
    places = [stages.index(part) if part in stages else len(stages) for part in path]
    return (1, int(number), [*places, len(stages) + 1], name)


def report(
    differences: Sequence[Difference], apart: Sequence[Difference], first: Tensors, second: Tensors, shared: int,
    tolerance: float, *, everything: bool,
) -> str:  # fmt: skip
    """The report as text."""
    lines = [f"{shared} tokens in common, of {len(first['ids'])} and {len(second['ids'])}"]
    lines.append(f"{'tensor':<24}{'tokens':>7}{'relative':>12}{'largest':>12}{'mean':>12}")
    for each in differences:
        if everything or each in apart or each.name.count(".") <= 1:
            mark = "  differs" if each in apart else ""
            numbers = "".join(f"{value:>12.2e}" for value in (each.relative, each.largest, each.mean))
            lines.append(f"{each.name:<24}{each.tokens:>7}{numbers}{mark}")
    if apart:
        lines.append(f"they part at {apart[0].name}: {apart[0].relative:.2e}, more than {tolerance:g}")
    else:
        lines.append(f"they agree: no relative difference above {tolerance:g}")
    return "\n".join(lines)
