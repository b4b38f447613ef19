"""TLS contexts of listeners, their reload, and the expiry time of the certificate.

A context lives as long as its listener. A reload loads the files into the same context, so new connections use the new
certificate. Invalid files are refused before they change a context in use.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

from basaltmq.broker.config.settings import Tls
from basaltmq.errors import InvalidConfigError

_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_CLIENTS: Final = {"ignore": ssl.CERT_NONE, "ask": ssl.CERT_OPTIONAL, "require": ssl.CERT_REQUIRED}


def server_context(settings: Tls) -> ssl.SSLContext:
    """Return a context for listeners."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_files(context, settings)
    return context


def reload_files(context: ssl.SSLContext, settings: Tls) -> None:
    """Reload the files into a context in use. Raises, and changes nothing, if they are invalid."""
    server_context(settings)
    load_files(context, settings)


def load_files(context: ssl.SSLContext, settings: Tls) -> None:
    if settings.certificate is None or settings.key is None:
        raise InvalidConfigError("TLS needs tls.certificate and tls.key: set both PEM files")
    for name, file in (("certificate", settings.certificate), ("key", settings.key), ("authority", settings.authority)):
        if file is not None:
            _require_readable(name, file)
    try:
        context.load_cert_chain(settings.certificate, settings.key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise InvalidConfigError(
            f"tls.certificate {settings.certificate} and tls.key {settings.key} do not work together: "
            f"{_reason(error)}; use a PEM certificate followed by its chain, and its key without a password"
        ) from error
    if settings.authority is not None:
        try:
            context.load_verify_locations(cafile=settings.authority)
        except ssl.SSLError as error:
            raise InvalidConfigError(
                f"tls.authority {settings.authority} contains no PEM certificates: {_reason(error)}"
            ) from error
    context.verify_mode = _CLIENTS[settings.clients]
    context.minimum_version = _VERSIONS[settings.version_min]


def expires_at_s(settings: Tls) -> float:
    """Return the expiry time of the server's certificate, in seconds since 1970. Raises if it is not valid now.

    Python's ssl module shows the dates of a peer's certificate only, so this performs a handshake in memory.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_files(server, Tls(certificate=settings.certificate, key=settings.key))
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    assert settings.certificate is not None
    client.load_verify_locations(cafile=settings.certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    left = client.wrap_bio(to_client, to_server)
    right = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for _ in range(4):
            for side in (left, right):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
    except ssl.SSLCertVerificationError as error:
        raise InvalidConfigError(
            f"tls.certificate {settings.certificate} cannot be used: {error.verify_message}"
        ) from error
    shown = left.getpeercert() or {}
    return ssl.cert_time_to_seconds(str(shown["notAfter"]))


def _require_readable(name: str, file: Path) -> None:
    try:
        with open(file, "rb"):
            return
    except OSError as error:
        raise InvalidConfigError(f"cannot read tls.{name} {file}: {error.strerror}") from error


def _no_password() -> str:
    raise ValueError("the key has a password, which is not supported")


def _reason(error: Exception) -> str:
    return (getattr(error, "reason", None) or str(error)).replace("_", " ").lower()
