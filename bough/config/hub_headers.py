"""The headers of a model on the hub, without its weights: enough to say whether it fits a machine.

Files with weights are made locally with their real headers and real sizes and no data: sparse files, which take no space.
So everything that reads headers (`open_checkpoint`, the memory plan) reads them as it would the real ones.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bough.config.gguf_header import read_gguf_header
from bough.config.hub_files import HubFile, explained, list_files, wanted_files
from bough.config.hub_name import HubName
from bough.core.errors import ConfigError

if TYPE_CHECKING:
    import httpx

_SMALL_BYTES: Final = 64 * 1024 * 1024
"""Files other than weights up to this size are fetched whole; a tokenizer has up to 35 MB."""
_FIRST_BYTES: Final = 512 * 1024
"""Of a file with weights. The header of a safetensors file of an 8B model has 40 KB; a GGUF file's has its vocabulary, 2 to
12 MB, and is fetched in pieces that double."""
_TIMEOUT_S: Final = 30.0

Report = Callable[[str], None]


def fetch_headers(name: HubName, revision: str, folder: Path, report: Report | None = None) -> Path:
    """Writes the model to `folder` with headers but without weights, and returns the directory or the GGUF file.

    `report` is called with the name of each file. Raises `ConfigError`.
    """
    import httpx
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    with explained(name.repo, revision):
        files = list_files(name.repo, revision)
        chosen = set(wanted_files(name, [file.name for file in files]))
        with httpx.Client(headers=build_hf_headers(), follow_redirects=True, timeout=_TIMEOUT_S) as client:
            for file in files:
                if file.name in chosen and not file.name.endswith("tokenizer.json"):
                    if report is not None:
                        report(file.name)
                    _fetch(client, name.repo, revision, file, folder / file.name)
    return _model_in(folder, sorted(chosen))


def _model_in(folder: Path, names: Sequence[str]) -> Path:
    ggufs = [name for name in names if name.endswith(".gguf")]
    return folder / ggufs[0] if ggufs and len(ggufs) == len(names) else folder


def _fetch(client: httpx.Client, repo: str, revision: str, file: HubFile, target: Path) -> None:
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(repo, file.name, revision=revision or None)
    target.parent.mkdir(parents=True, exist_ok=True)
    if file.name.endswith(".safetensors"):
        _write_sparse(target, _safetensors_header(client, url, file), file.size)
    elif file.name.endswith(".gguf"):
        _fetch_gguf(client, url, file, target)
    elif file.size <= _SMALL_BYTES:
        target.write_bytes(_get(client, url, None))


def _safetensors_header(client: httpx.Client, url: str, file: HubFile) -> bytes:
    data = _get(client, url, min(_FIRST_BYTES, file.size))
    if len(data) < 8:
        raise ConfigError(what=f"{file.name} is no safetensors file", why=f"it has {len(data)} bytes")
    length = 8 + struct.unpack("<Q", data[:8])[0]
    if length > min(file.size, 100_000_000):  # the format's own limit
        raise ConfigError(what=f"{file.name} is no safetensors file", why=f"its header would have {length:,} bytes")
    return data[:length] if len(data) >= length else _get(client, url, length)


def _fetch_gguf(client: httpx.Client, url: str, file: HubFile, target: Path) -> None:
    wanted = _FIRST_BYTES
    while True:
        wanted = min(4 * wanted, file.size)
        _write_sparse(target, _get(client, url, wanted), file.size)
        try:
            header = read_gguf_header(target)
        except ConfigError:  # it ends within the header: what follows are zeros
            if wanted == file.size:
                raise
            continue
        if header.data_offset <= wanted:
            return


def _get(client: httpx.Client, url: str, first_bytes: int | None) -> bytes:
    """A file, or its first bytes. Raises httpx's errors."""
    headers = {} if first_bytes is None else {"range": f"bytes=0-{first_bytes - 1}"}
    with client.stream("GET", url, headers=headers) as response:
        response.raise_for_status()
        data = bytearray()
        for piece in response.iter_bytes():
            data += piece
            if first_bytes is not None and len(data) >= first_bytes:  # a hub that does not know ranges sends all of it
                break
    return bytes(data if first_bytes is None else data[:first_bytes])


def _write_sparse(target: Path, data: bytes, size: int) -> None:
    target.write_bytes(data)
    os.truncate(target, size)


def is_hub_name(model: str) -> bool:
    """Whether `model` can only be a name on the hub: it is not an existing path and does not look like one."""
    return bool(model) and not Path(model).expanduser().exists() and not re.match(r"[/.~]|.*\.gguf$", model)
