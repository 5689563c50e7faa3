"""Who sends a request, as the entrance that took it has found out."""

from __future__ import annotations

from msgspec import Struct


class Caller(Struct, frozen=True, kw_only=True):
    """A client with a key, a client of a server without keys, or a part of the server that calls routes from inside."""

    tenant: str = ""
    """Name of the client's key, to which everything belongs that it makes; empty where there are no keys."""
    admin: bool = False
    """It may act on requests of other tenants."""
    isolated: bool = False
    """It shares cached prefixes with its own tenant only."""
    whole: bool = False
    """It takes whole answers only: one that is cut off, by whatever, is an error for it."""

    def namespace(self, salt: str = "") -> str:
        """The cache namespace of a request with this salt."""
        return f"{self.tenant}\n{salt}" if self.isolated and self.tenant else salt


ANYBODY = Caller()
