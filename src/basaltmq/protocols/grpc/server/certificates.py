"""The TLS context of a gRPC listener: HTTP/2 by ALPN, and changed files are reloaded without a restart."""

from __future__ import annotations

import logging
import os
import ssl
from typing import Final

from basaltmq.broker.auth.tls import reload_files, server_context
from basaltmq.broker.config.settings import Tls
from basaltmq.errors import InvalidConfigError

_log: Final = logging.getLogger("basaltmq")


class Certificates:
    """A TLS context that reloads its files when they change."""

    def __init__(self, settings: Tls) -> None:
        self._settings = settings
        self._files = [file for file in (settings.certificate, settings.key, settings.authority) if file is not None]
        self._seen = self._look()
        self.context: ssl.SSLContext = server_context(settings)
        self.context.set_alpn_protocols(["h2"])

    def refresh(self) -> None:
        """Reload changed files. If they are invalid, keep the current certificate."""
        look = self._look()
        if look == self._seen:
            return
        try:
            reload_files(self.context, self._settings)
        except InvalidConfigError as error:
            _log.error("cannot reload the TLS files, continuing with the current certificate: %s", error)
        self._seen = look

    def _look(self) -> list[tuple[int, int, int] | None]:
        """Return the modification time, size and inode of each file."""
        found: list[tuple[int, int, int] | None] = []
        for file in self._files:
            try:
                status = os.stat(file)
            except OSError:
                found.append(None)
            else:
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return found
