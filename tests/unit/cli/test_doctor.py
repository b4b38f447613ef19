"""`basalt doctor`: findings, advice, and exit codes."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import namedtuple
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from basaltmq.broker.vhost_directory import VHostDirectories
from basaltmq.cli.doctor import checks as doctor_checks
from basaltmq.cli.main import main
from basaltmq.store.open import open_store

TLS = Path(__file__).parents[2] / "fixtures" / "tls"
FREE = ("--amqp-port=0", "--admin-port=0", "--fila-port=0", "--kafka-port=0")
Usage = namedtuple("Usage", "total used free")


def findings(tmp_path: Path, *flags: str, code: int = 0) -> list[dict[str, Any]]:
    words = ["doctor", "--json", f"--data-dir={tmp_path / 'data'}", *FREE, *flags]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == code, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def of(found: list[dict[str, Any]], check: str) -> list[dict[str, Any]]:
    return [each for each in found if each["check"] == check]


def test_a_valid_directory_passes_every_check_unchanged(tmp_path: Path) -> None:
    found = findings(tmp_path)
    assert {each["check"] for each in found} >= {"python", "packages", "open files", "memory", "disk", "clock", "tls"}
    assert not any(each["state"] == "FAIL" for each in found)
    assert "is empty" in of(found, "data")[0]["detail"]
    assert list(tmp_path.iterdir()) == []


def test_text_output_has_a_line_per_check_and_the_remedy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["doctor", f"--data-dir={tmp_path}", *FREE[1:], f"--amqp-port={port}"]
        result = CliRunner().invoke(main, words)
    assert result.exit_code == 0
    assert f"amqp 127.0.0.1:{port}: Address already in use" in result.stdout
    assert "-> stop the process that uses it" in result.stdout
    assert "warnings" in result.stdout.splitlines()[-1]


def test_a_port_of_the_running_broker_of_this_directory_is_fine(tmp_path: Path) -> None:
    words = ["doctor", f"--data-dir={tmp_path}", *FREE[1:]]
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        closing(open_store(VHostDirectories(tmp_path).node_store)),
    ):
        port = taken.getsockname()[1]
        result = CliRunner().invoke(main, [*words, f"--amqp-port={port}"])
    assert (
        f"ok    ports       amqp 127.0.0.1:{port} is used by the running broker, process {os.getpid()}" in result.stdout
    )


def test_a_full_disk_is_a_failed_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: Usage(1 << 40, 1 << 40, 1 << 20))
    disk = of(findings(tmp_path, code=2), "disk")[0]
    assert disk["state"] == "FAIL"
    assert "disk.free_min" in disk["advice"]


def test_an_expired_or_mismatched_certificate_is_a_failed_check(tmp_path: Path) -> None:
    key = f"--tls-key={TLS / 'server.key'}"
    assert of(findings(tmp_path, f"--tls-certificate={TLS / 'server.pem'}", key), "tls")[0]["state"] == "ok"
    ended = of(findings(tmp_path, f"--tls-certificate={TLS / 'expired.pem'}", key, code=2), "tls")[0]
    assert "expired" in ended["detail"]
    other = of(findings(tmp_path, f"--tls-certificate={TLS / 'client.pem'}", key, code=2), "tls")[0]
    assert "do not work together" in other["detail"]


def test_a_certificate_that_expires_soon_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "expires_at_s", lambda _tls: time.time() + 5.5 * 86_400)
    flags = (f"--tls-certificate={TLS / 'server.pem'}", f"--tls-key={TLS / 'server.key'}")
    soon = of(findings(tmp_path, *flags), "tls")[0]
    assert soon["state"] == "warn"
    assert "expires in 5 days" in soon["detail"] or "expires in 6 days" in soon["detail"]


def test_more_connections_than_open_files_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _which: (256, 1024))
    found = of(findings(tmp_path), "open files")[0]
    assert found["state"] == "warn"
    assert "LimitNOFILE=11280" in found["advice"]


def test_data_in_use_and_data_of_no_broker_are_distinguished(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "letter").write_text("dear")
    assert "letter" in of(findings(tmp_path, code=2), "data")[0]["detail"]
    (tmp_path / "data" / "letter").unlink()
    store = open_store(tmp_path / "data" / "node" / "store")
    try:
        served = of(findings(tmp_path, "--verify"), "data")
    finally:
        store.close()
    assert "served by process" in served[0]["detail"]
    assert "not verified" in served[1]["detail"]


def test_verify_names_damaged_files(tmp_path: Path) -> None:
    open_store(tmp_path / "data" / "node" / "store").close()
    assert "is intact" in of(findings(tmp_path, "--verify"), "data")[1]["detail"]
    [manifest] = (tmp_path / "data" / "node" / "store" / "kv").glob("MANIFEST-*")
    raw = bytearray(manifest.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    manifest.write_bytes(raw)
    faults = [each for each in of(findings(tmp_path, "--verify", code=2), "data") if each["state"] == "FAIL"]
    assert manifest.name in faults[0]["detail"]


def test_a_misspelled_variable_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASALT_AMQP_PROT", "1")
    assert "BASALT_AMQP_PORT?" in of(findings(tmp_path), "settings")[0]["detail"]
