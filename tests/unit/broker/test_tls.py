"""TLS files: faults are reported, a failed reload changes nothing, and the expiry time is read."""

from __future__ import annotations

import shutil
import ssl
import time
from pathlib import Path

import pytest

from basaltmq.broker.auth.tls import expires_at_s, reload_files, server_context
from basaltmq.broker.config.settings import Tls
from basaltmq.errors import InvalidConfigError

FILES = Path(__file__).parents[2] / "fixtures" / "tls"
GOOD = Tls(certificate=FILES / "server.pem", key=FILES / "server.key")


def test_client_certificates_are_requested_as_configured() -> None:
    assert server_context(GOOD).verify_mode is ssl.CERT_NONE
    strict = Tls(GOOD.certificate, GOOD.key, FILES / "authority.pem", "require", "1.3")
    context = server_context(strict)
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (Tls(), "set both PEM files"),
        (Tls(FILES / "nowhere.pem", GOOD.key), r"cannot read tls\.certificate .*nowhere\.pem: No such file"),
        (Tls(GOOD.certificate, FILES / "client.key"), "do not work together: key values mismatch"),
        (Tls(FILES / "README.md", GOOD.key), "do not work together"),
        (Tls(GOOD.certificate, GOOD.key, FILES / "README.md"), "contains no PEM certificates"),
    ],
)
def test_invalid_tls_files_are_named(settings: Tls, said: str) -> None:
    with pytest.raises(InvalidConfigError, match=said):
        server_context(settings)


def test_a_failed_reload_leaves_the_context_as_it_was(tmp_path: Path) -> None:
    for name in ("server.pem", "server.key"):
        shutil.copy(FILES / name, tmp_path)
    settings = Tls(tmp_path / "server.pem", tmp_path / "server.key")
    context = server_context(settings)
    for wrong in ("pem", "key"):
        shutil.copy(FILES / f"client.{wrong}", tmp_path / f"server.{wrong}")
        with pytest.raises(InvalidConfigError):
            reload_files(context, settings)
        assert _shown_by(context) == _shown_by(server_context(GOOD))
        shutil.copy(FILES / f"server.{wrong}", tmp_path)
    for name in ("pem", "key"):
        shutil.copy(FILES / f"client.{name}", tmp_path / f"server.{name}")
    reload_files(context, settings)
    assert _shown_by(context) != _shown_by(server_context(GOOD))


def _shown_by(server: ssl.SSLContext) -> bytes:
    """Return the certificate that a context presents."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    left, right = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
    for _ in range(4):
        for side in (left, right):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    shown = left.getpeercert(binary_form=True)
    assert shown
    return shown


def test_expiry_of_certificates_is_read_and_expired_ones_are_refused() -> None:
    assert expires_at_s(GOOD) > time.time() + 50 * 365 * 86_400
    with pytest.raises(InvalidConfigError, match="certificate has expired"):
        expires_at_s(Tls(FILES / "expired.pem", GOOD.key))
