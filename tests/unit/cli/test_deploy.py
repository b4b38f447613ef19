"""Deployment files: the systemd unit matches the program."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest

from basaltmq.cli.main import main
from basaltmq.cli.server.command import EXIT_CODES
from basaltmq.cli.server.systemd import Notifier
from basaltmq.errors import InvalidConfigError, StoreReadOnlyError

UNIT = Path(__file__).parents[3] / "deploy" / "basalt.service"


@pytest.fixture
def service() -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return dict(parser["Service"])


def test_the_systemd_unit_uses_existing_commands_and_flags(service: dict[str, str]) -> None:
    context = main.make_context("basalt", ["serve"], resilient_parsing=True)
    for line in (service["ExecStart"], service["ExecStartPre"]):
        _, name, *arguments = line.split()
        command = main.get_command(context, name)
        assert command is not None
        flags = {flag for parameter in command.params for flag in parameter.opts}
        assert {each for each in arguments if each.startswith("--")} <= flags


def test_systemd_does_not_restart_after_permanent_errors(service: dict[str, str]) -> None:
    codes = dict(EXIT_CODES)
    assert set(map(int, service["RestartPreventExitStatus"].split())) == {
        codes[InvalidConfigError],
        codes[StoreReadOnlyError],
    }
    assert service["Type"] == "notify"
    assert "-HUP" in service["ExecReload"]


def test_systemd_is_notified_only_under_systemd(tmp_path: Path) -> None:
    quiet = Notifier({})
    quiet.ready("x")
    quiet.stopping()
    assert quiet.watchdog_s is None
    socket = str(tmp_path / "none")
    assert Notifier({"NOTIFY_SOCKET": socket, "WATCHDOG_USEC": "4000000"}).watchdog_s == 2.0
    assert Notifier({"NOTIFY_SOCKET": socket, "WATCHDOG_USEC": "4000000", "WATCHDOG_PID": "1"}).watchdog_s is None
    assert Notifier({"NOTIFY_SOCKET": socket, "WATCHDOG_USEC": "soon"}).watchdog_s is None
    Notifier({"NOTIFY_SOCKET": socket}).ready("nobody listens, and nothing breaks")
