"""URLs of media, read by one strict parser. What it does not understand is refused: no second reader can disagree."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from bough.multimodal.errors import MediaError

_LONGEST = 8192
_WEB = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<target>[/?][!-\[\]-~]*)?",
    re.IGNORECASE | re.ASCII,  # without the latter, letters that are not ASCII have cases that are
)
"""Printable ASCII without blanks and backslashes; no user, no password, no escapes in the host."""


@dataclass(frozen=True, slots=True)
class WebAddress:
    """Where one request goes."""

    scheme: str
    host: str
    """Lower case, without brackets and without a final dot."""
    port: int
    target: str

    def moved(self, location: str) -> WebAddress:
        """Where a redirect leads: a whole URL, or a path on the same server. Raises `MediaError`."""
        if location.startswith("/") and not location.startswith("//"):
            location = f"{self.scheme}://{self._authority()}{location}"
        return parse_web(location)

    def _authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_web(url: str) -> WebAddress:
    """Raises `MediaError` for anything that is not plainly an http or https URL."""
    match = _WEB.fullmatch(url.partition("#")[0]) if len(url) <= _LONGEST else None
    if match is None:
        raise MediaError(
            what="this is no URL that can be fetched",
            why="it must be http:// or https://, a host, perhaps a port, and a path in plain ASCII, "
            f"without user names and of at most {_LONGEST} characters",
            fix="escape what is not ASCII, or send the bytes as a data: URL",
        )
    scheme = match["scheme"].lower()
    port = int(match["port"] or (443 if scheme == "https" else 80))
    host = match["host"].lower().strip("[]").rstrip(".")
    if not 0 < port < 65_536 or not host:
        raise MediaError(what="this URL has no valid host and port", fix="check it")
    target = match["target"] or "/"
    return WebAddress(scheme, host, port, target if target.startswith("/") else "/" + target)


def parse_file(url: str) -> tuple[str, ...]:
    """The parts of the absolute path that a file: URL names. Raises `MediaError`."""
    rest = url[len("file:") :]
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        rest = slash + path if host in ("", "localhost") else ""
    raw = unquote_to_bytes(rest)
    parts = tuple(raw.decode("utf-8", "surrogateescape").split("/"))
    if len(url) > _LONGEST or not rest.startswith("/") or b"\0" in raw or {"", ".", ".."} & set(parts[1:]):
        raise MediaError(
            what="this is no file: URL that can be read",
            why="it must be file:// and an absolute path without . and ..",
            fix="for example file:///media/cat.png",
        )
    return parts[1:]
