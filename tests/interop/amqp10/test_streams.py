"""Where a stream is read from: all forms of `rabbitmq:stream-offset-spec`."""

from __future__ import annotations

import time
from typing import Any

import pytest
from proton import Message, symbol, timestamp
from proton.reactor import Filter
from proton.utils import LinkDetached
from tests.interop.amqp10.test_filters import receiver, send
from tests.interop.amqp10.test_proton import connect, described, texts
from tests.interop.server import Broker

SPEC = "rabbitmq:stream-offset-spec"


def at(spec: Any) -> Filter:
    return Filter({symbol(SPEC): described(SPEC, spec)})


@pytest.mark.spec("G2")
def test_a_stream_is_read_from_any_form_of_an_offset(broker: Broker) -> None:
    broker.call("PUT", "/api/queues/%2F/s-forms", {"durable": True, "arguments": {"x-queue-type": "stream"}})
    address = "/queues/s-forms"
    client, other = connect(broker), connect(broker)
    send(other, address, *[Message(body=b"old-%d" % number, inferred=True) for number in range(3)])
    following = receiver(client, address, options=at("next"), credit=10)
    without = receiver(client, address, credit=10)
    time.sleep(0.1)
    middle_ms = int(time.time() * 1000)
    time.sleep(1.1)  # Times of streams have whole seconds.
    send(other, address, *[Message(body=b"new-%d" % number, inferred=True) for number in range(3)])
    new, old = [f"new-{number}" for number in range(3)], [f"old-{number}" for number in range(3)]
    assert texts(following, 3) == texts(without, 3) == new
    for spec, wanted in (
        ("first", old + new),
        (4, new[1:]),
        (timestamp(0), old + new),
        (timestamp(middle_ms + 1000), new),
        ("1h", old + new),
        ("7D", old + new),
    ):
        link = receiver(client, address, options=at(spec), credit=10)
        assert texts(link, len(wanted))[-len(new) :] == wanted[-len(new) :], spec
        link.close()
    for bad in ("sometime", -1, 1.5, True):
        with pytest.raises(LinkDetached, match=r"amqp:(invalid-field|precondition-failed)"):
            receiver(client, address, options=at(bad), credit=1)
    client.close()
    other.close()
