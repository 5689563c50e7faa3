"""What a process reads again when its operator asks for it (SIGHUP): keys, certificates, log files."""

from __future__ import annotations

import logging
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Reloads:
    """The reload actions of one process, by name."""

    def __init__(self) -> None:
        self._actions: dict[str, Callable[[], str]] = {}

    def add(self, name: str, action: Callable[[], str]) -> None:
        """From now on `action` is part of a reload. It returns a sentence for the log; if it raises, it must have changed
        nothing. Actions run in the order in which they were added; a name that is added again takes the old one's place."""
        self._actions[name] = action

    def run(self) -> list[str]:
        """Runs every action, whatever becomes of the others, and logs each. Returns the names of those that succeeded."""
        done: list[str] = []
        for name, action in self._actions.items():
            try:
                said = action()
            except Exception as error:
                _log.error("%s could not be read again, and stay as they were: %s", name, error)
            else:
                _log.info("%s were read again: %s", name, said)
                done.append(name)
        return done
