"""The sender of a request, as the entrypoint has authenticated it."""

from __future__ import annotations

from msgspec import Struct


class Caller(Struct, frozen=True, kw_only=True):
    """A client with a key, a client of a server without keys, or a part of the server that calls routes from inside."""

    tenant: str = ""
    """Name of the client's key, which owns everything that the client creates; empty if there are no keys."""
    admin: bool = False
    """It may act on requests of other tenants."""
    isolated: bool = False
    """It shares cached prefixes with its own tenant only."""
    whole: bool = False
    """It accepts only complete answers: an answer that was cut off is an error."""

    def namespace(self, salt: str = "") -> str:
        """The cache namespace of a request with this salt."""
        return f"{self.tenant}\n{salt}" if self.isolated and self.tenant else salt


ANYBODY = Caller()
