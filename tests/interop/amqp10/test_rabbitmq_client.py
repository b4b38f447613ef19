"""RabbitMQ's Python client for AMQP 1.0: management over AMQP, publishers, consumers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from rabbitmq_amqp_python_client import (
    AddressHelper,
    ClassicQueueSpecification,
    Converter,
    Environment,
    ExchangeCustomSpecification,
    ExchangeSpecification,
    ExchangeToExchangeBindingSpecification,
    ExchangeToQueueBindingSpecification,
    ExchangeType,
    Message,
    OutcomeState,
    QuorumQueueSpecification,
    StreamSpecification,
    ValidationCodeException,
)
from rabbitmq_amqp_python_client.qpid.proton._utils import SendException
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


@pytest.mark.spec("G2")
def test_management_answers_with_the_codes_that_clients_expect(environment: Any) -> None:
    connection = environment.connection()
    connection.dial()
    management = connection.management()
    management.declare_queue(ClassicQueueSpecification(name="rc-codes", max_len=5))
    management.declare_queue(ClassicQueueSpecification(name="rc-codes", max_len=5))
    with pytest.raises(ValidationCodeException, match="ErrPreconditionFailed"):
        management.declare_queue(StreamSpecification(name="rc-codes"))
    management.declare_exchange(ExchangeSpecification(name="rc-topic", exchange_type=ExchangeType.topic))
    management.declare_exchange(
        ExchangeCustomSpecification(
            name="rc-custom", exchange_type="fanout", arguments={"alternate-exchange": "rc-topic"}
        )
    )
    with pytest.raises(ValidationCodeException, match="ErrPreconditionFailed"):
        management.declare_exchange(ExchangeSpecification(name="rc-topic", exchange_type=ExchangeType.direct))
    between = ExchangeToExchangeBindingSpecification(
        source_exchange="rc-topic", destination_exchange="rc-custom", binding_key="a.#"
    )
    management.bind(between)
    management.bind(between)
    to_queue = ExchangeToQueueBindingSpecification(source_exchange="rc-custom", destination_queue="rc-codes")
    management.bind(to_queue)
    publisher = connection.publisher(AddressHelper.exchange_address("rc-topic", "a.b"))
    assert publisher.publish(Message(body=b"x")).remote_state == OutcomeState.ACCEPTED
    # The path that the client makes of the binding names a queue.
    management.unbind("/bindings/src=rc-topic;dste=rc-custom;key=a.%23;args=")
    with pytest.raises(SendException, match="38"):  # the descriptor of released
        publisher.publish(Message(body=b"x"))
    publisher.close()
    assert management.queue_info("rc-codes").message_count == 1
    steps: Any = (
        (lambda: management.queue_info("rc-none"), "404"),
        (lambda: management.purge_queue("rc-none"), "404"),
        (lambda: management.bind(ExchangeToQueueBindingSpecification("rc-none", "rc-codes")), "404"),
        (lambda: management.delete_exchange("amq.topic"), "403"),
    )
    for step, code in steps:
        with pytest.raises(ValidationCodeException, match=code):
            step()
    # Deleting is idempotent.
    for _ in range(2):
        management.unbind(to_queue)
        management.delete_queue("rc-codes")
        management.delete_exchange("rc-custom")
        management.delete_exchange("rc-topic")
    management.close()
    connection.close()
