"""The self-signed certificate: OpenSSL accepts the key, the certificate and its signature."""

from __future__ import annotations

import os
import ssl
import stat
import subprocess
import time
from pathlib import Path

import pytest

from basaltmq.broker.auth.self_signed import certificate_file, made_pem


@pytest.mark.spec("G3")
def test_the_certificate_is_valid_and_made_once(tmp_path: Path) -> None:
    file = certificate_file(tmp_path / "listener.pem")
    before = file.read_bytes()
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert certificate_file(file).read_bytes() == before
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(file)
    trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusted.load_verify_locations(file)
    assert trusted.get_ca_certs() is not None


@pytest.mark.spec("G3")
def test_openssl_verifies_the_signature(tmp_path: Path) -> None:
    for number in range(5):
        file = tmp_path / f"{number}.pem"
        file.write_text(made_pem(time.time()))
        done = subprocess.run(
            ["openssl", "verify", "-check_ss_sig", "-CAfile", file, file], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
