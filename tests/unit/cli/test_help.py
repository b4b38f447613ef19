"""Every command of `basalt` can be loaded and has a help page."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from basaltmq.cli.main import COMMANDS, main


def commands(group: click.Group, parents: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command and group below `group`."""
    with click.Context(group) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None, f"{' '.join((*parents, name))} is listed but cannot be loaded"
            yield (*parents, name)
            if isinstance(command, click.Group):
                yield from commands(command, (*parents, name))


def test_every_command_has_a_help_page() -> None:
    found = list(commands(main))
    assert len(found) > 3 * len(COMMANDS)
    for words in found:
        result = CliRunner().invoke(main, [*words, "--help"])
        assert result.exit_code == 0, (words, result.output)
        assert "pip install" not in result.output, words


def test_the_first_sentence_of_every_command_fits_its_line() -> None:
    for words in [(), *commands(main)]:
        page = CliRunner().invoke(main, [*words, "--help"], terminal_width=80).output
        listed = page.partition("\nCommands:\n")[2]
        assert "..." not in listed, words


def test_the_help_of_the_server_names_the_listener_of_each_port() -> None:
    page = " ".join(CliRunner().invoke(main, ["serve", "--help"]).output.split())
    named = {"amqp": "AMQP", "kafka": "Kafka", "mqtt": "MQTT", "rocketmq": "RocketMQ", "fila": "gRPC"}
    for flag, name in named.items():
        assert f"--{flag}-port VALUE {name}: TCP port" in page


@pytest.mark.parametrize("group", ["queue", "topic"])
def test_every_command_for_a_broker_has_a_help_page(group: str) -> None:
    result = CliRunner().invoke(main, [group, "list", "--server", "http://localhost:1", "--help"])
    assert result.exit_code == 0
    assert "BASALT_SERVER" in result.output
