"""API keys by name, from --api-key and the file of --api-keys-file. The name of a key is its tenant: tenants cannot
access each other's data.

Keys are kept as digests: the time of a lookup does not depend on how much of a key is right, and keys do not stay in
memory.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bough.config.concerns import ServerConfig
from bough.core.errors import ConfigError

DEFAULT_NAME: Final = "default"
"""The name of a key that was given without one."""
ADMIN_NAME: Final = "admin"
"""The name under which the admin key uses ordinary routes."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_LIMITS: Final = ("requests_per_minute", "tokens_per_minute")
_FIELDS: Final = frozenset({"key", "sha256", *_LIMITS})
_MOST: Final = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One client, or a group of clients that share a name."""

    name: str
    requests_per_minute: int = 0
    """HTTP requests (other than GET) and gRPC calls; 0: no limit."""
    tokens_per_minute: int = 0
    """Tokens of prompts and answers together; 0: no limit."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a server at one time."""

    by_digest: Mapping[bytes, Key] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.by_digest)

    def find(self, sent: bytes) -> Key | None:
        """The key that a client has sent, if it is one."""
        return self.by_digest.get(digest(sent))

    @property
    def named(self) -> dict[str, Key]:
        """Keys by name."""
        return {key.name: key for key in self.by_digest.values()}


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def load_keys(server: ServerConfig) -> Keys:
    """The keys that the settings and their file name. Raises `ConfigError` for what can't be meant."""
    found: dict[bytes, Key] = {}
    for given in server.api_key:
        name, key = split_key(given)
        _add(found, Key(name=name), [digest(key.encode())], "--api-key")
    if server.api_keys_file:
        path = Path(server.api_keys_file).expanduser()
        for named, digests in _read(path):
            _add(found, named, digests, str(path))
    return Keys(found)


def split_key(given: str) -> tuple[str, str]:
    """`NAME=KEY` as its parts; a key alone has the name `default`. The `=` that pads base64 at the end of a key splits
    nothing."""
    name, _, key = given.partition("=")
    if key.strip("=") and _NAME.fullmatch(name):
        return name, key
    return DEFAULT_NAME, given


def _add(found: dict[bytes, Key], key: Key, digests: Iterable[bytes], origin: str) -> None:
    if key.name == ADMIN_NAME:
        raise _wrong(origin, f"a key is named {ADMIN_NAME!r}", "that is the name of the admin key's own things")
    for each in digests:
        if each in found and found[each] != key:
            raise _wrong(origin, f"the keys {found[each].name!r} and {key.name!r} are the same", "a key has one name")
        found[each] = key


def _read(path: Path) -> list[tuple[Key, list[bytes]]]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            what=f"can't read the keys file {path}",
            why=error.strerror or "it can't be opened",
            fix="check the path given with --api-keys-file, and who may read it",
            param="api_keys_file",
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        place = getattr(error, "problem_mark", None)
        where = f"line {place.line + 1}" if place is not None else "its text"  # the text itself may have keys in it
        raise _wrong(str(path), "the file is not YAML", f"{where} can't be read") from None
    if not isinstance(loaded, dict) or not loaded:
        raise _wrong(str(path), "the file names no keys", "it is a mapping of names to keys")
    return [_entry(path, name, value) for name, value in loaded.items()]


def _entry(path: Path, name: object, value: object) -> tuple[Key, list[bytes]]:
    origin = f"{path}, {str(name)[:64]!r}"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(origin, "this is no name", "names have letters, digits and . _ @ -, at most 64")
    fields: Mapping[str, Any] = value if isinstance(value, dict) else {"key": value}
    unknown = sorted(str(each) for each in fields if each not in _FIELDS)
    if unknown:
        raise _wrong(origin, f"unknown field {unknown[0][:40]!r}", f"known are {', '.join(sorted(_FIELDS))}")
    limits = {each: fields.get(each, 0) for each in _LIMITS}
    for limit, number in limits.items():
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _MOST:
            raise _wrong(origin, f"{limit} is not a whole number", "it is 0 (no limit) or more")
    digests = [digest(each.encode()) for each in _texts(origin, fields.get("key"), "key")]
    for each in _texts(origin, fields.get("sha256"), "sha256"):
        if not _SHA256.fullmatch(each.lower()):
            raise _wrong(origin, "sha256 is no digest", "it is the key's SHA-256 in 64 hexadecimal digits")
        digests.append(bytes.fromhex(each))
    if not digests:
        raise _wrong(origin, "there is no key", "an entry has key, or sha256")
    return Key(name=name, **limits), digests


def _texts(origin: str, value: object, name: str) -> list[str]:
    """One text or several: a client's old key and its new one are both good while it changes them."""
    given: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, str) and each for each in given):
        raise _wrong(origin, f"{name} is not a text", "write it in quotation marks")
    return given


def _wrong(origin: str, what: str, why: str) -> ConfigError:
    return ConfigError(
        what=f"{origin}: {what}",
        why=why,
        fix='one key a line, `alice: "sk-..."`, or `alice: {key: "sk-...", tokens_per_minute: 100000}`',
        param="api_key" if origin.startswith("--api-key") else "api_keys_file",
    )
