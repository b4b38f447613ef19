"""RabbitMQ's Python client for AMQP 1.0: management over AMQP, publishers, consumers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from rabbitmq_amqp_python_client import (
    AddressHelper,
    Converter,
    Environment,
    ExchangeSpecification,
    ExchangeToQueueBindingSpecification,
    Message,
    OutcomeState,
    QuorumQueueSpecification,
    ValidationCodeException,
)
from tests.interop.server import Broker


@pytest.fixture
def environment(broker: Broker) -> Iterator[Any]:
    made = Environment(uri=f"amqp://guest:guest@127.0.0.1:{broker.port()}/")
    yield made
    made.close()


@pytest.mark.spec("G2")
def test_objects_are_declared_bound_inspected_and_deleted(environment: Any) -> None:
    connection = environment.connection()
    connection.dial()
    management = connection.management()
    management.declare_exchange(ExchangeSpecification(name="rc ex"))
    management.declare_queue(QuorumQueueSpecification(name="rc/queue"))
    path = management.bind(
        ExchangeToQueueBindingSpecification(source_exchange="rc ex", destination_queue="rc/queue", binding_key="key")
    )
    publisher = connection.publisher(AddressHelper.exchange_address("rc ex", "key"))
    for number in range(3):
        status = publisher.publish(Message(body=Converter.string_to_bytes(f"m{number}")))
        assert status.remote_state == OutcomeState.ACCEPTED
    publisher.close()
    info = management.queue_info("rc/queue")
    assert (info.name, info.message_count) == ("rc/queue", 3)
    assert management.purge_queue("rc/queue") == 3
    management.unbind(path)
    management.delete_queue("rc/queue")
    management.delete_exchange("rc ex")
    with pytest.raises(ValidationCodeException):
        management.queue_info("rc/queue")
    management.close()
    connection.close()
