"""The broker's settings as command-line flags: `--config FILE`, and one flag per setting."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from basaltmq.broker.config.settings import Leaf, leaves
from basaltmq.broker.config.sources import Loaded, load

SHORT: Final = {
    "data_dir",
    "host",
    "amqp.port",
    "kafka.port",
    "mqtt.port",
    "rocketmq.port",
    "fila.port",
    "admin.port",
    "log.level",
    "log.format",
}
"""Common flags, which the help shows. `--print-config` shows every setting."""

LISTENERS: Final = {
    "amqp": "AMQP",
    "amqps": "AMQP (TLS)",
    "admin": "admin API",
    "fila": "gRPC",
    "kafka": "Kafka",
    "mqtt": "MQTT",
    "mqtts": "MQTT (TLS)",
    "mqtt_ws": "MQTT (WebSocket)",
    "rocketmq": "RocketMQ",
}
"""Names of the listeners by their section of the settings."""


def flag_leaves() -> list[Leaf]:
    """Return the settings that have a flag. Secrets have none."""
    return [leaf for leaf in leaves() if not leaf.secret]


def with_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags to a command. It gets `settings`, a function that reads all sources."""

    @functools.wraps(command)
    def run(**arguments: Any) -> Any:
        file: Path | None = arguments.pop("config")
        flags: dict[str, str] = {}
        for leaf in flag_leaves():
            given = arguments.pop("set_" + "_".join(leaf.path))
            if given is not None:
                flags[leaf.key] = str(given)
        if "data_dir" not in flags and (outer := _outer_data_dir()) is not None:
            flags["data_dir"] = outer

        def settings() -> Loaded:
            return load(file, os.environ, flags)

        return command(settings=settings, **arguments)

    options = [_option(leaf) for leaf in flag_leaves()]
    run.__click_params__ = [  # type: ignore[attr-defined]
        *getattr(command, "__click_params__", []),
        click.Option(
            ["--config"],
            type=click.Path(path_type=Path, dir_okay=False),
            envvar="BASALT_CONFIG",
            show_envvar=True,
            help="TOML file with settings.",
        ),
        *reversed(options),  # click reverses them
    ]
    return run


def _option(leaf: Leaf) -> click.Option:
    section, _, name = leaf.key.rpartition(".")
    of = f"{LISTENERS[section]}: " if name == "port" else ""
    return click.Option(
        [leaf.flag, "set_" + "_".join(leaf.path)],
        type=str,
        metavar="VALUE",
        help=f"{of}{leaf.meaning} [{leaf.variable}]",
        hidden=leaf.key not in SHORT,
    )


def _outer_data_dir() -> str | None:
    """Return the directory of `basalt --data-dir DIR serve`, if given."""
    context = click.get_current_context().find_root()
    if context.get_parameter_source("data_dir") is click.core.ParameterSource.COMMANDLINE:
        return str(context.params["data_dir"])
    return None
