"""Turns the `backend` argument of a caller into a `Backend`."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakValueDictionary

from bough.lang.backends.base import Backend
from bough.lang.backends.engine import EngineBackend, EngineLike
from bough.lang.backends.runtime import Runtime
from bough.lang.config import global_config
from bough.lang.errors import LangError


class _Wrapped:
    """Backends of engines, one per engine, as long as it is referenced. Only the last one is kept alive from here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: WeakValueDictionary[int, EngineBackend] = WeakValueDictionary()
        self._last: EngineBackend | None = None

    def get(self, engine: EngineLike) -> EngineBackend:
        with self._lock:
            self._last = self._by_id.get(id(engine)) or EngineBackend(engine)
            self._by_id[id(engine)] = self._last
            return self._last


_wrapped = _Wrapped()


def as_backend(handed: Any) -> Backend:
    """A backend as it is, a `Runtime`'s endpoint, or an engine wrapped (once) into a backend."""
    if isinstance(handed, Backend):
        return handed
    if isinstance(handed, Runtime):
        return handed.endpoint
    if isinstance(handed, EngineLike):
        return _wrapped.get(handed)
    raise LangError(
        what=f"a {type(handed).__name__} is not a backend",
        why="programs run on a server, an engine or an API",
        fix="pass RuntimeEndpoint(url), Runtime(...), Engine(...), OpenAI(...), Anthropic(...) or LiteLLM(...)",
    )


def default_backend() -> Any:
    if global_config.default_backend is None:
        raise LangError(
            what="no backend to run on",
            why="neither backend= was passed nor a default set",
            fix='call set_default_backend(RuntimeEndpoint("http://127.0.0.1:30000")) first',
        )
    return global_config.default_backend
