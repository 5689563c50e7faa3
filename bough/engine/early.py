"""What a rank does while its imports run: looks at the machine and wakes the GPU, which needs no interpreter."""

from __future__ import annotations

import threading

from bough.config.concerns import Config
from bough.platform.cuda_driver import open_context
from bough.platform.facts import DeviceFacts, detect


class Early:
    """Begins at once, in a thread of its own."""

    def __init__(self, config: Config, rank: int) -> None:
        """`rank`: among those of this machine, which is the number of its GPU."""
        self._device = config.device.device
        self._rank = rank
        self._facts: DeviceFacts | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._look, name="early", daemon=True)
        self._thread.start()

    def facts(self) -> DeviceFacts:
        """The machine as it was before anything of ours was on the GPU. Raises `ConfigError` if there is no such device."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._facts is not None, "a look ends in facts or an error"
        return self._facts

    def _look(self) -> None:
        try:
            self._facts = detect(self._device)
            if self._facts.kind == "cuda":
                open_context(self._rank)
        except Exception as error:
            self._error = error
