"""TLS of the HTTP server: its certificate and key, and the authorities for client certificates."""

from __future__ import annotations

import ssl
from pathlib import Path

from bough.config.concerns import ServerConfig
from bough.core.errors import ConfigError


class Certificates:
    """The files of --ssl-certfile, --ssl-keyfile and --ssl-ca-certs as one context, which `reload` updates."""

    def __init__(self, server: ServerConfig) -> None:
        """Raises `ConfigError` if a file can't be read, or the key is not the certificate's."""
        self._server = server
        self.context = _load(server, _new())

    @staticmethod
    def wanted(server: ServerConfig) -> Certificates | None:
        """The TLS context; None for plain HTTP. Raises `ConfigError`, also if a setting that HTTPS needs is missing."""
        if server.ssl_certfile:
            return Certificates(server)
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(server, name):
                raise ConfigError(
                    what=f"--{name.replace('_', '-')} was given without --ssl-certfile",
                    why="there is no HTTPS without a certificate of the server's",
                    fix="name it with --ssl-certfile",
                    param=name,
                )
        return None

    def reload(self) -> str:
        """Reloads the files for new connections. Raises `ConfigError` and changes nothing if one is invalid."""
        _load(self._server, _new())
        _load(self._server, self.context)
        return self._server.ssl_certfile


def _new() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _load(server: ServerConfig, context: ssl.SSLContext) -> ssl.SSLContext:
    certificate = Path(server.ssl_certfile).expanduser()
    key = Path(server.ssl_keyfile).expanduser() if server.ssl_keyfile else None
    try:
        context.load_cert_chain(certificate, key, password=lambda: server.ssl_keyfile_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            what="the server's certificate can't be used",
            why=_why(error, str(certificate) if key is None else f"{certificate} and {key}"),
            fix="name PEM files that belong together with --ssl-certfile and --ssl-keyfile, "
            "and the key's password, if it has one, with --ssl-keyfile-password",
            param="ssl_certfile",
        ) from error
    if server.ssl_ca_certs:
        authorities = Path(server.ssl_ca_certs).expanduser()
        try:
            context.load_verify_locations(authorities)
        except OSError as error:
            raise ConfigError(
                what="the authorities of --ssl-ca-certs can't be used",
                why=_why(error, str(authorities)),
                fix="name a PEM file with the certificates of those who sign clients' certificates",
                param="ssl_ca_certs",
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _why(error: Exception, files: str) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no file {error.filename or files}"
    if isinstance(error, ssl.SSLError):
        said = (error.reason or "").replace("_", " ").lower()
        return f"OpenSSL refuses {files}: {said or 'no PEM data, or the password is wrong'}"
    return f"{files}: {error}"
