"""Clients of other languages, unmodified: rhea (JavaScript), go-amqp, and Apache Qpid JMS.

`clients/install` installs them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.interop.server import Broker

SCENARIOS = Path(__file__).parent / "clients"
INSTALLED = Path(os.environ.get("BASALT_AMQP10_CLIENTS", Path.home() / ".cache" / "basalt" / "amqp10-clients"))
WAIT_S = 120.0
MESSAGES = [f"m{number}" for number in range(10)]


def needs(tool: str, installed: str) -> pytest.MarkDecorator:
    """Skip where a tool is missing. In `.ci/run` nothing is missing, so nothing is skipped."""
    missing = shutil.which(tool) is None or not (INSTALLED / installed).exists()
    reason = f"missing: {tool} or {INSTALLED / installed}; run tests/interop/amqp10/clients/install, or .ci/run"
    return pytest.mark.skipif(missing and not os.environ.get("TESTS_COMPLETE"), reason=reason)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, timeout=WAIT_S, check=False, cwd=cwd
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.spec("G2")
@needs("node", "node_modules/rhea")
def test_rhea(broker: Broker) -> None:
    # Node.js resolves packages from the directory of the script.
    scenario = INSTALLED / "scenario.mjs"
    scenario.write_text((SCENARIOS / "scenario.mjs").read_text())
    found = run("node", scenario, str(broker.port()))
    assert found.split() == [f"m{number}:{number}" for number in range(10)]


@pytest.mark.spec("G2")
@needs("sh", "go-amqp")
def test_go_amqp(broker: Broker) -> None:
    assert run(INSTALLED / "go-amqp", str(broker.port())).split() == MESSAGES


@pytest.mark.spec("G2", "A8", "A5")
@needs("java", "classes/JmsScenario.class")
def test_qpid_jms(broker: Broker) -> None:
    path = f"{INSTALLED / 'jars'}/*:{INSTALLED / 'classes'}"
    found = run("java", "-cp", path, "JmsScenario", str(broker.port())).splitlines()
    assert found == [
        "got hello red",
        "temp deleted",
        "durable one",
        "durable two",
        "unsubscribed",
        "unknown",
        "shared true",
        "shared durable sd",
        "browsed s3 s4 s5 ",
        "selected s1 s3 null",
        "group s5",
        "invalid selector",
        "no local null",
        "temporary topic all all",
        "delayed now late true",
        "rolled back true",
        "committed b",
        "again b true",
        "closed",
    ]


@pytest.mark.spec("G2", "A8")
@needs("java", "classes/JmsSubscriptions.class")
def test_qpid_jms_subscriptions(own_broker: Broker) -> None:
    broker = own_broker
    broker.call("PUT", "/api/users/jms-scram", {"password": "secret", "tags": []})
    broker.call("PUT", "/api/permissions/%2F/jms-scram", {"configure": ".*", "write": ".*", "read": ".*"})
    for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
        broker.call("PUT", f"/api/users/jms-scram/scram/{mechanism}", {"password": "secret"})
    path = f"{INSTALLED / 'jars'}/*:{INSTALLED / 'classes'}"
    found = run("java", "-cp", path, "JmsSubscriptions", str(broker.port())).splitlines()
    assert found == [
        "same client id InvalidClientIDException",
        "shared m1m2",
        "other selector JMSException",
        "in use JMSException",
        "again true",
        "changed nothing",
        "gone InvalidDestinationException",
        "global xy",
        "global kept",
        "other topic JMSException",
        "volatile vw",
        "replaced new",
        "to a queue",
        "no queue InvalidDestinationException",
        "expired nothing",
        "PLAIN",
        "SCRAM-SHA-256",
        "SCRAM-SHA-512",
        "ANONYMOUS",
        "wrong password JMSSecuritySaslException",
        "closed",
    ]
