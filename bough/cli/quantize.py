"""`bough quantize MODEL OUT --to fp8`: writes a quantised checkpoint, and says what it costs on a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from bough.config.command_line import CommandParser
from bough.config.memory_plan import show_bytes
from bough.core.errors import ConfigError


def parser() -> CommandParser:
    made = CommandParser(
        prog="bough quantize",
        description="Writes a model's weights in fewer bits, each rounded to the nearest, as compressed-tensors has them. "
        "Embeddings, the output head, norms and routers stay as they are.",
    )
    made.add_argument("model", metavar="MODEL", help="directory or hub id of a model in floats (safetensors)")
    made.add_argument("out", metavar="OUT", help="directory to write; it must not exist")
    made.add_argument("--to", choices=("fp8", "int8", "int4"), required=True, help="fp8 and int8: a scale per channel")
    made.add_argument("--group-size", type=int, default=0, help="of int4 (default: 128, or what divides all widths)")
    made.add_argument("--text", default="", help="file whose perplexity is computed before and after")
    made.add_argument("--revision", default="", help="branch, tag or commit of a model on the hub")
    return made


def run(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(list(argv))
    from bough.config.hf import open_checkpoint
    from bough.quantization.write import largest_group, write_quantised

    text = _read(arguments.text)
    source = open_checkpoint(arguments.model, revision=arguments.revision)
    widths = [each.shape[1] for name, each in source.tensors.items() if "layers." in name and len(each.shape) == 2]
    group = arguments.group_size or largest_group(widths)
    out = Path(arguments.out)
    write_quantised(source, out, arguments.to, group=group, tell=lambda said: print(said, flush=True))
    sizes = [sum(each.nbytes for each in of.tensors.values()) for of in (source, open_checkpoint(str(out)))]
    print(f"{out}: {show_bytes(sizes[1])}, from {show_bytes(sizes[0])}")
    if text:
        before, after = (perplexity(str(path), text) for path in (source.path, out))
        print(f"perplexity {before:.3f} -> {after:.3f} on {arguments.text}")
    return 0


def _read(path: str) -> str:
    if not path:
        return ""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(what=f"{path} can't be read", why=str(error), fix="name a text file in UTF-8") from None


def perplexity(model: str, text: str) -> float:
    """Of the text's first tokens, as many as the model takes at once, up to 2,048."""
    from bough.engine_api import Engine

    with Engine(model=model, log_level="error") as engine:
        assert engine.tokenizer is not None, "only --skip-tokenizer-init goes without one"
        most = min(2048, int(engine.get_server_info()["context_length"]) - 1)
        ids = engine.tokenizer.encode(text)[:most]
        answer = engine.generate(
            input_ids=ids,
            sampling_params={"max_new_tokens": 1, "temperature": 0},
            return_logprob=True,
            logprob_start_len=0,
        )
    assert isinstance(answer, dict), "one prompt, not streamed"
    found = [each[0] for each in answer["meta_info"]["input_token_logprobs"] if each[0] is not None]
    return math.exp(-sum(found) / len(found))
