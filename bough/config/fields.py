"""A model's config by key, each value checked when it is read: every error names the key that is wrong."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar

from bough.core.errors import ConfigError, UnsupportedModel

T = TypeVar("T")

_FIX: Final = "check config.json, or set it with --json-model-override-args"


class Fields:
    """Several keys mean: the first one that the config has (families and their ages name the same thing differently).
    A value of null counts as missing."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def has(self, *keys: str) -> bool:
        return self._find(keys) is not None

    def any(self, *keys: str) -> Any:
        """The value, or None if the config has none of the keys."""
        found = self._find(keys)
        return None if found is None else found[1]

    def count(self, *keys: str, default: int | None = None) -> int:
        """A positive integer. Raises `ConfigError` if it is not, or if it is missing and there is no default."""
        found = self._find(keys)
        if found is None:
            if default is None:
                raise ConfigError(what=f"the model's config has no {keys[0]}", fix=_FIX)
            return default
        key, value = found
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        raise _senseless(key, value, "a positive whole number")

    def size(self, *keys: str, default: int | None = None) -> int:
        """A whole number from 0 on. Raises `ConfigError`; without a default also where it is missing."""
        found = self._find(keys)
        if found is not None and found[1] == 0 and not isinstance(found[1], bool | float):
            return 0
        return self.count(*keys, default=default)

    def number(self, *keys: str, default: float | None = None) -> float:
        """A number. Raises `ConfigError` if it is not, or if it is missing and there is no default."""
        found = self._find(keys)
        if found is None:
            if default is None:
                raise ConfigError(what=f"the model's config has no {keys[0]}", fix=_FIX)
            return default
        key, value = found
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise _senseless(key, value, "a number")

    def flag(self, *keys: str, default: bool = False) -> bool:
        found = self._find(keys)
        return default if found is None else bool(found[1])

    def choice(self, known: Mapping[str, T], *keys: str, default: str) -> T:
        """What the value stands for in `known`. Raises `UnsupportedModel` for any other value."""
        found = self._find(keys)
        name = default if found is None else found[1]
        if isinstance(name, str) and name in known:
            return known[name]
        raise UnsupportedModel(
            what=f"the model's {keys[0]} {name!r} is not known", why=f"known: {', '.join(sorted(known))}"
        )

    def numbers(self, key: str, length: int | None = None) -> tuple[float, ...] | None:
        """A list of at least `length` numbers, or None if it is missing. Raises `ConfigError`."""
        value = self.any(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(each, int | float) for each in value):
            raise _senseless(key, value, "a list of numbers")
        if length is not None and len(value) < length:
            raise ConfigError(what=f"the model's config has {len(value)} {key} for {length} layers", fix=_FIX)
        return tuple(value)

    def counts(self, key: str, length: int) -> list[int] | None:
        """The first `length` of a list of positive whole numbers, one a layer; None: there is none. Raises `ConfigError`."""
        value = self.numbers(key, length)
        if value is None:
            return None
        if not all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in value):
            raise _senseless(key, self.any(key), "a list of positive whole numbers")
        return [int(each) for each in value[:length]]

    def words(self, key: str, known: Collection[str], length: int) -> list[str] | None:
        """The first `length` of a list of words, one a layer; None: there is none. Raises `ConfigError` for anything else,
        `UnsupportedModel` for words that are not `known`."""
        value = self.any(key)
        if not value:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise _senseless(key, value, "a list of words")
        if len(value) < length:
            raise ConfigError(what=f"the model's config has {len(value)} {key} for {length} layers", fix=_FIX)
        unknown = sorted(set(value) - set(known))
        if unknown:
            raise UnsupportedModel(
                what=f"the model's {key} can't be served",
                why=f"unknown: {', '.join(unknown)}; known: {', '.join(sorted(known))}",
            )
        return list(value[:length])

    def inner(self, key: str) -> Fields:
        """The object below `key`; an empty one if it is missing."""
        value = self.any(key)
        if value is None:
            return Fields({})
        if not isinstance(value, Mapping):
            raise _senseless(key, value, "an object")
        return Fields(value)

    def also(self, **names: str) -> Fields:
        """A copy with alternative keys: `also(hidden_size="n_embd")` reads `n_embd` if there is no `hidden_size`."""
        found = {new: self.raw[old] for new, old in names.items() if self.raw.get(new) is None and old in self.raw}
        return Fields({**self.raw, **found})

    def architecture(self) -> str:
        """The first of `architectures`. Raises `UnsupportedModel` if it is missing."""
        names = self.raw.get("architectures")
        if isinstance(names, list) and names and isinstance(names[0], str):
            return names[0]
        raise UnsupportedModel(
            what="the model's config names no architecture",
            why='config.json has no "architectures" list',
            fix="""add it, for example with --json-model-override-args '{"architectures": ["LlamaForCausalLM"]}'""",
        )

    def _find(self, keys: tuple[str, ...]) -> tuple[str, Any] | None:
        for key in keys:
            value = self.raw.get(key)
            if value is not None:
                return key, value
        return None


def _senseless(key: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(
        what=f"the model's config has a senseless {key}", why=f"it is {value!r} and must be {wanted}", fix=_FIX
    )
