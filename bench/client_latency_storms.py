"""Effects of AMQP and admin clients on other clients: storms of small requests, and very large objects."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from bench.amqp_wire import Wire, methods_bytes, publish_bytes
from bench.client_latency_target import Target
from pika import spec

CHANNELS: Final = 2_000
OPENS: Final = 20_000
GETS: Final = 100_000
STORM: Final = 20_000
BINDINGS: Final = 100_000
QUEUES: Final = 50_000
OBJECTS: Final = 10_000
UNACKED: Final = 100_000
TX: Final = 500
VHOSTS: Final = 20
PERSISTENT: Final = 2
STEP: Final = 500


def _declare(wire: Wire, name: str) -> None:
    wire.call(1, spec.Queue.Declare(queue=name, durable=True), spec.Queue.DeclareOk)


def _pipelined(wire: Wire, methods: list[Any], answer: Any, step: int = STEP) -> None:
    for at in range(0, len(methods), step):
        now = methods[at : at + step]
        wire.write(methods_bytes(1, now))
        wire.wait(answer, len(now))


def _queues(wire: Wire, count: int) -> None:
    _pipelined(wire, [spec.Queue.Declare(queue=f"q{n:06}", durable=True) for n in range(count)], spec.Queue.DeclareOk)


def channel_opens(target: Target) -> Iterator[None]:
    """One connection opens 2,000 channels, then opens and closes one 20,000 times, all pipelined."""
    with target.wire() as wire:
        opens = b"".join(methods_bytes(n, [spec.Channel.Open()]) for n in range(2, CHANNELS))
        churn = methods_bytes(CHANNELS, [spec.Channel.Open(), spec.Channel.Close(0, "", 0, 0)]) * OPENS
        yield
        wire.write(opens + churn)
        wire.wait(spec.Channel.CloseOk, OPENS)


def empty_gets(target: Target) -> Iterator[None]:
    """100,000 pipelined basic.get of an empty queue."""
    with target.wire() as wire:
        _declare(wire, "q")
        data = methods_bytes(1, [spec.Basic.Get(queue="q", no_ack=True)]) * STEP
        yield
        for _ in range(GETS // STEP):
            wire.write(data)
            wire.wait(spec.Basic.GetEmpty, STEP)


def large_headers(target: Target) -> Iterator[None]:
    """200 publishes with a header table of 100 KB each, to a headers exchange and to a dead-letter exchange."""
    with target.wire() as wire:
        _declare(wire, "q")
        for n in range(500):
            wire.send(1, spec.Queue.Bind(queue="q", exchange="amq.headers", routing_key="", nowait=True,
                                         arguments={"x-match": "all", f"h{n}": n}))  # fmt: skip
        _declare(wire, "q")
        table = {f"h{n:05}": n for n in range(7_000)}
        nested: dict[str, Any] = {"leaf": "x" * 100}
        for _ in range(20):
            nested = {"n": nested, "l": list(range(300))}
        data = publish_bytes("amq.headers", "", b"x", headers=table, delivery_mode=PERSISTENT)
        deep = publish_bytes("amq.headers", "", b"x", headers=nested, delivery_mode=PERSISTENT)
        yield
        wire.write(data * 200 + deep * 200)
        _declare(wire, "q")


def consumer_storm(target: Target) -> Iterator[None]:
    """20,000 consumers are added to a full queue and cancelled at once."""
    with target.wire() as wire:
        _declare(wire, "q")
        wire.write(publish_bytes("", "q", b"x" * 256, delivery_mode=PERSISTENT) * 10_000)
        wire.call(1, spec.Basic.Qos(0, 10), spec.Basic.QosOk)
        both = [[spec.Basic.Consume(queue="q", consumer_tag=f"c{n}"), spec.Basic.Cancel(f"c{n}")] for n in range(STORM)]
        yield
        for at in range(0, STORM, STEP):
            wire.write(methods_bytes(1, [each for pair in both[at : at + STEP] for each in pair]))
            wire.wait(spec.Basic.CancelOk, STEP)


def many_consumers(target: Target) -> Iterator[None]:
    """10,000 consumers of one queue, a flood of messages to it, then the connection is cut."""
    wire = target.wire()
    _declare(wire, "q")
    _pipelined(wire, [spec.Basic.Consume(queue="q", consumer_tag=f"c{n}") for n in range(10_000)], spec.Basic.ConsumeOk)
    yield
    with target.wire() as other:
        other.write(publish_bytes("", "q", b"x" * 256, delivery_mode=PERSISTENT) * 20_000)
        wire.wait_deliveries(20_000)
    wire.close()
    time.sleep(2)


def exchange_storm(target: Target) -> Iterator[None]:
    """20,000 exchanges and queues are declared, bound and deleted, pipelined."""
    with target.wire() as wire:
        yield
        for at in range(0, STORM, STEP):
            names = [f"e{n}" for n in range(at, at + STEP)]
            methods: list[Any] = [spec.Exchange.Declare(exchange=e, type="topic", durable=True) for e in names]
            methods += [spec.Queue.Declare(queue=e, durable=True) for e in names]
            methods += [spec.Queue.Bind(queue=e, exchange=e, routing_key="#") for e in names]
            methods += [spec.Exchange.Delete(exchange=e) for e in names]
            methods += [spec.Queue.Delete(queue=e) for e in names]
            wire.write(methods_bytes(1, methods))
            wire.wait(spec.Queue.DeleteOk, STEP)


def tx_fan_out(target: Target) -> Iterator[None]:
    """A transaction of 500 publishes to 20 queues each, which is the limit."""
    with target.wire() as wire:
        _queues(wire, 20)
        wire.send(1, *[spec.Queue.Bind(queue=f"q{n:06}", exchange="amq.fanout", nowait=True) for n in range(20)])
        wire.call(1, spec.Tx.Select(), spec.Tx.SelectOk)
        wire.write(publish_bytes("amq.fanout", "", b"x" * 256, delivery_mode=PERSISTENT) * TX)
        wire.call(1, spec.Basic.Qos(0, 1), spec.Basic.QosOk)
        yield
        wire.call(1, spec.Tx.Commit(), spec.Tx.CommitOk)


def tx_acks(target: Target) -> Iterator[None]:
    """A transaction acknowledges 50,000 messages, then another one rolls back."""
    with target.wire() as wire:
        _declare(wire, "q")
        wire.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
        for at in range(0, 50_000, 2000):
            wire.write(publish_bytes("", "q", b"x" * 256, delivery_mode=PERSISTENT) * 2000)
            wire.wait_confirms(at + 2000)
        wire.call(2, spec.Channel.Open(), spec.Channel.OpenOk)
        wire.call(2, spec.Tx.Select(), spec.Tx.SelectOk)
        wire.call(2, spec.Basic.Consume(queue="q"), spec.Basic.ConsumeOk)
        wire.wait_deliveries(50_000)
        yield
        wire.send(2, spec.Basic.Ack(0, multiple=True))
        wire.call(2, spec.Tx.Rollback(), spec.Tx.RollbackOk)
        wire.send(2, spec.Basic.Ack(0, multiple=True))
        wire.call(2, spec.Tx.Commit(), spec.Tx.CommitOk)


def close_unacked_100k(target: Target) -> Iterator[None]:
    """A connection with 100,000 unacknowledged messages on two channels of two queues is cut."""
    wire = target.wire()
    wire.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
    wire.call(2, spec.Channel.Open(), spec.Channel.OpenOk)
    for n in (1, 2):
        _declare(wire, f"q{n}")
        for at in range(0, UNACKED // 2, 2000):
            wire.write(publish_bytes("", f"q{n}", b"x" * 256, delivery_mode=PERSISTENT) * 2000)
            wire.wait_confirms((n - 1) * (UNACKED // 2) + at + 2000)
    for n in (1, 2):
        wire.call(n, spec.Basic.Consume(queue=f"q{n}"), spec.Basic.ConsumeOk)
    wire.wait_deliveries(UNACKED)
    yield
    wire.close()
    time.sleep(3)


def topic_bindings(target: Target) -> Iterator[None]:
    """Publishes over a topic exchange with 100,000 bindings, each followed by a bind that empties the route cache."""
    with target.wire() as wire:
        _declare(wire, "q")
        for at in range(0, BINDINGS, 5000):
            keys = [f"*.{n % 300}.#.{n}" for n in range(at, at + 5000)]
            wire.send(
                1, *[spec.Queue.Bind(queue="q", exchange="amq.topic", routing_key=key, nowait=True) for key in keys]
            )
            _declare(wire, "q")
        data = [publish_bytes("amq.topic", f"a.{n % 300}.b.c.d.{n}", b"x") for n in range(5000)]
        more = [methods_bytes(1, [spec.Queue.Bind(queue="q", exchange="amq.topic", routing_key=f"z.{n}", nowait=True)])
                 for n in range(5000)]  # fmt: skip
        yield
        wire.write(b"".join(data))
        _declare(wire, "q")
        wire.write(b"".join(each for pair in zip(data, more, strict=True) for each in pair))
        _declare(wire, "q")


def policy_50k(target: Target) -> Iterator[None]:
    """A policy takes effect on 50,000 queues and is deleted; metrics, overview and a page of queues are read."""
    with target.wire() as wire:
        _queues(wire, QUEUES)
    api = target.api()
    yield
    api.put("/api/policies/%2F/all", {"pattern": "", "definition": {"max-length": 1000}, "apply-to": "queues"})
    time.sleep(3)
    api.delete("/api/policies/%2F/all")
    time.sleep(3)


def scrape_50k(target: Target) -> Iterator[None]:
    """Metrics of 50,000 queues, per object and in total; overview; a page sorted by messages."""
    with target.wire() as wire:
        _queues(wire, QUEUES)
    yield
    for path in ("/metrics", "/metrics/per-object"):
        target.text(path)
    target.api().get("/api/overview")
    target.api().get("/api/queues", sort="messages", page=1, page_size=100)
    target.api().get("/api/queues", name="q0499", page=1, page_size=100)


def import_objects(target: Target) -> Iterator[None]:
    """Import of 10,000 queues, exchanges, bindings, users and policies."""
    queues = [{"name": f"i{n}", "vhost": "/", "durable": True, "auto_delete": False, "arguments": {}}
              for n in range(OBJECTS)]  # fmt: skip
    exchanges = [{"name": f"x{n}", "vhost": "/", "type": "topic", "durable": True, "auto_delete": False,
                  "internal": False, "arguments": {}} for n in range(OBJECTS)]  # fmt: skip
    bindings = [{"source": f"x{n}", "vhost": "/", "destination": f"i{n}", "destination_type": "queue",
                 "routing_key": "#", "arguments": {}} for n in range(OBJECTS)]  # fmt: skip
    policies = [{"vhost": "/", "name": f"p{n}", "pattern": f"^i{n}$", "apply-to": "queues",
                 "definition": {"max-length": 10}, "priority": 0} for n in range(100)]  # fmt: skip
    yield
    body = {"queues": queues, "exchanges": exchanges, "bindings": bindings, "policies": policies}
    target.api().post("/api/definitions", body, long=True)


def vhost_churn(target: Target) -> Iterator[None]:
    """20 virtual hosts are created, used and deleted."""
    api = target.api()
    yield
    for n in range(VHOSTS):
        api.put(f"/api/vhosts/v{n}")
        with target.wire(f"v{n}") as wire:
            _queues(wire, 20)
    for n in range(VHOSTS):
        api.delete(f"/api/vhosts/v{n}")


STORM_SCENARIOS: Final[dict[str, Callable[[Target], Iterator[None]]]] = {
    each.__name__: each
    for each in (
        channel_opens, empty_gets, large_headers, consumer_storm, many_consumers, exchange_storm, tx_fan_out, tx_acks,
        close_unacked_100k, topic_bindings, policy_50k, scrape_50k, import_objects, vhost_churn,
    )
}  # fmt: skip
