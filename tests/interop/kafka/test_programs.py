"""kcat and Apache Kafka's own tools, where they are installed, against a broker."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.interop.server import Broker

WAIT_S = 120.0
KCAT = shutil.which("kcat")
JARS = Path(os.environ.get("BASALT_KAFKA_JARS", "/nowhere"))
HAS_JARS = shutil.which("java") is not None and any(JARS.glob("kafka-tools-*.jar"))


def run(*command: str, given: str = "") -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.skipif(KCAT is None, reason="kcat is not installed (apt-get install kcat)")
def test_kcat_produces_consumes_and_queries(kafka: Broker) -> None:
    assert KCAT is not None
    address = f"127.0.0.1:{kafka.port('kafka')}"
    lines = [f"key-{number}:line {number}" for number in range(500)]
    run(
        KCAT,
        "-b",
        address,
        "-P",
        "-t",
        "kcat",
        "-K",
        ":",
        "-z",
        "zstd",
        "-X",
        "acks=all",
        given="\n".join(lines) + "\n",
    )
    read = run(KCAT, "-b", address, "-C", "-t", "kcat", "-o", "beginning", "-e", "-q", "-K", ":")
    assert read.splitlines() == lines
    assert "kcat [0] offset 500" in run(KCAT, "-b", address, "-Q", "-t", "kcat:0:-1")
    grouped = run(
        KCAT,
        "-b",
        address,
        "-G",
        "kcat-group",
        "-X",
        "auto.offset.reset=earliest",
        "-c",
        "500",
        "-q",
        "-K",
        ":",
        "kcat",
    )
    assert grouped.splitlines() == lines
    assert '"topic":"kcat"' in run(KCAT, "-b", address, "-L", "-J", "-t", "kcat")


@pytest.mark.skipif(not HAS_JARS, reason="BASALT_KAFKA_JARS names no folder with Kafka's jars (bench/kafka_peer.xml)")
def test_the_java_client_produces_consumes_and_queries(kafka: Broker) -> None:
    address = f"127.0.0.1:{kafka.port('kafka')}"

    def tool(name: str, *arguments: str, given: str = "") -> str:
        java = ("java", "-XX:TieredStopAtLevel=1", "-cp", f"{JARS}/*", f"org.apache.kafka.tools.{name}")
        return run(*java, "--bootstrap-server", address, *arguments, given=given)

    tool("TopicCommand", "--create", "--topic", "java", "--partitions", "2")
    lines = [f"line {number}" for number in range(500)]
    tool("ConsoleProducer", "--topic", "java", "--compression-codec", "lz4", given="\n".join(lines) + "\n")
    read = tool(
        "consumer.ConsoleConsumer", "--topic", "java", "--from-beginning", "--group", "java", "--max-messages", "500"
    )
    assert sorted(read.splitlines()) == sorted(lines)
    ends = tool("GetOffsetShell", "--topic", "java", "--time", "-1").splitlines()
    assert sum(int(line.split(":")[2]) for line in ends) == 500
    assert tool("GetOffsetShell", "--topic", "java", "--time", "-3").startswith("java:")
    described = tool("consumer.group.ConsumerGroupCommand", "--describe", "--group", "java")
    assert sum(int(row.split()[3]) for row in described.splitlines() if row.startswith("java ")) == 500
