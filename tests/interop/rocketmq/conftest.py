"""A broker whose RocketMQ listener allows short invisible durations, shared by a module, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.interop.rocketmq.raw import Client
from tests.interop.server import Broker, running

FLAGS = ("--rocketmq-invisible-ms-min=100",)


@pytest.fixture(scope="module")
def rocketmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with running(tmp_path_factory.mktemp("rocketmq") / "data", *FLAGS) as started:
        yield started


@pytest.fixture
def client(rocketmq: Broker) -> Iterator[Client]:
    with Client(rocketmq.port("rocketmq")) as made:
        yield made
