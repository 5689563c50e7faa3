"""bough: serve language models, and program them.

The public names are resolved on first use, so that importing the package costs milliseconds and never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Engine": "bough.engine_api",
    "ServerArgs": "bough.config.server_args",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'bough' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


if TYPE_CHECKING:
    from bough.config.server_args import ServerArgs as ServerArgs
    from bough.engine_api import Engine as Engine
