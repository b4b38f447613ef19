"""The text at start: it matches the settings, and its example is valid Python."""

from __future__ import annotations

import ast
import textwrap

import msgspec
import pytest

from basaltmq.broker.config.settings import Config
from basaltmq.cli.server.welcome import welcome

PORTS = {"amqp": 5672, "admin": 15672, "fila": 5555}


def changed(section: str, **fields: object) -> Config:
    config = Config()
    return msgspec.structs.replace(config, **{section: msgspec.structs.replace(getattr(config, section), **fields)})


def test_the_welcome_shows_ten_lines_of_python_with_the_listening_address() -> None:
    text = welcome(Config(), {**PORTS, "amqp": 6000}, "9.9")
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    example = textwrap.dedent("\n".join(lines[:10]))
    ast.parse(example)
    assert "amqp://guest:guest@127.0.0.1:6000/%2F" in example
    assert "http://127.0.0.1:15672/api/docs" in text
    assert "basalt user create alice --tag management\n" in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_welcome_names_the_environment_unless_it_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.prefix", "/opt/clone/.venv")
    for found, is_shown in ((None, True), ("/opt/clone/.venv/bin/basalt", False)):
        monkeypatch.setattr("shutil.which", lambda name, found=found: found)
        assert ("\n    . /opt/clone/.venv/bin/activate\n" in welcome(Config(), PORTS, "9.9")) is is_shown


def test_the_welcome_hides_configured_passwords() -> None:
    chosen = {"default_user": "root", "default_password": "hunter2"}
    text = welcome(changed("auth", **chosen), PORTS, "9.9")
    assert "hunter2" not in text
    assert "amqp://root:PASSWORD@" in text
    assert "guest can log in" not in welcome(changed("auth", loopback_users=()), PORTS, "9.9")


def test_the_welcome_shows_addresses_that_clients_can_use() -> None:
    everywhere = msgspec.structs.replace(Config(), host="::")
    assert "http://127.0.0.1:15672" in welcome(everywhere, PORTS, "9.9")
    one = msgspec.structs.replace(Config(), host="fd00::1")
    assert "@[fd00::1]:5672/" in welcome(one, PORTS, "9.9")
    assert "--server http://127.0.0.1:7000" in welcome(Config(), {"admin": 7000}, "9.9")
    assert "pika" not in welcome(Config(), {"admin": 7000}, "9.9")
    assert "https://127.0.0.1:15672/api/docs" in welcome(changed("admin", tls=True), PORTS, "9.9")
