"""Process-wide settings of the language."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class GlobalConfig:
    """Settings a program's author may change at run time through `global_config`."""

    verbosity: int = 0
    """0 is silent; 2 writes the final text of every run to standard output."""
    default_backend: Any = None
    """What `run` uses when it is given no `backend`; `set_default_backend` sets it."""
    enable_precache_with_tracing: bool = True
    """Trace a batch's programs first and put their common prefix into the server's cache once."""
    precache_min_chars: int = 64
    """Minimum length of a shared prefix, in characters, for which a separate request is sent to cache it."""
    enable_parallel_encoding: bool = True
    """Let `join("concate_and_append")` join KV on the server where the server can."""
    skip_special_tokens_in_output: bool = True
    """Leave special tokens out of generated text."""
    spaces_between_special_tokens_in_out: bool = True
    """Put spaces between special tokens when they are not left out."""


global_config = GlobalConfig()
