"""What a rank does while its imports run: looks at the machine, wakes the GPU, which needs no interpreter, and starts
compilers where kernels may be missing."""

from __future__ import annotations

import threading

from bough.config.concerns import Config
from bough.engine.first_start import start_compilers
from bough.platform.cuda_driver import open_context
from bough.platform.facts import DeviceFacts, detect


class Early:
    """Begins at once, in a thread of its own."""

    def __init__(self, config: Config, rank: int, engines: int = 0) -> None:
        """`rank`: among those of this machine, which is the number of its GPU. `engines`: of one rank each, that start on
        this machine together; 0: an engine has several, and steps of one alone can't be rehearsed."""
        self._config = config
        self._rank = rank
        self._engines = engines
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
            self._facts = detect(self._config.device.device)
            if self._engines:
                start_compilers(self._config, self._facts, self._engines)
            if self._facts.kind == "cuda":
                open_context(self._rank)
        except Exception as error:
            self._error = error
