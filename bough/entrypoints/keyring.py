"""The valid keys: authentication of clients, their rate limits, and reloading of keys."""

from __future__ import annotations

import hmac
import math

from bough.config.concerns import ServerConfig
from bough.config.keys import ADMIN_NAME, Key, Keys, load_keys
from bough.core.errors import Overloaded, Unauthorized
from bough.engine_client.caller import Caller
from bough.entrypoints.quota import Rates
from bough.observability.usage import KeyUsage


class TooFast(Overloaded):
    """A client is over one of its own limits."""

    code = "rate_limit_exceeded"


class Keyring:
    """The keys of one API worker, with which all entrypoints authenticate callers."""

    def __init__(self, server: ServerConfig, rates: Rates | None = None, keys: Keys | None = None) -> None:
        """`keys`: what `load_keys` found in the settings; None: they are read now, which raises `ConfigError`."""
        self._server = server
        self._admin_key = server.admin_api_key.encode()
        self._metrics_key = server.metrics_api_key.encode()
        self._rates = rates or Rates(None)
        self.usage: KeyUsage | None = None
        """Usage counters of clients."""
        self._use(load_keys(server) if keys is None else keys)

    def _use(self, keys: Keys) -> None:
        self._keys = keys
        self._named = keys.named

    @property
    def names(self) -> frozenset[str]:
        """Of all keys, the admin key's among them if there is one."""
        return frozenset(self._named) | ({ADMIN_NAME} if self._admin_key else frozenset())

    @property
    def has_admin(self) -> bool:
        """Whether there is a key for admin routes."""
        return bool(self._admin_key) or self._server.admin_with_api_key

    def reload(self) -> str:
        """Reads the keys again and says how many there are. Raises `ConfigError` and keeps the old ones."""
        keys = load_keys(self._server)
        self._use(keys)
        if self.usage is not None:
            self.usage.know(self.names)
        return f"{len(self._named)} clients have keys"

    def admit(self, authorization: bytes, *, fix: str, admin: bool = False, metrics: bool = False) -> Caller:
        """The caller with this header (`Bearer KEY`). Raises `Unauthorized` for a missing or wrong key, and with
        `admin` for a key without access to admin routes. With `metrics`, the metrics key is also accepted. `fix` says
        how a key is sent.
        """
        scheme, _, sent = authorization.partition(b" ")
        sent = sent.strip() if scheme.lower() == b"bearer" else b""
        is_admin = bool(self._admin_key) and hmac.compare_digest(sent, self._admin_key)
        isolated, any_is_admin = self._server.isolate_cache, self._server.admin_with_api_key
        if is_admin:
            return Caller(tenant=ADMIN_NAME, admin=True, isolated=isolated)
        if admin and not any_is_admin:
            raise _refused("admin key", authorization, fix)
        if metrics and self._metrics_key and hmac.compare_digest(sent, self._metrics_key):
            return Caller()
        key = self._keys.find(sent) if sent else None
        if key is not None:
            return Caller(tenant=key.name, admin=any_is_admin, isolated=isolated)
        if self._keys or admin or (metrics and self._metrics_key):
            raise _refused("admin key" if admin else "key for metrics" if metrics else "key", authorization, fix)
        return Caller(admin=not self._admin_key)

    def count(self, caller: Caller) -> None:
        """Counts a request of a client. Raises `TooFast` if it has sent too many."""
        key = self._named.get(caller.tenant)
        if key is not None and key.requests_per_minute:
            wait_s = self._rates.take(f"requests {key.name}", 1, key.requests_per_minute)
            if wait_s:
                raise self._too_fast(key, f"{key.requests_per_minute} requests", wait_s)

    def charge(self, tenant: str, tokens: int) -> None:
        """Charges a client for about `tokens` tokens. Raises `TooFast` if its rate is used up: while any of it is left,
        requests of any size are accepted, and the excess delays later ones."""
        key = self._named.get(tenant)
        if key is not None and key.tokens_per_minute:
            wait_s = self._rates.take(f"tokens {key.name}", tokens, key.tokens_per_minute, overdraw=True)
            if wait_s:
                raise self._too_fast(key, f"{key.tokens_per_minute} tokens", wait_s)

    def used(self, tenant: str, *, requests: int = 0, prompt: int = 0, generated: int = 0, charged: int = 0) -> None:
        """Records the tokens that a client has used, of which `charged` were already charged."""
        key = self._named.get(tenant)
        if key is not None and key.tokens_per_minute:
            self._rates.use(f"tokens {key.name}", prompt + generated - charged, key.tokens_per_minute)
        if self.usage is not None:
            self.usage.used(tenant, requests=requests, prompt=prompt, generated=generated)

    def _too_fast(self, key: Key, limit: str, wait_s: float) -> TooFast:
        if self.usage is not None:
            self.usage.refused(key.name)
        seconds = max(1, min(3600, math.ceil(wait_s)))
        error = TooFast(
            what=f"the key {key.name!r} is over its limit",
            why=f"it has {limit} per minute",
            fix=f"try again in {seconds} s",
        )
        error.retry_after_s = seconds
        return error


def _refused(what: str, authorization: bytes, fix: str) -> Unauthorized:
    return Unauthorized(
        what=f"the {what} is missing" if not authorization else f"the {what} is wrong",
        why="this route is protected",
        fix=fix,
    )
