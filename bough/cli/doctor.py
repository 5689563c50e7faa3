"""`bough doctor [MODEL]`: checks this machine, and whether a model fits. Loads no weights."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from platform import python_version
from typing import Literal

from bough.cli.config_flags import parse, without_flags
from bough.cli.version import installed
from bough.config.command_line import CommandParser
from bough.config.concerns import Config, ParallelConfig
from bough.config.default_model import DEFAULT_MODEL_NAME, default_model_file
from bough.config.hosts import ranks_per_node
from bough.config.hub_files import HubUnreachable
from bough.config.hub_headers import is_hub_name
from bough.config.hub_name import parse_hub_name
from bough.config.memory_plan import GIB, show_bytes
from bough.core.errors import BoughError, ConfigError
from bough.platform.cuda_driver import query_gpu
from bough.platform.facts import DeviceFacts, detect, torch_cuda_version

Verdict = Literal["OK", "WARN", "FAIL"]

EXIT = {"OK": 0, "WARN": 1, "FAIL": 2}

_NEEDED = ("torch", "numpy", "msgspec", "starlette", "uvicorn", "tokenizers", "safetensors", "gguf", "jinja2")
_USEFUL = {"uvloop": "serves fewer requests per second", "xgrammar": "can't constrain answers to JSON or grammars"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    verdict: Verdict
    what: str
    fix: str = ""

    def line(self) -> str:
        fix = f"\n      fix: {self.fix}" if self.fix else ""
        return f"{self.verdict:<4}  {self.what}{fix}"


def parser() -> CommandParser:
    made = CommandParser(
        prog="bough doctor",
        description="Checks this machine, and whether MODEL fits it. MODEL may be a path, or a name on the hub: then its "
        "configuration and headers are read there, and no weights. Exit status: 0 all well, 1 warnings, 2 failures.",
        epilog="Every flag of `bough serve` may follow, to ask about that very command.",
        usage="bough doctor [MODEL] [--json] [--media URL] [--flag value ...]",
        allow_abbrev=False,
    )
    made.add_argument("--json", action="store_true", help="print findings as JSON")
    made.add_argument(
        "--media", metavar="URL", action="append", default=[],
        help="would a picture (an http, https, file or data URL) pass, under the media flags that follow?",
    )  # fmt: skip
    return made


def run(argv: Sequence[str]) -> int:
    arguments, rest = parser().parse_known_args(list(argv))
    config, rest = _asked(rest)
    asked = config.model.model or default_model_file() is not None
    findings = [*machine(config), *(fits(config) if asked else [])]
    findings += [passes(url, config) for url in arguments.media]
    if all(finding.verdict != "FAIL" for finding in findings):
        findings += commands(rest, config.parallel)
    worst = max((finding.verdict for finding in findings), key=lambda verdict: EXIT[verdict])
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            print(finding.line())
    return EXIT[worst]


_TO_FILL_IN = {"dist_init_addr": "MACHINE_0:20000", "dist_secret": "........"}
"""Settings that several machines need only when they are started, and placeholders for them."""


def _asked(flags: Sequence[str]) -> tuple[Config, list[str]]:
    """The configuration in question, and the flags with placeholders filled in."""
    known = list(flags)
    while True:
        try:
            return parse(known).loaded.config, known
        except ConfigError as error:
            missing = error.param or ""
            flag = "--" + missing.replace("_", "-")
            if missing not in _TO_FILL_IN or any(each.partition("=")[0] == flag for each in known):
                raise
            known += [flag, _TO_FILL_IN[missing]]


def machine(config: Config) -> Iterator[Finding]:
    """Findings about this machine and its Python."""
    yield from _packages()
    yield from _devices()
    yield from _host(detect("cpu"))
    yield _default_model()
    yield _port(config.server.host, config.server.port)
    yield _disk()


def commands(flags: Sequence[str], parallel: ParallelConfig) -> Iterator[Finding]:
    """The command for each of several machines. The secret is left to the environment."""
    if parallel.nnodes == 1:
        return
    kept = [shlex.quote(flag) for flag in without_flags(flags, "--node-rank", "--dist-secret")]
    ranks = ranks_per_node(parallel)
    for node in range(parallel.nnodes):
        command = f"BOUGH_DIST_SECRET=... bough serve {' '.join(kept)} --node-rank {node}"
        yield Finding("OK", f"on machine {node}, for ranks {node * ranks} to {(node + 1) * ranks - 1}: {command}")


def fits(config: Config) -> Iterator[Finding]:
    """Whether the model that `config` names can be served here, by its headers and arithmetic alone.

    Of a model on the hub that is not on this machine, the configuration and the headers are read there.
    """
    from bough.config.hf import checkpoint_of
    from bough.engine.auto_parallel import choose_parallel
    from bough.engine.decide import decide

    name = config.model.model or DEFAULT_MODEL_NAME
    with tempfile.TemporaryDirectory(prefix="bough-doctor-") as folder:
        try:
            if is_hub_name(config.model.model):
                path, remark = _headers(config.model.model, config.model.revision, Path(folder))
                if remark:
                    yield Finding("OK", f"{name}: {remark}")
                config = replace(config, model=replace(config.model, model=str(path)))
            if config.parallel.auto_parallel:
                spread = choose_parallel(config, detect(config.device.device), checkpoint_of(config.model))
                yield from (Finding("OK", f"--auto-parallel: {line}") for line in spread.because)
                config = replace(config, parallel=spread.parallel)
            decided = decide(config, detect(config.device.device))
        except HubUnreachable as error:
            yield Finding(
                "WARN", f"{name}: it is not on this machine, and the hub can't be reached ({error.why})", error.fix
            )
            return
        except BoughError as error:
            yield Finding("FAIL", f"{name}: {error.what}" + (f" ({error.why})" if error.why else ""), error.fix)
            return
    plan = decided.resolved.plan
    concurrency = f"{plan.max_concurrency:.1f} requests of {plan.context_length:,} tokens at once"
    yield Finding("OK", f"{name} fits ({decided.facts.architecture}): {concurrency}")
    chosen = decided.resolved.decisions.get("quantization")
    if chosen is not None and chosen.value != "none":
        yield Finding("OK", f"  weights are quantised, {chosen.value}: {chosen.because}")
    for what, size, remark in plan.rows():
        yield Finding("OK", f"  {what:<12} {show_bytes(size):>10}  {remark}".rstrip())


def _headers(model: str, revision: str, folder: Path) -> tuple[Path, str]:
    """The path with the headers of a model on the hub, and a remark if they were fetched. Raises `ConfigError`."""
    from bough.config.download import cached
    from bough.config.hub_headers import fetch_headers

    name = parse_hub_name(model)
    if name is None:
        raise ConfigError(what=f"there is no model at {model}", why="the path does not exist", fix="check the path")
    held = cached(name, revision)
    if held is not None:
        return held, ""
    fetched: list[str] = []
    path = fetch_headers(name, revision, folder, fetched.append)
    size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    return path, f"{show_bytes(size)} in {len(fetched)} files on the hub, of which the headers were read"


def passes(url: str, config: Config) -> Finding:
    """Whether the media settings allow this image. It is fetched and measured, but not decoded."""
    import asyncio

    from bough.multimodal import Door

    shown = url if len(url) <= 80 else url[:77] + "..."
    try:
        picture = asyncio.run(Door(config.media).fetch(url))
    except BoughError as error:
        return Finding("FAIL", f"{shown}: {error.what}" + (f" ({error.why})" if error.why else ""), error.fix)
    frames = f", {picture.frames} frames" if picture.frames > 1 else ""
    size = f"{picture.width:,} x {picture.height:,} pixels{frames}, {show_bytes(len(picture.data))}"
    return Finding("OK", f"{shown}: {picture.kind.upper()}, {size}")


def _packages() -> Iterator[Finding]:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        yield Finding("FAIL", f"packages are missing: {', '.join(missing)}", "pip install bough")
    else:
        versions = ", ".join(f"{name} {installed(name) or 'missing'}" for name in ("torch", "transformers"))
        yield Finding("OK", f"Python {python_version()}, {versions}")
    for name, without in _USEFUL.items():
        if name not in sys.modules and importlib.util.find_spec(name) is None:  # parts of a loaded one have no spec
            yield Finding("WARN", f"{name} is not installed: the server {without}", f"pip install {name}")


def _devices() -> Iterator[Finding]:
    gpu = query_gpu()
    if gpu is None:
        yield Finding("OK", "no GPU is visible: models run on the CPU")
        return
    free = f"{show_bytes(gpu.free_bytes)} free of {show_bytes(gpu.total_bytes)}"
    what = f"{gpu.num_devices} x {gpu.name} (sm{gpu.capability[0]}{gpu.capability[1]}), {free}"
    if torch_cuda_version() is None:
        yield Finding("WARN", f"{what}, but this torch is a build for the CPU", "install a CUDA build of torch")
    elif gpu.free_bytes < 0.5 * gpu.total_bytes:
        yield Finding("WARN", f"{what}: others use most of it", "see nvidia-smi for who does")
    else:
        yield Finding("OK", what)


def _host(cpu: DeviceFacts) -> Iterator[Finding]:
    yield Finding("OK", f"CPU: {cpu.name}, {cpu.physical_cores} cores, {cpu.arch}")
    memory = f"{show_bytes(cpu.host_free_bytes)} of {show_bytes(cpu.host_total_bytes)} memory free"
    if cpu.host_free_bytes < 2 * GIB:
        yield Finding("WARN", memory, "end other programs: even small models want about 1.2 GiB")
    else:
        yield Finding("OK", memory)
    if cpu.prebuilt is not None:
        yield Finding("OK", f"CPU kernels: {cpu.prebuilt.stem.removeprefix('bough_cpu_')}, which came with the package")
    elif cpu.compiler is not None:
        yield Finding("OK", f"CPU kernels: compiled on first use by {cpu.compiler}")
    else:
        fix = "install bough's wheel for Linux on x86-64, or a C++ compiler (g++ or clang)"
        yield Finding(
            "WARN", "no CPU kernels and no C++ compiler were found: PyTorch's own are used, which are slower", fix
        )


def _default_model() -> Finding:
    path = default_model_file()
    if path is not None:
        return Finding("OK", f"the default model is on this machine: {path.name}")
    return Finding("OK", f"the default model, {DEFAULT_MODEL_NAME}, is fetched when it is first served (94 MiB)")


def _port(host: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            return Finding("WARN", f"{host}:{port} can't be listened on: {error.strerror}", "choose another --port")
    return Finding("OK", f"{host}:{port} is free")


def _disk() -> Finding:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    place = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < 5 * GIB:
        return Finding("WARN", f"{show_bytes(free)} disk space for models", "free some, or set HF_HOME to another disk")
    return Finding("OK", f"{show_bytes(free)} disk space for models")
