"""Celery with its defaults: a real worker process, results over rpc, retries, countdowns beyond the prefetch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.interop.server import Broker

ROOT = Path(__file__).parents[3]
WAIT_S = 60
MODULE = "tests.interop.amqp091.celery_app"


@pytest.fixture(scope="module")
def app(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    url = broker.url("amqp").replace("%2F", "/")
    environment = {**os.environ, "BASALT_TEST_URL": url, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    log = tmp_path_factory.mktemp("celery") / "worker.log"
    command = [sys.executable, "-m", "celery", "-A", MODULE, "worker", "--pool=solo", "--loglevel=INFO", "-n", "w@test"]
    with open(log, "wb") as out:
        worker = subprocess.Popen(command, env=environment, cwd=log.parent, stdout=out, stderr=out)
    try:
        from tests.interop.amqp091 import celery_app

        celery_app.app.conf.broker_url = url
        yield celery_app
        assert worker.poll() is None, log.read_text()
    finally:
        celery_app.app.close()
        worker.terminate()
        try:
            worker.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def test_tasks_return_results(app: Any) -> None:
    results = [app.add.delay(each, each) for each in range(50)]
    assert [result.get(timeout=WAIT_S) for result in results] == [2 * each for each in range(50)]


def test_a_failed_task_is_retried(app: Any) -> None:
    assert app.flaky.delay(2).get(timeout=WAIT_S) == 2


def test_tasks_with_a_countdown_do_not_block_a_worker(app: Any) -> None:
    """Celery raises its prefetch for each of them. It does so correctly only if basic.qos has RabbitMQ's semantics."""
    later = [app.add.apply_async((each, 1), countdown=300) for each in range(12)]
    assert app.add.delay(20, 22).get(timeout=WAIT_S) == 42
    for result in later:
        result.revoke()


def test_the_worker_answers_to_remote_control(app: Any) -> None:
    assert app.add.delay(1, 1).get(timeout=WAIT_S) == 2, "who is not there yet does not hear a broadcast"
    # Without a limit it waits for responses of other workers until its timeout.
    assert app.app.control.inspect(timeout=WAIT_S, limit=1).ping() == {"w@test": {"ok": "pong"}}
