"""Logit processors by name: those that installed packages bring, and those that the server is started with.

No code comes from requests: they name a processor and bring plain values for it (`custom_params`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib.metadata import entry_points

from bough.core.errors import ConfigError
from bough.sampler.shaping import LogitProcessor

GROUP = "bough.logit_processors"
"""Entry points of this group are processors."""


def load_processors(specs: Iterable[str]) -> dict[str, LogitProcessor]:
    """Processors by name: of installed packages, then `name=module:attribute` of each spec, which may replace them.

    Raises `ConfigError` for a spec that can't be read or loaded.
    """
    found: dict[str, LogitProcessor] = {}
    for point in entry_points(group=GROUP):
        found[point.name] = _checked(point.name, point.value, point.load)
    for spec in specs:
        name, _, place = spec.partition("=")
        module, _, attribute = place.partition(":")
        if not name or not module or not attribute:
            raise ConfigError(
                what=f"the logit processor {spec!r} can't be read",
                why="it must be name=module:attribute",
                fix="for example --logit-processors shout=my_package.processors:shout",
                param="logit_processors",
            )
        found[name] = _checked(name, place, lambda module=module, path=attribute: _attribute(module, path))
    return found


def _attribute(module: str, path: str) -> object:
    value: object = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _checked(name: str, place: str, load: object) -> LogitProcessor:
    try:
        processor = load()  # type: ignore[operator]
    except Exception as error:
        raise ConfigError(
            what=f"the logit processor {name!r} can't be loaded from {place}",
            why=f"{type(error).__name__}: {error}",
            fix="check the name, and that the server can import it",
            param="logit_processors",
        ) from error
    if not callable(processor):
        raise ConfigError(
            what=f"the logit processor {name!r} at {place} is no function",
            why="it is called with logits [rows, vocabulary] and each row's custom_params, and returns logits",
            fix="name a function",
            param="logit_processors",
        )
    return processor  # type: ignore[no-any-return]
