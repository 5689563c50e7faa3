"""Downloads models from the hub into its local cache and verifies them, with progress reports.

Files with weights are downloaded here, so that an interrupted download can be resumed, also by another process.
`huggingface_hub` downloads small files and manages the layout of the cache, so that other programs find the files.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from bough.config.hub_files import HubFile, HubUnreachable, explained, list_files, wanted_files
from bough.config.hub_name import HubName
from bough.core.errors import ConfigError

if TYPE_CHECKING:
    import httpx

Progress = Callable[[int, int], None]
"""Called with the number of bytes downloaded and the total; possibly from another thread."""

_AT_ONCE: Final = 4
"""Number of files that are downloaded at the same time."""
_READ_BYTES: Final = 1 << 20
_REPORT_EVERY_S: Final = 0.2
_TRIES: Final = 5
"""Maximum number of consecutive connections that break before a byte arrives."""
_WAIT_S: Final = 1.0
"""Seconds before the second attempt; doubles with each further one."""
_TIMEOUT_S: Final = 30.0
"""Seconds without any byte after which a connection counts as broken."""


def download(
    name: HubName,
    revision: str = "",
    *,
    weights: bool = True,
    check_all: bool = False,
    progress: Progress | None = None,
    checking: Progress | None = None,
    into: str = "",
) -> Path:
    """The directory with the model's files, or its GGUF file (of several parts, the first).

    Downloads files that are missing in the local cache (at `into`; empty: the hub's cache) and compares them with the
    hub's checksums (`check_all`: also files that were there before). If the hub cannot be reached, the files of the
    cache are used. `progress` and `checking` are called with the progress of downloads and checks. Raises
    `ConfigError`.
    """
    try:
        with explained(name.repo, revision):
            files = list_files(name.repo, revision)
    except HubUnreachable:
        held = cached(name, revision, weights=weights, into=into)
        if held is None:
            raise
        return held
    chosen = set(wanted_files(name, [file.name for file in files], weights=weights))
    wanted = [file for file in files if file.name in chosen]
    before = [file for file in wanted if _is_whole(_blobs(name.repo, into), file)]
    missing = [file for file in wanted if file.sha256 and file not in before]
    with explained(name.repo, revision), _quietly():
        _fetch_all(name.repo, revision, missing, wanted, progress, _blobs(name.repo, into))
        folder = _snapshot(name.repo, revision, sorted(chosen), into)
    _check(
        folder, wanted if check_all else [file for file in wanted if not file.sha256 and file not in before], checking
    )
    return _place(folder, sorted(chosen))


def cached(name: HubName, revision: str = "", *, weights: bool = True, into: str = "") -> Path | None:
    """What `download` would return, from the local cache only; None if it is not there. Does not contact the hub."""
    repo = _blobs(
        name.repo, into
    ).parent  # the layout of the cache: refs/BRANCH holds a commit, snapshots/COMMIT its files
    commit = revision or "main"
    with contextlib.suppress(OSError):
        commit = (repo / "refs" / commit).read_text().strip()
    folder = repo / "snapshots" / commit
    present = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    chosen = wanted_files(name, present, weights=weights)
    return _place(folder, chosen) if chosen else None


def _snapshot(repo: str, revision: str, names: Sequence[str], into: str) -> Path:
    """Completes the cache's directory of this revision: fetches small files and links those that were fetched here."""
    from huggingface_hub import snapshot_download

    patterns = [_literally(name) for name in names]
    return Path(snapshot_download(repo, revision=revision or None, cache_dir=_cache(into), allow_patterns=patterns))


def _literally(name: str) -> str:
    """A pattern that matches this name only."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _place(folder: Path, names: Sequence[str]) -> Path:
    """The model among these files: a GGUF file, or the directory."""
    ggufs = [name for name in names if name.endswith(".gguf")]
    return folder / ggufs[0] if ggufs and len(ggufs) == len(names) else folder


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Disables the progress bars of `huggingface_hub`."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    silent = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not silent:
            enable_progress_bars()


# -- fetching -------------------------------------------------------------------------------------


def _fetch_all(
    repo: str,
    revision: str,
    files: Sequence[HubFile],
    wanted: Sequence[HubFile],
    progress: Progress | None,
    blobs: Path,
) -> None:
    """Downloads large files into the cache's `blobs`. `wanted`: all files of the model, for progress reports."""
    import httpx
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if not files:
        return
    blobs.mkdir(parents=True, exist_ok=True)
    account = _Account(sum(file.size for file in wanted), progress)
    account.add(sum(file.size for file in wanted if file not in files))
    with (
        httpx.Client(headers=build_hf_headers(), follow_redirects=True, timeout=_TIMEOUT_S) as client,
        ThreadPoolExecutor(_AT_ONCE) as threads,
    ):
        jobs = []
        for file in files:
            url = hf_hub_url(repo, file.name, revision=revision or None)
            jobs.append(threads.submit(_fetch, client, url, file, blobs, account))
        try:
            for job in jobs:
                job.result()
        except BaseException:
            account.stop()
            raise
    account.done()


def _fetch(client: httpx.Client, url: str, file: HubFile, blobs: Path, account: _Account) -> None:
    """Downloads one file into the cache, resuming an earlier attempt. Raises `ConfigError` if its checksum is wrong."""
    part, whole = blobs / f"{file.blob}.incomplete", blobs / file.blob
    with part.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # another process may be fetching the same
        if whole.exists():
            part.unlink(missing_ok=True)
            account.add(file.size)
            return
        digest = hashlib.sha256()
        with part.open("rb") as had:
            while piece := had.read(_READ_BYTES):
                digest.update(piece)
        account.add(stream.tell())
        _append(client, url, file, stream, digest, account)
        if stream.tell() != file.size or digest.hexdigest() != file.sha256:
            part.unlink(missing_ok=True)
            raise _damaged(file, digest.hexdigest())
        stream.flush()
        os.fsync(stream.fileno())
        os.replace(part, whole)


def _append(
    client: httpx.Client, url: str, file: HubFile, stream: _Appendable, digest: _Digest, account: _Account
) -> None:
    """Downloads the rest of the file, over several connections if they break."""
    import httpx

    failures = 0
    while stream.tell() < file.size:
        at = stream.tell()
        try:
            with client.stream("GET", url, headers={"range": f"bytes={at}-"}) as response:
                response.raise_for_status()
                if at and response.status_code != httpx.codes.PARTIAL_CONTENT:
                    raise ConfigError(
                        what=f"{file.name} can't be continued",
                        why="the hub does not know ranges",
                        fix="remove its cache",
                    )
                for piece in response.iter_bytes():
                    account.check()
                    stream.write(piece)
                    digest.update(piece)
                    account.add(len(piece))
        except httpx.TransportError:
            failures = 0 if stream.tell() > at else failures + 1
            if failures >= _TRIES:
                stream.flush()
                raise
            account.wait(_WAIT_S * 2**failures)


class _Appendable(Protocol):
    def tell(self) -> int: ...
    def write(self, data: bytes, /) -> int: ...
    def flush(self) -> None: ...


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


class _Stopped(Exception):
    """The download of another file has failed, or the user interrupted it."""


class _Account:
    """Counts the bytes downloaded of all files together. Shared by threads."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._there = 0
        self._progress = progress
        self._reported_s = 0.0
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def add(self, count: int) -> None:
        with self._lock:
            self._there += count
            now = time.monotonic()
            if self._progress is None or now - self._reported_s < _REPORT_EVERY_S:
                return
            self._reported_s = now
            self._progress(self._there, self._total)

    def done(self) -> None:
        """Reports the end."""
        if self._progress is not None:
            self._progress(self._total, self._total)

    def stop(self) -> None:
        """Ends the other threads at their next piece."""
        self._stopped.set()

    def check(self) -> None:
        if self._stopped.is_set():
            raise _Stopped

    def wait(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise _Stopped


# -- checksums ------------------------------------------------------------------------------------


def _check(folder: Path, files: Sequence[HubFile], progress: Progress | None) -> None:
    """Compares files with the hub's checksums. A damaged file is removed, so that it is downloaded again."""
    account = _Account(sum(file.size for file in files), progress)
    for file in files:
        path = folder / file.name
        found = checksum(path, git=not file.sha256, report=account.add)
        if file.blob and found != file.blob:
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise _damaged(file, found)


def _damaged(file: HubFile, found: str) -> ConfigError:
    return ConfigError(
        what=f"{file.name} is damaged",
        why=f"its checksum is {found[:16]}..., the hub's is {file.blob[:16]}...; the file was removed",
        fix="download it again; if that fails too, a proxy or the disk is at fault",
    )


def checksum(path: Path, *, git: bool = False, report: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file; `git`: the id that git gives its content. `report` is called with the number of bytes read
    since the last call."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False) if git else hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(_READ_BYTES):
            digest.update(piece)
            if report is not None:
                report(len(piece))
    return digest.hexdigest()


def _is_whole(blobs: Path, file: HubFile) -> bool:
    with contextlib.suppress(OSError):
        return bool(file.blob) and (blobs / file.blob).stat().st_size == file.size
    return False


def _cache(into: str) -> Path:
    """The cache at `into`; empty: the hub's own."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(into or HF_HUB_CACHE).expanduser()


def _blobs(repo: str, into: str) -> Path:
    """Where the cache keeps the contents of a repository's files."""
    from huggingface_hub.file_download import repo_folder_name

    return _cache(into) / repo_folder_name(repo_id=repo, repo_type="model") / "blobs"
