"""The data of one program state: its transcript, its variables, and the length of its cached prefix."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from bough.lang.speculation import Speculation
from bough.lang.transcript import Transcript


class StateView(NamedTuple):
    """A snapshot for a reader that follows a state or a variable."""

    text: str
    complete: bool
    meta_info: Any


@dataclass(slots=True)
class Memory:
    transcript: Transcript = field(default_factory=Transcript)
    variables: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
    shown: dict[str, str] = field(default_factory=dict)
    """Text so far of each generated variable, for streams."""
    scopes: dict[str, int] = field(default_factory=dict)
    speculation: Speculation = field(default_factory=Speculation)
    cached_chars: int = 0
    """Number of first characters of the text that the server has cached."""
    fork_position: int = 0
    fork_messages: int = 0

    def branch(self) -> Memory:
        """A copy for a branch that begins here."""
        return Memory(
            transcript=self.transcript.copy(),
            variables=dict(self.variables),
            meta_info=dict(self.meta_info),
            shown=dict(self.shown),
            scopes=dict(self.scopes),
            speculation=replace(self.speculation),
            cached_chars=self.cached_chars,
            fork_position=len(self.transcript.text),
            fork_messages=len(self.transcript.messages),
        )

    def set_variable(self, name: str | None, value: Any, meta: Any) -> None:
        if name is None:
            return
        self.variables[name] = value
        self.meta_info[name] = meta
        if isinstance(value, str):
            self.shown[name] = value
