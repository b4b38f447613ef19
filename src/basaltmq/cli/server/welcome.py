"""The text that `basalt serve` prints when it is up: addresses, and commands to try next."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from basaltmq.broker.config.settings import Config
from basaltmq.cli.server.settings import LISTENERS

EXAMPLE = """\
    import pika
    connection = pika.BlockingConnection(pika.URLParameters("amqp://{user}:{password}@{host}:{port}/%2F"))
    channel = connection.channel()
    channel.queue_declare("hello", durable=True)
    channel.confirm_delivery()
    channel.basic_publish("", "hello", b"Hello Basalt", pika.BasicProperties(delivery_mode=2))
    method, properties, body = channel.basic_get("hello")
    print(body)
    channel.basic_ack(method.delivery_tag)
    connection.close()
"""


def welcome(config: Config, ports: Mapping[str, int], version: str) -> str:
    hosts = {section: _reachable(host) for section, host, _ in config.endpoints()}
    lines = [f"Basalt {version} is up; data directory {config.data_dir.absolute()}", ""]
    for section, port in ports.items():
        address = f"{hosts[section]}:{port}"
        if section == "admin":
            address = f"{'https' if config.admin.tls else 'http'}://{address}/api/docs"
        elif section == "mqtt_ws":
            address = f"{'wss' if config.mqtt_ws.tls else 'ws'}://{address}/mqtt"
        lines.append(f"  {LISTENERS[section]:<17} {address}")
    if "amqp" in ports and config.auth.default_user:
        user = config.auth.default_user
        known = user == "guest" and config.auth.default_password == "guest"  # noqa: S105
        lines += ["", "Send and receive a message (pip install pika):", ""]
        lines += EXAMPLE.format(
            user=user, password="guest" if known else "PASSWORD", host=hosts["amqp"], port=ports["amqp"]
        ).splitlines()
    if "admin" in ports:
        server = "" if ports["admin"] == 15672 else f" --server http://{hosts['admin']}:{ports['admin']}"
        lines += [
            "",
            "Inspect the broker, and add a user:",
            "",
            *_activation(),
            f"    basalt queue list --server http://{hosts['admin']}:{ports['admin']}",
            f"    basalt user create alice --tag management{server}",
            f"    basalt permission set alice{server}",
        ]
        if "guest" in config.auth.loopback_users:
            lines.append("    (guest can log in from this machine only)")
    lines += ["", "Stop it with Ctrl-C. Every confirmed message is on disk.", ""]
    return "\n".join(lines)


def _activation() -> list[str]:
    """Return the line that puts `basalt` on the PATH, if it is in a virtual environment that is not active."""
    if sys.prefix == sys.base_prefix or shutil.which("basalt") is not None:
        return []
    return [f"    . {Path(sys.prefix, 'bin', 'activate')}"]


def _reachable(host: str) -> str:
    if host in {"0.0.0.0", "::", ""}:  # noqa: S104
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
