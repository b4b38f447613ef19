"""Starts of Qpid Broker-J, ActiveMQ Artemis and HiveMQ CE, which run on Java.

`install_jvm_brokers`, next to this file, installs them. BASALT_BROKER_J, BASALT_ARTEMIS and BASALT_HIVEMQ name the
folders of other distributions. That of HiveMQ CE contains the jars of its embedded edition, and a JDK compiles its
launcher. Broker-J (BerkeleyDB) and Artemis (journal) store durable messages with a sync, HiveMQ CE without.
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

HIVEMQ_SOURCE: Final = Path(__file__).parents[1] / "mqtt_load" / "HiveMq.java"
HIVEMQ: Final = """\
<?xml version="1.0"?>
<hivemq>
  <listeners><tcp-listener><port>{port}</port><bind-address>127.0.0.1</bind-address></tcp-listener></listeners>
  <mqtt><queued-messages><max-queue-size>100000</max-queue-size></queued-messages></mqtt>
  <anonymous-usage-statistics><enabled>false</enabled></anonymous-usage-statistics>
</hivemq>
"""


_INSTALLED: Final = {
    "BASALT_BROKER_J": "qpid-broker/10.1.0",
    "BASALT_ARTEMIS": "apache-artemis-2.40.0",
    "BASALT_HIVEMQ": "hivemq-ce-2025.5",
}
"""Folders of the distributions that `install_jvm_brokers` installs."""


def distribution(variable: str) -> Path | None:
    """The folder in an environment variable, or an installed one, if there is a Java to run what is in it."""
    folder = os.environ.get(variable)
    if not folder and variable in _INSTALLED:
        installed = os.environ.get("BASALT_JVM_BROKERS") or str(Path.home() / ".cache" / "basalt" / "jvm-brokers")
        folder = str(Path(installed) / _INSTALLED[variable])
    return Path(folder) if folder and shutil.which("java") and Path(folder).is_dir() else None


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


@contextlib.contextmanager
def hivemq(home: Path, folder: Path) -> Iterator[Side]:
    port, data = free_port(), folder / "hivemq"
    folders = [data / name for name in ("conf", "data", "extensions")]
    for each in folders:
        each.mkdir(parents=True)
    (folders[0] / "config.xml").write_text(HIVEMQ.format(port=port))
    command = ["java", _HEAP, "-cp", str(home / "*"), str(HIVEMQ_SOURCE), *map(str, folders)]
    with running("HiveMQ", command, data, port) as side:
        yield side
