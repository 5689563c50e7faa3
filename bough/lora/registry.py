"""Names of adapters that requests may have, and their numbers."""

from __future__ import annotations

from collections.abc import Sequence

from bough.core.errors import InvalidRequest


class AdapterRegistry:
    """The adapters of a server, in the order of their numbers."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._numbers = {name: number for number, name in enumerate(names, 1)}

    def number(self, name: str) -> int:
        """As `Generate.adapter`; 0 for an empty name. Raises `InvalidRequest` for an adapter that is not there."""
        if not name:
            return 0
        found = self._numbers.get(name)
        if found is None:
            raise InvalidRequest(
                what=f"there is no adapter {name[:60]!r}",
                why=f"this server has: {', '.join(self.names)}" if self.names else "this server has no adapters loaded",
                fix="leave it out, or start the server with --lora-paths NAME=DIRECTORY",
                param="lora_path",
            )
        return found
