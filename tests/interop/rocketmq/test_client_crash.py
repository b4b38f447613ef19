"""A RocketMQ client that dies, and its work that another one finishes."""

from __future__ import annotations

from pathlib import Path

from tests.interop.rocketmq.conftest import FLAGS
from tests.interop.rocketmq.test_clients import INSTALLED, needs, run
from tests.interop.server import running


@needs("java", "classes/JavaScenario.class")
def test_the_java_client_decides_for_a_producer_that_died_with_a_half_message(tmp_path: Path) -> None:
    java = ("java", "-cp", f"{INSTALLED / 'jars'}/*:{INSTALLED / 'classes'}", "JavaScenario")
    with running(tmp_path / "data", "--rocketmq-transaction-check-ms=100", *FLAGS) as broker:
        port = str(broker.port("rocketmq"))
        assert run(*java, port, "plain", "half", code=137) == ["half"]
        broker.kill()
        broker.start()
        assert run(*java, port, "plain", "check") == ["checked left behind", "received [left behind]"]
