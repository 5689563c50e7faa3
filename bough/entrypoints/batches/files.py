"""Files that clients upload and batches write, in one directory, under names chosen by the server."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from bough.core.errors import InvalidRequest, NotFound
from bough.engine_client.names import random_name
from bough.platform.whole_file import write_whole

MAX_FILE_BYTES: Final = 200 * 1024 * 1024
MAX_FILES: Final = 10_000
MAX_ALL_BYTES: Final = 10 * 1024**3

_ABANDONED_S: Final = 24 * 3600.0
_ID: Final = re.compile(r"file-[0-9a-f]{32}")
_encode = msgspec.json.Encoder().encode


def new_file_id() -> str:
    return f"file-{random_name()}"


class StoredFile(msgspec.Struct, kw_only=True):
    """Metadata of a file. Its owner is the tenant under --isolate-cache."""

    id: str
    bytes: int
    created_at: int
    created_ns: int = 0
    """The same in nanoseconds: orders files of one second. 0 in records of earlier versions."""
    filename: str
    purpose: str
    tenant: str = ""

    def shown(self) -> dict[str, object]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """Files by id. Several processes may use one directory: everything is on disk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "files"
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def add(self, chunks: Iterable[bytes], *, filename: str, purpose: str, tenant: str = "") -> StoredFile:
        """Writes a file. Raises `InvalidRequest` if it, or all files together, would be too large."""
        self._check_room()
        file_id = new_file_id()
        part = self._directory / f"{file_id}.part"
        size = 0
        try:
            with open_private(part) as out:
                for chunk in chunks:
                    size += len(chunk)
                    if size > MAX_FILE_BYTES:
                        raise _too_large("the file", MAX_FILE_BYTES)
                    out.write(chunk)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return self._adopt(part, file_id, filename, purpose, tenant)

    def adopt(self, path: Path, file_id: str, *, filename: str, purpose: str, tenant: str = "") -> None:
        """Moves a file into the store from elsewhere in the same file system; completes a move that a crash
        interrupted."""
        taken = self._directory / f"{file_id}.data"
        if path.exists():
            self._adopt(path, file_id, filename, purpose, tenant)
        elif taken.exists() and self._read(file_id) is None:
            self._adopt(taken, file_id, filename, purpose, tenant)

    def get(self, file_id: str, tenant: str = "", param: str = "file_id") -> StoredFile:
        """Raises `NotFound`: it never existed, was deleted, or belongs to another tenant."""
        found = self._read(file_id) if _ID.fullmatch(file_id) else None
        if found is None or found.tenant != tenant:
            raise NotFound(
                what=f"there is no file {file_id[:80]!r}",
                why="it was deleted, or never uploaded here",
                fix="upload it with POST /v1/files",
                param=param,
            )
        return found

    def path(self, stored: StoredFile) -> Path:
        """Path of its content."""
        return self._directory / f"{stored.id}.data"

    def delete(self, stored: StoredFile) -> None:
        for name in (f"{stored.id}.json", f"{stored.id}.data"):
            (self._directory / name).unlink(missing_ok=True)

    def tidy(self) -> None:
        """Removes remains of uploads that a crash interrupted."""
        for part in self._directory.glob("*.part"):
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > _ABANDONED_S:
                    part.unlink()

    def list(self, tenant: str = "", purpose: str = "") -> list[StoredFile]:
        """Files, the latest first."""
        found = [self._read(path.stem) for path in self._directory.glob("file-*.json")]
        mine = [each for each in found if each is not None and each.tenant == tenant]
        chosen = [each for each in mine if not purpose or each.purpose == purpose]
        return sorted(chosen, key=lambda each: (each.created_at, each.created_ns, each.id), reverse=True)

    def _adopt(self, path: Path, file_id: str, filename: str, purpose: str, tenant: str) -> StoredFile:
        now_ns = time.time_ns()
        stored = StoredFile(
            id=file_id,
            bytes=path.stat().st_size,
            created_at=now_ns // 10**9,
            created_ns=now_ns,
            filename=filename,
            purpose=purpose,
            tenant=tenant,
        )
        os.replace(path, self._directory / f"{file_id}.data")
        write_whole(self._directory / f"{file_id}.json", _encode(stored), durable=True)
        return stored

    def _read(self, file_id: str) -> StoredFile | None:
        try:
            return msgspec.json.decode((self._directory / f"{file_id}.json").read_bytes(), type=StoredFile)
        except (OSError, msgspec.MsgspecError):
            return None

    def _check_room(self) -> None:
        sizes = [entry.stat().st_size for entry in os.scandir(self._directory) if entry.name.endswith(".data")]
        if len(sizes) >= MAX_FILES:
            raise InvalidRequest(
                what=f"there are {len(sizes)} files already",
                why=f"at most {MAX_FILES} are kept",
                fix="delete some with DELETE /v1/files/{id}",
                param="file",
            )
        if sum(sizes) > MAX_ALL_BYTES:
            raise _too_large("all files together", MAX_ALL_BYTES)


def open_private(path: Path, *, append: bool = False) -> BinaryIO:
    """A file that only its owner can read, open for writing."""
    flags = os.O_CREAT | os.O_WRONLY | (os.O_APPEND if append else os.O_TRUNC)
    return os.fdopen(os.open(path, flags, 0o600), "ab" if append else "wb")


def _too_large(what: str, most: int) -> InvalidRequest:
    return InvalidRequest(
        what=f"{what} would be too large",
        why=f"at most {most // 1024**2} MiB are kept",
        fix="send less, or delete files with DELETE /v1/files/{id}",
        param="file",
    )
