"""What a process reloads on SIGHUP: keys, certificates, log files."""

from __future__ import annotations

import logging
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Reloads:
    """The reload actions of one process, by name."""

    def __init__(self) -> None:
        self._actions: dict[str, Callable[[], str]] = {}

    def add(self, name: str, action: Callable[[], str]) -> None:
        """Adds an action. It returns a sentence for the log; if it raises, it must not have changed anything. Actions
        run in the order in which they were added; adding a name again replaces its action."""
        self._actions[name] = action

    def run(self) -> list[str]:
        """Runs all actions, even if some of them fail, and logs each. Returns the names of those that succeeded."""
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
