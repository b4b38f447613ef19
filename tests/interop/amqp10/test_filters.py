"""Filters of links that receive: selectors, property filters, no-local; and browsing."""

from __future__ import annotations

from itertools import count
from typing import Any

import pika
import pytest
from proton import Described, Message, symbol
from proton.reactor import Copy, Filter, Selector
from proton.utils import BlockingConnection, LinkDetached
from tests.interop.amqp10.raw import raw_client
from tests.interop.amqp10.test_protocol import declare, depth, fill, receive
from tests.interop.amqp10.test_proton import connect, texts
from tests.interop.server import Broker

from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire import types as t

NUMBERS = count()
SELECTOR = t.Symbol("apache.org:selector-filter:string")


def receiver(client: BlockingConnection, address: str, **options: Any) -> Any:
    return client.create_receiver(address, name=f"link-{next(NUMBERS)}", **options)


def send(client: BlockingConnection, address: str, *messages: Message) -> None:
    sender = client.create_sender(address, name=f"link-{next(NUMBERS)}")
    for message in messages:
        sender.send(message)
    sender.close()


def colored(number: int, color: str) -> Message:
    return Message(
        body=b"%d" % number, inferred=True, properties={"color": color, "number": number}, priority=number % 10
    )


def selected(text: str) -> dict[Any, Any]:
    return {t.Symbol("s"): t.Described(SELECTOR, text)}


@pytest.mark.spec("G2")
def test_a_selector_takes_matching_messages_and_leaves_the_others(broker: Broker) -> None:
    declare(broker, "f-colors")
    client = connect(broker)
    send(client, "/queues/f-colors", *[colored(number, "red" if number % 3 else "blue") for number in range(9)])
    blue = receiver(client, "/queues/f-colors", options=Selector("color = 'blue'"), credit=10)
    assert texts(blue, 3) == ["0", "3", "6"]
    send(client, "/queues/f-colors", colored(9, "blue"))
    assert texts(blue, 1) == ["9"]
    high = receiver(client, "/queues/f-colors", options=Selector("number > 6 AND JMSPriority <= 8"), credit=10)
    assert texts(high, 2) == ["7", "8"]
    assert texts(receiver(client, "/queues/f-colors", credit=10), 4) == ["1", "2", "4", "5"]
    client.close()
    assert depth(broker, "f-colors") == 0


@pytest.mark.spec("G2")
def test_messages_that_return_are_selected_again(broker: Broker) -> None:
    declare(broker, "f-return")
    client = connect(broker)
    send(client, "/queues/f-return", *[colored(number, "red") for number in range(4)])
    first = receiver(client, "/queues/f-return", options=Selector("color = 'red'"), credit=2)
    second = receiver(client, "/queues/f-return", options=Selector("number < 2 OR number > 2"), credit=0)
    assert bytes(first.receive(timeout=30).body) == b"0"
    first.release(delivered=False)
    # The released message is read again, and so is the one that the closed link held.
    first.close()
    second.link.flow(10)
    assert texts(second, 3) == ["0", "1", "3"]
    client.close()
    assert depth(broker, "f-return") == 1


@pytest.mark.spec("G2")
def test_a_long_queue_without_matches_is_read_once(broker: Broker) -> None:
    address = declare(broker, "f-long")
    with raw_client(broker.port()) as client:
        client.open()
        fill(client, address, 900)
        client.attach_receiver(1, address, source=p.Source(address=address, filter=selected("number = 1")))
        client.credit(1, 10, drain=True)
        # The drain ends after the whole queue was read.
        while (flow := client.take(p.Flow)).link_credit != 0 or not flow.drain:
            pass
        assert flow.delivery_count == 10
        sender = connect(broker)
        send(sender, address, colored(1, "x"))
        sender.close()
        client.credit(1, 5, delivery_count=10)
        receive(client, 1)
        client.send(p.Disposition(role=True, first=0, settled=True, state=p.Accepted()))
        client.is_alive()
    assert depth(broker, "f-long") == 900


@pytest.mark.spec("G2")
def test_only_applied_filters_are_echoed_and_bad_ones_refused(broker: Broker) -> None:
    address = declare(broker, "f-echo")
    with raw_client(broker.port()) as client:
        client.open()
        unknown = {t.Symbol("u"): t.Described(t.Symbol("example:unknown"), "x")}
        source = p.Source(address=address, filter={**selected("a = 1"), **unknown})
        answer = client.attach_receiver(1, address, source=source)
        assert list(answer.source.filter) == ["s"]
        assert (
            client.attach_receiver(2, address, source=p.Source(address=address, filter=unknown)).source.filter is None
        )
        for number, bad in enumerate(["a = ", 5, "a LIKE 'x!' ESCAPE '!'"]):
            source = p.Source(address=address, filter={t.Symbol("s"): t.Described(SELECTOR, bad)})
            client.attach_receiver(3 + number, address, source=source)
            assert client.error(p.Detach) == "amqp:invalid-field"
            client.send(p.Detach(handle=3 + number, closed=True))
        client.is_alive()


@pytest.mark.spec("G2")
def test_property_filters(broker: Broker) -> None:
    declare(broker, "f-props")
    client = connect(broker)
    for number in range(4):
        message = colored(number, f"col-{number}")
        message.subject = f"order.{number % 2}"
        send(client, "/queues/f-props", message)

    def filtered(name: str, **fields: Any) -> Filter:
        content = {symbol(key.replace("_", "-")): value for key, value in fields.items()}
        return Filter({symbol("f"): Described(symbol(name), content)})

    odd = receiver(
        client,
        "/queues/f-props",
        options=filtered("amqp:properties-filter", subject="&s:.1", message_id=None),
        credit=10,
    )
    assert texts(odd, 2) == ["1", "3"]
    prefix = receiver(
        client,
        "/queues/f-props",
        options=filtered("amqp:application-properties-filter", color="&p:col-", number=2),
        credit=10,
    )
    assert texts(prefix, 1) == ["2"]
    with pytest.raises(LinkDetached, match="amqp:invalid-field"):
        receiver(client, "/queues/f-props", options=filtered("amqp:properties-filter", nonsense="x"))
    client.close()
    assert depth(broker, "f-props") == 1


@pytest.mark.spec("G2")
def test_a_browser_sees_all_messages_and_takes_none(broker: Broker) -> None:
    declare(broker, "f-browse")
    client = connect(broker)
    send(client, "/queues/f-browse", *[colored(number, "red" if number % 2 else "blue") for number in range(300)])
    large = Message(body=b"x" * 300_000, inferred=True, properties={"color": "red"})
    send(client, "/queues/f-browse", large)
    browser = receiver(client, "/queues/f-browse", options=Copy(), credit=50)
    assert texts(browser, 301) == [*[str(number) for number in range(300)], "x" * 300_000]
    both = receiver(client, "/queues/f-browse", options=[Copy(), Selector("color = 'red'")], credit=10)
    assert texts(both, 151)[-2:] == ["299", "x" * 300_000]
    send(client, "/queues/f-browse", colored(300, "red"))
    assert texts(browser, 1) == texts(both, 1) == ["300"]
    client.close()
    assert depth(broker, "f-browse") == 302


@pytest.mark.spec("G2")
def test_a_subscription_drops_what_its_filter_does_not_accept(broker: Broker) -> None:
    declare(broker, "f-sub")
    client = connect(broker)
    wanted = receiver(client, "/exchanges/amq.topic/f.sub", options=Selector("color = 'red'"), credit=2)
    send(
        client,
        "/exchanges/amq.topic/f.sub",
        *[colored(number, "red" if number % 5 == 0 else "b") for number in range(20)],
    )
    assert texts(wanted, 4) == ["0", "5", "10", "15"]
    # The others did not stay: 16 to 19 are gone with the next acknowledgement.
    send(client, "/exchanges/amq.topic/f.sub", colored(20, "red"))
    assert texts(wanted, 1) == ["20"]
    # The answer to another link follows the acknowledgement.
    send(client, "/queues/f-sub")
    waiting = [q["messages"] for q in broker.call("GET", "/api/queues/%2F") if q["name"].startswith("amq.gen-")]
    assert waiting == [0]
    client.close()


@pytest.mark.spec("G2")
def test_no_local_leaves_out_what_the_same_container_has_sent(broker: Broker) -> None:
    client, other = connect(broker), connect(broker)
    no_local = Filter({symbol("no-local"): Described(symbol("apache.org:no-local-filter:list"), [])})
    wanted = receiver(client, "/exchanges/amq.topic/f.local", options=no_local, credit=10)
    send(client, "/exchanges/amq.topic/f.local", Message(body=b"own", inferred=True))
    send(other, "/exchanges/amq.topic/f.local", Message(body=b"other", inferred=True))
    assert texts(wanted, 1) == ["other"]
    client.close()
    other.close()


@pytest.mark.spec("G2")
def test_selectors_see_messages_of_other_protocols_and_of_streams(broker: Broker) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(broker.url()))
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("f-0-9-1", durable=True)
    channel.queue_declare("f-stream", durable=True, arguments={"x-queue-type": "stream"})
    for number in range(6):
        about = pika.BasicProperties(
            headers={"color": "red" if number % 2 else "blue", "size": number}, correlation_id=f"c{number}"
        )
        for queue in ("f-0-9-1", "f-stream"):
            channel.basic_publish("", queue, b"%d" % number, about)
    connection.close()
    client = connect(broker)
    red = receiver(client, "f-0-9-1", options=Selector("color = 'red' AND JMSCorrelationID <> 'c3'"), credit=10)
    assert texts(red, 2) == ["1", "5"]
    first = Described(symbol("rabbitmq:stream-offset-spec"), "first")
    selector = Described(symbol("amqp:sql-filter"), "size > 3 OR p.correlation_id = 'c0'")
    options = Filter({symbol("o"): first, symbol("s"): selector})
    assert texts(receiver(client, "f-stream", options=options, credit=10), 3) == ["0", "4", "5"]
    client.close()


@pytest.mark.spec("G2")
def test_a_stream_is_filtered_by_the_values_of_its_publishers(broker: Broker) -> None:
    broker.call("PUT", "/api/queues/%2F/f-values", {"durable": True, "arguments": {"x-queue-type": "stream"}})
    client = connect(broker)
    for number in range(9):
        message = Message(body=b"%d" % number, inferred=True)
        if number % 3:
            message.annotations = {symbol("x-stream-filter-value"): f"v{number % 3}"}
        send(client, "/queues/f-values", message)

    def read(count: int, wanted: Any, unfiltered: bool | None = None) -> list[str]:
        chosen = {symbol("rabbitmq:stream-filter"): wanted, symbol("rabbitmq:stream-offset-spec"): "first"}
        if unfiltered is not None:
            chosen[symbol("rabbitmq:stream-match-unfiltered")] = unfiltered
        options = Filter({name: Described(name, value) for name, value in chosen.items()})
        return texts(receiver(client, "/queues/f-values", options=options, credit=10), count)

    assert read(3, "v1") == ["1", "4", "7"]
    assert read(6, ["v1", "v2"], unfiltered=False) == ["1", "2", "4", "5", "7", "8"]
    assert read(6, "v2", unfiltered=True) == ["0", "2", "3", "5", "6", "8"]
    with pytest.raises(LinkDetached, match="amqp:invalid-field"):
        read(1, 5)
    client.close()
