"""RocketMQ's clients, unmodified. `clients/install` installs them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.interop.fila.certificates import Authority
from tests.interop.rocketmq.conftest import FLAGS
from tests.interop.server import Broker, running

SCENARIOS = Path(__file__).parent / "clients"
INSTALLED = Path(os.environ.get("BASALT_ROCKETMQ_CLIENTS", Path.home() / ".cache" / "basalt" / "rocketmq-clients"))
WAIT_S = 90.0

pytestmark = pytest.mark.spec("G3")


def needs(tool: str, installed: str) -> pytest.MarkDecorator:
    """Skip where a client is missing. In `.ci/run` nothing is missing, so nothing is skipped."""
    missing = shutil.which(tool) is None or not (INSTALLED / installed).exists()
    reason = f"missing: {tool} or {INSTALLED / installed}; run tests/interop/rocketmq/clients/install, or .ci/run"
    return pytest.mark.skipif(missing and not os.environ.get("TESTS_COMPLETE"), reason=reason)


def run(*command: str | Path, code: int = 0) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(each) for each in command],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        cwd=INSTALLED,
        env=environment,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout.splitlines()


@needs("sh", "python/bin/python")
def test_the_python_client(rocketmq: Broker) -> None:
    found = run(
        INSTALLED / "python" / "bin" / "python", SCENARIOS / "python_scenario.py", str(rocketmq.port("rocketmq"))
    )
    assert found == [
        *(f"sent {number}" for number in range(6)),
        "got m1 odd key1 1",
        "got m3 odd key3 3",
        "got m5 odd key5 5",
        "pushed [('m0', 2), ('m2', 2), ('m4', 2)]",
        "lite room lite0",
        "lite room lite1",
        "lite room lite2",
    ]


@needs("node", "node_modules/rocketmq-client-nodejs")
def test_the_node_client(rocketmq: Broker) -> None:
    # Node.js resolves packages from the directory of the script.
    scenario = INSTALLED / "scenario.js"
    scenario.write_text((SCENARIOS / "scenario.js").read_text())
    found = run("node", scenario, str(rocketmq.port("rocketmq")))
    assert found == [
        "recalled true",
        "m0:even m1:odd m2:even m3:odd m4:even",
        "m1 m3",
        "room lite 0, room lite 1, room lite 2",
    ]


@needs("java", "classes/JavaScenario.class")
@pytest.mark.parametrize("mode", ["plain", "tls", "self-signed"])
def test_the_java_client(tmp_path: Path, mode: str) -> None:
    flags: tuple[str, ...] = FLAGS
    if mode == "tls":
        certificate, key = Authority(tmp_path / "certificates", "authority").sign("localhost")
        flags = (f"--tls-certificate={certificate}", f"--tls-key={key}", *FLAGS)
    path = f"{INSTALLED / 'jars'}/*:{INSTALLED / 'classes'}"
    with running(tmp_path / "data", *flags) as broker:
        found = run(
            "java", "-cp", path, "JavaScenario", str(broker.port("rocketmq")), mode.replace("self-signed", "tls")
        )
    assert found == [
        "[delayed, fifo 0, fifo 1, fifo 2, normal, transaction]",
        "pushed normal t [k]",
        "true",
        "true [room lite 0, room lite 1, room lite 2]",
    ]
