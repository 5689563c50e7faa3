"""Offline batches: files of requests on disk, processed beside other requests, and files of answers.

in: JSON lines. out: JSON lines. never: HTTP, or anything that a restart would lose.
"""

from bough.entrypoints.batches.files import FileStore, StoredFile
from bough.entrypoints.batches.records import BatchRecord, BatchStore
from bough.entrypoints.batches.runner import BatchRunner, Call

__all__ = ["BatchRecord", "BatchRunner", "BatchStore", "Call", "FileStore", "StoredFile"]
