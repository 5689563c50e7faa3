"""Batches on disk: one JSON file each, written by the runner alone once it exists; a cancellation is a file beside it."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from bough.core.errors import InvalidRequest, NotFound
from bough.engine_client.names import random_name
from bough.entrypoints.batches.files import StoredFile
from bough.platform.whole_file import write_whole

_log = logging.getLogger(__name__)

MAX_OPEN: Final = 1000
"""Batches that have not ended."""
WINDOW_S: Final = 24 * 3600

_ID: Final = re.compile(r"batch_[0-9a-f]{32}")
_encode = msgspec.json.Encoder().encode

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OPEN: Final = frozenset({"validating", "in_progress", "finalizing"})


class BatchRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One batch."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    created_ns: int = 0
    """The same in nanoseconds: orders batches of one second. 0 in records of earlier versions."""
    expires_at: int
    metadata: dict[str, str] = {}
    tenant: str = ""
    status: Status = "validating"
    errors: list[dict[str, Any]] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    times: dict[str, int] = {}
    """When each status began: `in_progress_at`, ..."""
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: dict[str, int] = {}
    """Tokens of the answered lines so far: `input`, `cached`, `output`, `reasoning`."""

    def shown(self, *, cancelling: bool) -> dict[str, Any]:
        """OpenAI's batch object."""
        stages = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": "cancelling" if cancelling and self.status in OPEN else self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{stage}_at": self.times.get(f"{stage}_at") for stage in stages},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata or None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        spent = {name: self.usage.get(name, 0) for name in ("input", "cached", "output", "reasoning")}
        return {
            "input_tokens": spent["input"],
            "input_tokens_details": {"cached_tokens": spent["cached"]},
            "output_tokens": spent["output"],
            "output_tokens_details": {"reasoning_tokens": spent["reasoning"]},
            "total_tokens": spent["input"] + spent["output"],
        }


def _age(batch: BatchRecord) -> tuple[int, int, str]:
    return batch.created_at, batch.created_ns, batch.id


class BatchStore:
    """Batches by id, in one directory that several processes may use."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "batches"
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._ended: set[str] = set()

    def create(self, source: StoredFile, endpoint: str, metadata: dict[str, str]) -> BatchRecord:
        """Raises `InvalidRequest` if too many batches are open."""
        if len(self.unfinished()) >= MAX_OPEN:
            raise InvalidRequest(
                what="too many batches are open",
                why=f"at most {MAX_OPEN} may wait or run",
                fix="wait until some have ended, or cancel some",
            )
        now_ns = time.time_ns()
        now = now_ns // 10**9
        batch = BatchRecord(
            id=f"batch_{random_name()}",
            endpoint=endpoint,
            input_file_id=source.id,
            created_at=now,
            created_ns=now_ns,
            expires_at=now + WINDOW_S,
            metadata=metadata,
            tenant=source.tenant,
        )
        self.save(batch)
        return batch

    def save(self, batch: BatchRecord) -> None:
        write_whole(self._directory / f"{batch.id}.json", _encode(batch), durable=True)

    def get(self, batch_id: str, tenant: str = "") -> BatchRecord:
        """Raises `NotFound`: it never existed, or belongs to another tenant."""
        found = self._read(batch_id) if _ID.fullmatch(batch_id) else None
        if found is None or found.tenant != tenant:
            raise NotFound(
                what=f"there is no batch {batch_id[:80]!r}",
                why="it was never made here",
                fix="see GET /v1/batches",
                param="batch_id",
            )
        return found

    def all(self) -> list[BatchRecord]:
        """Every batch, the oldest first."""
        found = [self._read(path.stem) for path in self._directory.glob("batch_*.json")]
        return sorted((each for each in found if each is not None), key=_age)

    def unfinished(self) -> list[BatchRecord]:
        """Batches that wait or run, the oldest first. Batches known to have ended are not read again."""
        names = [path.stem for path in self._directory.glob("batch_*.json") if path.stem not in self._ended]
        found = [batch for batch in map(self._read, names) if batch is not None]
        self._ended.update(batch.id for batch in found if batch.status not in OPEN)
        return sorted((each for each in found if each.status in OPEN), key=_age)

    def own(self) -> int | None:
        """The lock for processing batches: a file descriptor, held until it is closed. None: another process has it."""
        right = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(right, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(right)
            return None
        except OSError as error:
            _log.warning("batches can't be locked, so no other server may work on them: %s", error)
        return right

    def ask_to_cancel(self, batch: BatchRecord) -> None:
        write_whole(self._marker(batch), b"", durable=True)

    def is_cancelling(self, batch: BatchRecord) -> bool:
        return self._marker(batch).exists()

    def part(self, batch: BatchRecord, kind: Literal["out", "err"]) -> Path:
        """Where answers are gathered while it runs."""
        return self._directory / f"{batch.id}.{kind}.jsonl"

    def tidy(self, batch: BatchRecord) -> None:
        """Removes files that only a running batch needs."""
        for path in (self.part(batch, "out"), self.part(batch, "err"), self._marker(batch)):
            path.unlink(missing_ok=True)

    def delete(self, batch: BatchRecord) -> None:
        """Deletes the record of an ended batch; the caller deletes its files."""
        self.tidy(batch)
        (self._directory / f"{batch.id}.json").unlink(missing_ok=True)

    def _marker(self, batch: BatchRecord) -> Path:
        return self._directory / f"{batch.id}.cancel"

    def _read(self, batch_id: str) -> BatchRecord | None:
        try:
            return msgspec.json.decode((self._directory / f"{batch_id}.json").read_bytes(), type=BatchRecord)
        except (OSError, msgspec.MsgspecError):
            return None
