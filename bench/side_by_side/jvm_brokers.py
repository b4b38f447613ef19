"""Starts of Qpid Broker-J and ActiveMQ Artemis, which run on Java.

`install_jvm_brokers`, next to this file, installs both. BASALT_BROKER_J and BASALT_ARTEMIS name the folders of other
distributions. Both store durable messages with a sync: Broker-J in BerkeleyDB, Artemis in its journal.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.side_by_side.process import Side, free_port, running

_HEAP: Final = "-Xmx1G"


_INSTALLED: Final = {"BASALT_BROKER_J": "qpid-broker/10.1.0", "BASALT_ARTEMIS": "apache-artemis-2.40.0"}


def distribution(variable: str) -> Path | None:
    """The folder of a distribution: named by an environment variable, or installed. None without Java to run it."""
    installed = os.environ.get("BASALT_JVM_BROKERS") or Path.home() / ".cache" / "basalt" / "jvm-brokers"
    folder = Path(os.environ.get(variable) or Path(installed) / _INSTALLED[variable])
    return folder if shutil.which("java") and folder.is_dir() else None


def _broker_j_settings() -> str:
    create = {"pattern": ".*", "createdOnPublish": "true", "createdOnConsume": "true", "nodeType": "queue"}
    host = {"type": "BDB", "nodeAutoCreationPolicies": [create | {"attributes": {}}]}
    users = [{"name": "guest", "type": "managed", "password": "guest"}]
    alias = {"name": "nameAlias", "type": "nameAlias"}
    port = {"name": "AMQP", "port": "${qpid.amqp_port}", "authenticationProvider": "plain"}
    settings = {
        "name": "${broker.name}",
        "modelVersion": "8.0",
        "authenticationproviders": [{"name": "plain", "type": "Plain", "users": users, "secureOnlyMechanisms": []}],
        "ports": [port | {"virtualhostaliases": [alias]}],
        "virtualhostnodes": [
            {
                "name": "default",
                "type": "JSON",
                "defaultVirtualHostNode": "true",
                "virtualHostInitialConfiguration": json.dumps(host),
            }
        ],
    }
    return json.dumps(settings)


@contextlib.contextmanager
def broker_j(home: Path, folder: Path) -> Iterator[Side]:
    port, data = free_port(), folder / "broker-j"
    data.mkdir(parents=True)
    settings = data / "initial.json"
    settings.write_text(_broker_j_settings())
    # Derby, which the store does not use, writes a log into the working directory.
    derby = f"-Dderby.stream.error.file={data / 'derby.log'}"
    environment = {**os.environ, "QPID_WORK": str(data), "QPID_JAVA_MEM": _HEAP, "QPID_OPTS": derby}
    command = [str(home / "bin" / "qpid-server"), "-icp", str(settings), "-prop", f"qpid.amqp_port={port}"]
    with running("Broker-J", command, data, port, environment) as side:
        yield side


@contextlib.contextmanager
def artemis(home: Path, folder: Path) -> Iterator[Side]:
    port, data = free_port(), folder / "artemis"
    data.parent.mkdir(parents=True, exist_ok=True)
    create = [
        str(home / "bin" / "artemis"),
        "create",
        str(data),
        "--user=guest",
        "--password=guest",
        "--allow-anonymous",
    ]
    only = [f"--no-{name}-acceptor" for name in ("amqp", "hornetq", "mqtt", "stomp")]
    place = ["--silent", "--no-web", "--host=127.0.0.1", f"--default-port={port}", "--java-options", _HEAP]
    subprocess.run([*create, *only, *place], check=True, stdout=subprocess.DEVNULL)
    with running("Artemis", [str(data / "bin" / "artemis"), "run"], folder / "artemis-log", port) as side:
        yield side
