"""`--supervise`: when the engine dies or hangs, another server is started on the same sockets.

Waiting clients get 503, and so do new ones until the new engine is ready; connections are never refused. A request that
was running in two crashes is refused from then on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bough.cli.serving import LocalServer
from bough.config.check import check_exposure
from bough.config.concerns import Config
from bough.core.errors import BoughError
from bough.entrypoints.http.sockets import bind_server
from bough.observability.log import log_level

if TYPE_CHECKING:
    from bough.entrypoints.service import Service

_log = logging.getLogger(__name__)

CRASHES_TO_QUARANTINE = 2
_MOST_SUSPECTS = 10_000
_GIVE_UP_AFTER = 5
_GIVE_UP_WITHIN_S = 300.0
"""Seconds: if there are too many crashes within this time, the supervisor gives up."""


class Supervisor:
    """Runs servers one after the other. `stop` ends the last of them."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` before any process is started if the address cannot be bound, or must not be used
        without a key."""
        check_exposure(config)
        self.config = config
        self._sockets = bind_server(config.server)
        self._seen: Counter[int] = Counter()
        self._crashes: list[float] = []
        self._stopping = False
        self._service: Service | None = None
        """The service of the last server that accepted requests."""
        self.server = self._start()

    async def run(self, opened: Callable[[Service | None], None]) -> None:
        """Serves until `stop`. Raises the error of a server that never became ready, or of the last of many crashes."""
        was_open = False

        def on_open(service: Service | None) -> None:
            nonlocal was_open
            self._service = service
            if not self._crashes:
                opened(service)
            else:
                _log.info("ready again, after %d crashes so far", len(self._crashes))
            was_open = True

        try:
            while True:
                was_open = False
                try:
                    await self.server.run(on_open)
                    return
                except BoughError as error:
                    if self._stopping or not was_open or self._hopeless():
                        raise
                    self._learn(error)
                self.server = self._start()
        finally:
            for sock in self._sockets:
                sock.close()
            if self.config.server.uds:
                Path(self.config.server.uds).expanduser().unlink(missing_ok=True)

    def stop(self) -> None:
        """Drains; a second call ends at once."""
        self._stopping = True
        self.server.stop()

    def reload(self) -> None:
        """Makes every process reload its files."""
        self.server.reload()

    def _start(self) -> LocalServer:
        quarantine = frozenset(each for each, times in self._seen.items() if times >= CRASHES_TO_QUARANTINE)
        if quarantine:
            _log.warning("%d requests are quarantined: the engine died twice while it computed them", len(quarantine))
        return LocalServer(self.config, sockets=[sock.dup() for sock in self._sockets], quarantine=quarantine)

    def _learn(self, error: BoughError) -> None:
        self._crashes.append(time.monotonic())
        self._seen.update(self.server.suspects)
        self._seen = Counter(dict(self._seen.most_common(_MOST_SUSPECTS)))
        if self._service is not None:  # what /configure_logging changed stays
            log = replace(self.config.log, log_level=log_level(), log_requests=self._service.log_requests)
            self.config = replace(self.config, log=log)
        _log.error("%s; starting again", error.sentence())

    def _hopeless(self) -> bool:
        recent = [at for at in self._crashes if time.monotonic() - at < _GIVE_UP_WITHIN_S]
        return len(recent) + 1 >= _GIVE_UP_AFTER
