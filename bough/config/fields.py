"""A model's config by key, each value checked when it is read: every error names the key that is wrong."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from bough.core.errors import ConfigError, UnsupportedModel

T = TypeVar("T")

_MOST: Final = 1e15
"""Upper limit of numbers in a config."""
_FIX: Final = "check config.json, or set it with --json-model-override-args"


class _Found(NamedTuple):
    key: str
    """Its name in the config."""
    value: Any


class Fields:
    """If several keys are given, the first one that the config has is used (families and versions use different names
    for the same thing). A value of null counts as missing."""

    def __init__(self, raw: Mapping[str, Any], called: Mapping[str, str] | None = None, path: str = "") -> None:
        """`called`: the config's own names of keys, where they differ. `path`: prefix of keys in errors."""
        self.raw = raw
        self._called = called or {}
        self._path = path

    def has(self, *keys: str) -> bool:
        return self._find(keys) is not None

    def any(self, *keys: str) -> Any:
        """The value, or None if the config has none of the keys."""
        found = self._find(keys)
        return None if found is None else found.value

    def count(self, *keys: str, default: int | None = None) -> int:
        """A positive integer. Raises `ConfigError` if it is not, or if it is missing and there is no default."""
        found = self._find(keys)
        if found is None:
            return self._default(keys, default)
        if not _is_whole(found.value, 1):
            raise _senseless(found, "a positive whole number")
        return int(found.value)

    def whole(self, *keys: str, default: int | None = None) -> int:
        """Like `count`, but also accepts a float with an integral value (8192.0)."""
        found = self._find(keys)
        if (
            found is not None
            and isinstance(found.value, float)
            and found.value.is_integer()
            and 0 < found.value < _MOST
        ):
            return int(found.value)
        return self.count(*keys, default=default)

    def size(self, *keys: str, default: int | None = None) -> int:
        """A non-negative integer. Raises `ConfigError`; without a default also if it is missing."""
        found = self._find(keys)
        if found is None:
            return self._default(keys, default)
        if not _is_whole(found.value, 0):
            raise _senseless(found, "a whole number from 0 on")
        return int(found.value)

    def number(self, *keys: str, default: float | None = None) -> float:
        """A number. Raises `ConfigError` if it is not, or if it is missing and there is no default."""
        found = self._find(keys)
        if found is None:
            return self._default(keys, default)
        if not _is_number(found.value):
            raise _senseless(found, "a number")
        return float(found.value)

    def positive(self, *keys: str, default: float | None = None) -> float:
        """A positive number; 0 counts as missing. Raises `ConfigError`; without a default also if it is missing."""
        found = self._find(keys)
        if found is not None and _is_number(found.value) and found.value == 0:
            found = None
        if found is None:
            return self._default(keys, default)
        if not _is_number(found.value) or found.value < 0:
            raise _senseless(found, "a number above 0")
        return float(found.value)

    def flag(self, *keys: str, default: bool = False) -> bool:
        """A boolean, also accepted as 1 or 0. Raises `ConfigError`."""
        found = self._find(keys)
        if found is None:
            return default
        if not isinstance(found.value, bool | int) or found.value not in (0, 1):
            raise _senseless(found, "true or false")
        return bool(found.value)

    def choice(self, known: Mapping[str, T], *keys: str, default: str) -> T:
        """The entry of `known` for the value. Raises `UnsupportedModel` for any other value."""
        found = self._find(keys)
        name = default if found is None else found.value
        if isinstance(name, str) and name in known:
            return known[name]
        raise UnsupportedModel(
            what=f"the model's {self._name(keys[0]) if found is None else found.key} {name!r} is not known",
            why=f"known: {', '.join(sorted(known))}",
        )

    def word(self, key: str, *known: str) -> str:
        """One of the `known` words, by default the first. Raises `UnsupportedModel` for any other value."""
        return self.choice({each: each for each in known}, key, default=known[0])

    def numbers(self, key: str, length: int | None = None) -> tuple[float, ...] | None:
        """A list of at least `length` numbers, or None if it is missing. Raises `ConfigError`."""
        found = self._list(key, length, _is_number, "a list of numbers")
        return None if found is None else tuple(found)

    def counts(self, key: str, length: int) -> list[int] | None:
        """The first `length` of a list of positive integers, one per layer; None if it is missing. Raises
        `ConfigError`."""
        found = self._list(key, length, lambda each: _is_whole(each, 1), "a list of positive whole numbers")
        return None if found is None else found[:length]

    def sizes(self, key: str) -> list[int] | None:
        """A list of non-negative integers; None if it is missing. Raises `ConfigError`."""
        return self._list(key, None, lambda each: _is_whole(each, 0), "a list of whole numbers from 0 on")

    def flags(self, key: str, length: int) -> list[bool] | None:
        """The first `length` of a list of booleans (also accepted as 1 and 0), one per layer; None if it is missing.
        Raises `ConfigError`."""
        found = self._list(key, length, lambda each: isinstance(each, bool | int), "a list of flags")
        return [bool(each) for each in found[:length]] if found else None

    def words(self, key: str, known: Collection[str], length: int) -> list[str] | None:
        """The first `length` of a list of strings, one per layer; None if it is missing. Raises `ConfigError` for
        anything else, `UnsupportedModel` for strings that are not in `known`."""
        found = self._list(key, length, lambda each: isinstance(each, str), "a list of words")
        unknown = sorted(set(found or ()) - set(known))
        if unknown:
            raise UnsupportedModel(
                what=f"the model's {self._name(key)} can't be served",
                why=f"unknown: {', '.join(unknown)}; known: {', '.join(sorted(known))}",
            )
        return found[:length] if found else None

    def inner(self, key: str) -> Fields:
        """The object below `key`; an empty one if it is missing."""
        found = self._find((key,))
        if found is None:
            return Fields({}, path=f"{self._name(key)}.")
        if not isinstance(found.value, Mapping):
            raise _senseless(found, "an object")
        return Fields(found.value, path=f"{found.key}.")

    def also(self, **names: str) -> Fields:
        """A copy with alternative keys: `also(hidden_size="n_embd")` reads `n_embd` if there is no `hidden_size`."""
        missing = {new: old for new, old in names.items() if self.raw.get(new) is None}
        found = {new: self.raw[old] for new, old in missing.items() if old in self.raw}
        return Fields({**self.raw, **found}, {**self._called, **missing}, self._path)

    def put(self, **values: Any) -> Fields:
        """A copy with other values."""
        return Fields({**self.raw, **values}, self._called, self._path)

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

    def _name(self, key: str) -> str:
        return self._path + self._called.get(key, key)

    def _default(self, keys: tuple[str, ...], default: T | None) -> T:
        if default is None:
            names = dict.fromkeys(name for key in keys for name in (self._path + key, self._name(key)))
            raise ConfigError(what=f"the model's config has no {' or '.join(names)}", fix=_FIX)
        return default

    def _find(self, keys: tuple[str, ...]) -> _Found | None:
        for key in keys:
            value = self.raw.get(key)
            if value is not None:
                return _Found(self._name(key), value)
        return None

    def _list(self, key: str, length: int | None, fits: Any, wanted: str) -> list[Any] | None:
        found = self._find((key,))
        if found is None:
            return None
        if not isinstance(found.value, list | tuple) or not all(fits(each) for each in found.value):
            raise _senseless(found, wanted)
        if length is not None and 0 < len(found.value) < length:
            raise ConfigError(
                what=f"the model's config has {len(found.value)} {found.key} for {length} layers", fix=_FIX
            )
        return list(found.value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < _MOST


def _senseless(found: _Found, wanted: str) -> ConfigError:
    value = repr(found.value)
    return ConfigError(
        what=f"the model's config has a senseless {found.key}",
        why=f"it is {value if len(value) < 200 else value[:200] + ' ...'} and must be {wanted}",
        fix=_FIX,
    )
