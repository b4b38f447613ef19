"""Certificates for tests, made with the openssl command: an authority, a server, clients, and a client of another
authority."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Authority:
    """Signs certificates in a directory."""

    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.certificate, self._key = directory / f"{name}.pem", directory / f"{name}.key"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"),
            *("-subj", f"/CN={name}", "-keyout", str(self._key), "-out", str(self.certificate)),
        )

    def sign(self, name: str) -> tuple[Path, Path]:
        """Return a certificate and its key, valid for this machine's addresses."""
        certificate, key, request = (self._directory / f"{name}.{end}" for end in ("pem", "key", "csr"))
        names = self._directory / f"{name}.ext"
        names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request)),
        )
        _openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.certificate), "-CAkey", str(self._key)),
            *("-CAcreateserial", "-days", "2", "-extfile", str(names), "-out", str(certificate)),
        )
        return certificate, key


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
