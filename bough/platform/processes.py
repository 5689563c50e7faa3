"""What the system says of other processes."""

from __future__ import annotations

from pathlib import Path


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal (SIGSTOP, SIGTSTP). False where the system can't say."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return line.rpartition(")")[2].split()[0] == "T"
