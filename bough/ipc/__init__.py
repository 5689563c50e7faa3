"""Typed channels between processes, and the files with which a process starts and reports: sockets, config, status,
errors.

in: msgspec structs. out: the same structs in another process. never: pickle, or the meaning of a message.
"""

from bough.ipc.child import run_child
from bough.ipc.codec import Codec
from bough.ipc.endpoints import Endpoints
from bough.ipc.handoff import (
    EngineStatus,
    Launch,
    load_launch,
    read_checkpoint,
    read_error,
    read_quarantine,
    read_status,
    save_launch,
    write_checkpoint,
    write_error,
    write_quarantine,
    write_status,
)
from bough.ipc.inbox import AsyncInbox, Inbox
from bough.ipc.outbox import AsyncOutbox, MessageTooLarge, Outbox

__all__ = [
    "AsyncInbox",
    "AsyncOutbox",
    "Codec",
    "Endpoints",
    "EngineStatus",
    "Inbox",
    "Launch",
    "MessageTooLarge",
    "Outbox",
    "load_launch",
    "read_checkpoint",
    "read_error",
    "read_quarantine",
    "read_status",
    "run_child",
    "save_launch",
    "write_checkpoint",
    "write_error",
    "write_quarantine",
    "write_status",
]
