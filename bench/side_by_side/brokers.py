"""Starts of the brokers that benches compare. Each takes the folder for its data and yields a running `Side`.

Every broker stores on disk. What a confirm means differs: Basalt and Redis (`appendfsync always`) sync first, NATS does
with `sync_interval: always`, and RabbitMQ's classic queues and Kafka do not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from bench.side_by_side.process import START_S, Side, accepts, free_port, running

RABBITMQ_PATH: Final = "/usr/lib/rabbitmq/bin"
"""Path of the server in Debian. The command on the PATH runs it as another user, which the bench cannot control."""

RABBITMQ_SETTLE_S: Final = 5.0
"""RabbitMQ accepts connections some time before it has started everything."""

NATS: Final = """\
listen: "127.0.0.1:{port}"
jetstream {{
  store_dir: "{data}"
  sync_interval: {sync}
}}
"""
NATS_SYNC_DEFAULT: Final = '"2m"'

JVM: Final = (
    "-Xmx1G",
    "-Xms1G",
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
)
"""Options of Kafka's start script."""

KAFKA: Final = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={data}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
"""
MOSQUITTO: Final = """\
listener {port} 127.0.0.1
allow_anonymous true
persistence true
persistence_location {data}/
max_queued_messages 0
user root
"""
"""Without the limit of 1,000 queued messages, it drops none."""

CLUSTER: Final = "MkU3OEVBNTcwNTJENDM2Qg"


def kafka_jars() -> Path | None:
    """Return the folder in BASALT_KAFKA_JARS if it has a Kafka server and Java is installed."""
    jars = os.environ.get("BASALT_KAFKA_JARS")
    if jars and any(Path(jars).glob("kafka_2.13-*.jar")) and shutil.which("java"):
        return Path(jars)
    return None


def rabbitmq_program() -> str | None:
    return shutil.which("rabbitmq-server", path=RABBITMQ_PATH)


def nats_program() -> str | None:
    return os.environ.get("BASALT_NATS_SERVER") or shutil.which("nats-server")


def basalt_amqp(folder: Path) -> contextlib.AbstractContextManager[Side]:
    port = free_port()
    return _basalt(folder, port, [f"--amqp-port={port}", "--kafka-port=0"], accepts)


def basalt_kafka(folder: Path) -> contextlib.AbstractContextManager[Side]:
    port = free_port()
    return _basalt(folder, port, ["--kafka-enabled=true", f"--kafka-port={port}", "--amqp-port=0"], kafka_answers)


def basalt_mqtt(folder: Path) -> contextlib.AbstractContextManager[Side]:
    port = free_port()
    flags = [f"--mqtt-port={port}", "--mqtt-ws-port=0", "--amqp-port=0", "--kafka-port=0"]
    return _basalt(folder, port, flags, accepts)


def basalt_rocketmq(folder: Path, partitions: int) -> contextlib.AbstractContextManager[Side]:
    port = free_port()
    flags = [f"--rocketmq-port={port}", f"--rocketmq-partitions={partitions}", "--amqp-port=0", "--kafka-port=0"]
    return _basalt(folder, port, flags, accepts)


def mosquitto(program: str, folder: Path) -> contextlib.AbstractContextManager[Side]:
    port = free_port()
    home = folder / "mosquitto"
    home.mkdir(parents=True)
    settings = home / "mosquitto.conf"
    settings.write_text(MOSQUITTO.format(port=port, data=home))
    return running("mosquitto", [program, "-c", str(settings)], home, port)


@contextlib.contextmanager
def _basalt(folder: Path, port: int, flags: list[str], answers: Callable[[int], bool]) -> Iterator[Side]:
    folder.mkdir(parents=True, exist_ok=True)
    doors = ("FILA", "ADMIN", "MQTT", "MQTT_WS", "ROCKETMQ")
    others = {f"BASALT_{door}_PORT": "0" for door in doors}
    environment = {**os.environ, **others}
    _compile(folder / "bytecode", environment)
    serve = [sys.executable, "-m", "basaltmq.cli", "serve", f"--data-dir={folder / 'basalt'}"]
    command = [*serve, *flags, "--quiet", "--log-level=error"]
    with running("Basalt", command, folder, port, environment, answers) as side:
        yield side


def _compile(folder: Path, environment: dict[str, str]) -> None:
    """Compile the broker's bytecode, as an installation does, independent of this tree and environment."""
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(folder)
    if not folder.exists():
        modules = (
            "import basaltmq.cli.server.command, basaltmq.protocols.grpc.services.queue_server, "
            "basaltmq.admin.http.server"
        )
        subprocess.run([sys.executable, "-c", modules], env=environment, check=True)


@contextlib.contextmanager
def rabbitmq(program: str, folder: Path) -> Iterator[Side]:
    port, names_port = free_port(), free_port()
    home = folder / "rabbitmq"
    home.mkdir(parents=True)
    environment = {
        **os.environ,
        "RABBITMQ_NODENAME": f"bench{port}@localhost",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": str(home),
        "RABBITMQ_LOG_BASE": str(home),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": str(names_port),
        "HOME": str(home),
    }
    try:
        with running("RabbitMQ", [program], home, port, environment) as side:
            time.sleep(RABBITMQ_SETTLE_S)
            yield side
    finally:
        # Erlang starts its name server as a daemon, outside the process group.
        subprocess.run(["epmd", "-port", str(names_port), "-kill"], stdout=subprocess.DEVNULL, check=False)


def nats(program: str, folder: Path, *, synced: bool) -> contextlib.AbstractContextManager[Side]:
    port = free_port()
    name = "NATS, fsync" if synced else "NATS"
    home = folder / ("nats-fsync" if synced else "nats")
    home.mkdir(parents=True)
    settings = home / "server.conf"
    settings.write_text(NATS.format(port=port, data=home / "data", sync="always" if synced else NATS_SYNC_DEFAULT))
    return running(name, [program, "-c", str(settings)], home, port)


def redis(program: str, folder: Path) -> contextlib.AbstractContextManager[Side]:
    port = free_port()
    home = folder / "redis"
    home.mkdir(parents=True)
    place = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(home)]
    log = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
    return running("Redis, fsync", [program, *place, *log], home, port)


@contextlib.contextmanager
def kafka(jars: Path, folder: Path) -> Iterator[Side]:
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    data, settings = folder / "kafka", folder / "server.properties"
    settings.write_text(KAFKA.format(port=port, controller=free_port(), data=data))
    java = ["java", *JVM, "-cp", f"{jars}/*"]
    if not data.exists():
        command = [*java, "kafka.tools.StorageTool", "format", "-t", CLUSTER, "-c", str(settings)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with running("Kafka", [*java, "kafka.Kafka", str(settings)], folder, port, answers=kafka_answers) as side:
        yield side


def kafka_answers(port: int) -> bool:
    """Whether a client gets metadata of the cluster. An open port alone does not show that the broker is ready."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=START_S) as sock:
        # Metadata, version 1, of no topic.
        sock.sendall(b"\0\0\0\x0e\0\x03\0\x01\0\0\0\x01\xff\xff\0\0\0\0")
        return len(sock.recv(64)) > 8
    return False
