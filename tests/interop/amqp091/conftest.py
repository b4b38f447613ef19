"""Connections of pika to a running broker."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pika
import pytest
from tests.interop.server import Broker


def connect(broker: Broker, **parameters: Any) -> Any:
    parameters.setdefault("blocked_connection_timeout", 30)
    parameters.setdefault("socket_timeout", 30)
    return pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", broker.port("amqp"), **parameters))


@pytest.fixture
def connection(broker: Broker) -> Iterator[Any]:
    made = connect(broker)
    yield made
    if made.is_open:
        made.close()


@pytest.fixture
def channel(connection: Any) -> Any:
    return connection.channel()


@pytest.fixture
def name() -> str:
    """Return a queue or exchange name that only this test uses."""
    return f"t-{uuid.uuid4().hex[:12]}"
