"""`bough quantize MODEL OUT --to fp8`: writes a quantised checkpoint, and reports its quality loss on a text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bough.config.command_line import CommandParser
from bough.config.memory_plan import show_bytes
from bough.core.errors import ConfigError

if TYPE_CHECKING:
    from bough.compress.texts import Ids
    from bough.tokenizer import Tokenizer

_TARGETS = ("fp8", "fp8-block", "int8", "int8-weight", "int4", "int4-gptq", "int4-awq")
_HELD_OUT = 0.8
"""Share of the built-in text used for calibration; the rest is for comparisons."""


def parser() -> CommandParser:
    made = CommandParser(
        prog="bough quantize",
        description="Writes a quantised checkpoint in the compressed-tensors format, and reports the quality loss on a "
        "text. Embeddings, the output head, norms and routers are not quantised. int4-gptq and int4-awq use the "
        "activations of a calibration text (--calibration); the others round each weight to the nearest.",
    )
    made.add_argument("model", metavar="MODEL", help="directory, hub id or .gguf file; default: the embedded model")
    made.add_argument("out", metavar="OUT", help="directory to write; it must not exist")
    made.add_argument(
        "--to",
        choices=_TARGETS,
        required=True,
        help="fp8, int8: a scale per channel, activations in 8 bits too; fp8-block: per 128 x 128; int8-weight: activations "
        "not quantised; int4: groups of columns, rounded to the nearest, by GPTQ or by AWQ",
    )
    made.add_argument(
        "--group-size",
        type=int,
        default=0,
        help="columns per group of int4 (default: 128, or a size that divides all widths)",
    )
    made.add_argument("--calibration", default="", help="text file for GPTQ and AWQ (default: Python's documentation)")
    made.add_argument("--samples", type=int, default=64, help="number of pieces of the calibration text (default: 64)")
    made.add_argument("--sample-tokens", type=int, default=256, help="tokens per piece (default: 256)")
    made.add_argument(
        "--text",
        default="",
        help="text file on which the original and the quantised model are compared (default: another part of Python's "
        "documentation); none: no comparison",
    )
    made.add_argument("--text-tokens", type=int, default=4096, help="maximum tokens of --text (default: 4096)")
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device to run the model on")
    made.add_argument("--revision", default="", help="branch, tag or commit of a model on the hub")
    return made


def run(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(list(argv))
    for name in ("samples", "sample_tokens", "text_tokens"):
        if getattr(arguments, name) < 2:
            raise ConfigError(what=f"--{name.replace('_', '-')} must be at least 2", param=name)
    compared, calibration = _read(arguments.text), _read(arguments.calibration)
    import torch

    from bough.compress.job import CompressionJob
    from bough.compress.targets import TARGETS
    from bough.config.hf import open_checkpoint
    from bough.tokenizer import load_tokenizer

    model = "" if arguments.model == "default" else arguments.model
    source = open_checkpoint(model, revision=arguments.revision)
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    job = CompressionJob(source, Path(arguments.out), TARGETS[arguments.to], arguments.group_size, torch.device(device))
    needs_text = job.target.method != "nearest" or arguments.text != "none"
    tokenizer = load_tokenizer(source) if needs_text else None
    texts: list[Ids] = []
    if tokenizer is not None and arguments.text != "none":
        texts = _pieces(tokenizer, compared, -(-arguments.text_tokens // 512), 512, first=_HELD_OUT)
    samples: list[Ids] = []
    if tokenizer is not None and job.target.method != "nearest":
        samples = _pieces(tokenizer, calibration, arguments.samples, arguments.sample_tokens, last=_HELD_OUT)
    begin = time.perf_counter()
    outcome = job.run(samples, texts, lambda said: print(said, flush=True))
    sizes = [sum(each.nbytes for each in of.tensors.values()) for of in (source, open_checkpoint(arguments.out))]
    print(
        f"{arguments.out}: {show_bytes(sizes[1])}, from {show_bytes(sizes[0])}, in {time.perf_counter() - begin:.0f} s"
    )
    if outcome is not None:
        before, after = outcome
        on = arguments.text or "Python's documentation"
        print(f"perplexity {before.perplexity:.3f} -> {after.perplexity:.3f} on {on}, KL {after.divergence:.4f}")
    return 0


def _pieces(
    tokenizer: Tokenizer, text: str, count: int, length: int, *, first: float = 0.0, last: float = 1.0
) -> list[Ids]:
    """Token ids of the user's text, or of the part of the built-in one between `first` and `last`."""
    from bough.compress.texts import built_in_text, cut_text

    if not text:
        built_in = built_in_text()
        text = built_in[int(first * len(built_in)) : int(last * len(built_in))]
    pieces = cut_text(tokenizer.encode(text), count, length)
    if not pieces:
        raise ConfigError(what="the text is too short", why="two tokens are the least", fix="name a longer one")
    return pieces


def _read(path: str) -> str:
    if path in ("", "none"):
        return ""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(what=f"{path} can't be read", why=str(error), fix="name a text file in UTF-8") from None
