"""Names of models on the hub: `org/repo`, `hf.co/org/repo:Q4_K_M`, or the address that a browser shows."""

from __future__ import annotations

import re
from dataclasses import dataclass

_HOSTS = r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/|hf://"
_NAME = re.compile(rf"(?:{_HOSTS})?(?P<repo>[\w.-]+/[\w.-]+|[\w.-]+)/?(?::(?P<tag>[\w.-]+))?")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository on the hub, and which of its GGUF files is meant."""

    repo: str
    """`org/repo`, or a single word for the hub's oldest models."""
    tag: str = ""
    """A part of the file's name, usually the quantization: `Q4_K_M`. Empty: not given."""

    def __str__(self) -> str:
        return f"{self.repo}:{self.tag}" if self.tag else self.repo


def parse_hub_name(text: str) -> HubName | None:
    """The name in `text`, or None if it can't be one."""
    match = _NAME.fullmatch(text.strip())
    if match is None or set(match["repo"]) <= {".", "/"}:
        return None
    return HubName(match["repo"], match["tag"] or "")
