"""Effects of one client on the others: the scenarios of `client_latency`.

A scenario is a generator: it prepares, yields once, and then does the work whose effect on others is measured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from bench.amqp_wire import Wire, methods_bytes, publish_bytes
from bench.client_latency_crowds import CROWD_SCENARIOS
from bench.client_latency_doors import DOOR_SCENARIOS
from bench.client_latency_links import LINK_SCENARIOS
from bench.client_latency_storms import STORM_SCENARIOS
from bench.client_latency_streams import STREAM_SCENARIOS
from bench.client_latency_target import SETUP_S, Target
from pika import spec

from basaltmq.http_client import HttpClient

BINDS: Final = 100_000
HEADERS_BINDINGS: Final = 3_000
QUEUES: Final = 10_000
BACKLOG: Final = 200_000
UNACKED: Final = 65_535
PERSISTENT: Final = 2


def _declare(wire: Wire, name: str, arguments: dict[str, Any] | None = None, *, durable: bool = True) -> None:
    method = spec.Queue.Declare(queue=name, durable=durable, arguments=arguments or {})
    wire.call(1, method, spec.Queue.DeclareOk)


def _queues(wire: Wire, count: int, *, durable: bool = True, exclusive: bool = False) -> None:
    step = 500
    for at in range(0, count, step):
        declares = [
            spec.Queue.Declare(queue=f"q{number:06}", durable=durable, exclusive=exclusive)
            for number in range(at, min(count, at + step))
        ]
        wire.write(methods_bytes(1, declares))
        wire.wait(spec.Queue.DeclareOk, len(declares))


def _fill(wire: Wire, queue: str, count: int, *, body: bytes = b"x" * 256, **properties: Any) -> None:
    """Publish with confirms, in windows."""
    wire.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
    publish = publish_bytes("", queue, body, delivery_mode=PERSISTENT, **properties)
    step = max(1, min(2000, (8 << 20) // len(publish)))
    for at in range(0, count, step):
        now = min(step, count - at)
        wire.write(publish * now)
        wire.wait_confirms(at + now)


def _in_background(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def binds(target: Target) -> Iterator[None]:
    """Pipelined binds of one durable queue."""
    with target.wire() as wire:
        _declare(wire, "q")
        data = methods_bytes(1, [spec.Queue.Bind(queue="q", exchange="amq.topic", routing_key=f"k.{n}", nowait=True)
                                 for n in range(BINDS)])  # fmt: skip
        yield
        wire.write(data)
        _declare(wire, "q")


def declares(target: Target) -> Iterator[None]:
    """Pipelined declares of durable queues."""
    with target.wire() as wire:
        yield
        _queues(wire, QUEUES)


def unbound_deletes(target: Target) -> Iterator[None]:
    """Pipelined deletes of durable queues."""
    with target.wire() as wire:
        _queues(wire, QUEUES)
        data = methods_bytes(1, [spec.Queue.Delete(queue=f"q{n:06}") for n in range(QUEUES)])
        yield
        wire.write(data)
        wire.wait(spec.Queue.DeleteOk, QUEUES)


def delete_bound(target: Target) -> Iterator[None]:
    """Delete a queue with 100,000 bindings."""
    with target.wire() as wire:
        _declare(wire, "q")
        wire.write(methods_bytes(1, [spec.Queue.Bind(queue="q", exchange="amq.topic", routing_key=f"k.{n}", nowait=True)
                                     for n in range(BINDS)]))  # fmt: skip
        _declare(wire, "q")
        yield
        wire.call(1, spec.Queue.Delete(queue="q"), spec.Queue.DeleteOk)


def headers(target: Target) -> Iterator[None]:
    """Publishes over 3,000 headers bindings."""
    with target.wire() as wire:
        _declare(wire, "q")
        for at in range(HEADERS_BINDINGS):
            match = "any" if at % 2 else "all"
            wire.send(1, spec.Queue.Bind(queue="q", exchange="amq.headers", routing_key="", nowait=True,
                                         arguments={"x-match": match, "n": at, "kind": "order"}))  # fmt: skip
        _declare(wire, "q")
        data = [publish_bytes("amq.headers", "", b"x", headers={"n": n, "id": n, "kind": "none"}) for n in range(1000)]
        yield
        wire.write(b"".join(data))
        _declare(wire, "q")


def topics(target: Target) -> Iterator[None]:
    """Publishes over patterns of many `#` words."""
    with target.wire() as wire:
        _declare(wire, "q")
        for n in range(2000):
            pattern = f"#.a.#.b.#.c{n}.#"
            wire.send(1, spec.Queue.Bind(queue="q", exchange="amq.topic", routing_key=pattern, nowait=True))
        _declare(wire, "q")
        data = [publish_bytes("amq.topic", f"{n}." + "a.b." * 20 + "z", b"x") for n in range(300)]
        yield
        wire.write(b"".join(data))
        _declare(wire, "q")


def fanout(target: Target) -> Iterator[None]:
    """Publishes to 1,000 queues each."""
    with target.wire() as wire:
        _queues(wire, 1000)
        wire.send(1, *[spec.Queue.Bind(queue=f"q{n:06}", exchange="amq.fanout", nowait=True) for n in range(1000)])
        _declare(wire, "q000000")
        data = publish_bytes("amq.fanout", "", b"x" * 1024, delivery_mode=PERSISTENT) * 200
        yield
        wire.write(data)
        _declare(wire, "q000000")


def small_flood(target: Target) -> Iterator[None]:
    """256 B publishes without confirms, on four connections."""
    wires = [target.wire() for _ in range(4)]
    for n, wire in enumerate(wires):
        _declare(wire, f"q{n}")
    yield

    def flood(wire: Wire, queue: str) -> None:
        data = publish_bytes("", queue, b"x" * 256, delivery_mode=PERSISTENT) * 5000
        for _ in range(20):
            wire.write(data)
        _declare(wire, queue)

    threads = [_in_background(lambda n=n, wire=wire: flood(wire, f"q{n}")) for n, wire in enumerate(wires)]  # type: ignore[misc]
    for thread in threads:
        thread.join(SETUP_S)
    for wire in wires:
        wire.close()


def _flood(target: Target, size: int, count: int) -> Iterator[None]:
    wires = [target.wire() for _ in range(2)]
    for n, wire in enumerate(wires):
        _declare(wire, f"q{n}")
    yield

    def flood(wire: Wire, queue: str) -> None:
        data = publish_bytes("", queue, b"x" * size, delivery_mode=PERSISTENT)
        for _ in range(count):
            wire.write(data)
        _declare(wire, queue)

    threads = [_in_background(lambda n=n, wire=wire: flood(wire, f"q{n}")) for n, wire in enumerate(wires)]  # type: ignore[misc]
    for thread in threads:
        thread.join(SETUP_S)
    for wire in wires:
        wire.close()


def bodies_100k(target: Target) -> Iterator[None]:
    """100 KB publishes without confirms, on two connections."""
    return _flood(target, 100_000, 3000)


def bodies_10m(target: Target) -> Iterator[None]:
    """10 MB publishes without confirms, on two connections."""
    return _flood(target, 10_000_000, 30)


def consume_10m(target: Target) -> Iterator[None]:
    """10 MB deliveries."""
    with target.wire() as wire:
        _declare(wire, "q")
        _fill(wire, "q", 30, body=b"x" * 10_000_000)
        yield
        wire.call(1, spec.Basic.Consume(queue="q", no_ack=True), spec.Basic.ConsumeOk)
        wire.wait_deliveries(30)


def drain(target: Target) -> Iterator[None]:
    """A consumer without acknowledgements drains 200,000 messages."""
    with target.wire() as wire:
        _declare(wire, "q")
        _fill(wire, "q", BACKLOG)
        yield
        wire.call(1, spec.Basic.Consume(queue="q", no_ack=True), spec.Basic.ConsumeOk)
        wire.wait_deliveries(BACKLOG)


def gets(target: Target) -> Iterator[None]:
    """Pipelined basic.get."""
    with target.wire() as wire:
        _declare(wire, "q")
        _fill(wire, "q", 30_000)
        data = methods_bytes(1, [spec.Basic.Get(queue="q", no_ack=True)]) * 30_000
        yield
        _in_background(lambda: wire.write(data))
        wire.wait(spec.Basic.GetOk, 30_000)


def purge(target: Target) -> Iterator[None]:
    with target.wire() as wire:
        _declare(wire, "q")
        _fill(wire, "q", BACKLOG)
        yield
        wire.call(1, spec.Queue.Purge(queue="q"), spec.Queue.PurgeOk)


def purge_transient(target: Target) -> Iterator[None]:
    with target.wire() as wire:
        _declare(wire, "q", durable=False)
        _fill(wire, "q", BACKLOG)
        yield
        wire.call(1, spec.Queue.Purge(queue="q"), spec.Queue.PurgeOk)


def purge_large(target: Target) -> Iterator[None]:
    """Bodies of 40 KB are stored apart."""
    with target.wire() as wire:
        _declare(wire, "q")
        _fill(wire, "q", 10_000, body=b"x" * 40_000)
        yield
        wire.call(1, spec.Queue.Purge(queue="q"), spec.Queue.PurgeOk)


def delete_full(target: Target) -> Iterator[None]:
    with target.wire() as wire:
        _declare(wire, "q")
        _fill(wire, "q", BACKLOG)
        yield
        wire.call(1, spec.Queue.Delete(queue="q"), spec.Queue.DeleteOk)


def _unacked(target: Target, **arguments: Any) -> Wire:
    wire = target.wire()
    _declare(wire, "q", arguments)
    _fill(wire, "q", UNACKED)
    wire.call(1, spec.Basic.Consume(queue="q"), spec.Basic.ConsumeOk)
    wire.wait_deliveries(UNACKED)
    return wire


def close_unacked(target: Target) -> Iterator[None]:
    """A connection with 65,535 unacknowledged messages is cut."""
    wire = _unacked(target)
    yield
    wire.close()
    time.sleep(2)


def nack_multiple(target: Target) -> Iterator[None]:
    with _unacked(target) as wire:
        wire.call(1, spec.Basic.Cancel("ctag1.0"), spec.Basic.CancelOk)
        yield
        wire.send(1, spec.Basic.Nack(0, multiple=True, requeue=True))
        _declare(wire, "q")


def reject_dead(target: Target) -> Iterator[None]:
    """65,535 messages are rejected at once into a dead-letter exchange."""
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    with _unacked(target, **arguments) as wire:
        _declare(wire, "dead")
        yield
        wire.send(1, spec.Basic.Nack(0, multiple=True, requeue=False))
        _declare(wire, "dead")


def ack_multiple(target: Target) -> Iterator[None]:
    with _unacked(target) as wire:
        yield
        wire.send(1, spec.Basic.Ack(0, multiple=True))
        _declare(wire, "q")


def recover(target: Target) -> Iterator[None]:
    with _unacked(target) as wire:
        yield
        wire.call(1, spec.Basic.Recover(requeue=True), spec.Basic.RecoverOk)
        wire.wait_deliveries(2 * UNACKED)


def tx_commit(target: Target) -> Iterator[None]:
    """A transaction of 10,000 publishes, which is the limit."""
    with target.wire() as wire:
        _declare(wire, "q")
        wire.call(1, spec.Tx.Select(), spec.Tx.SelectOk)
        wire.write(publish_bytes("", "q", b"x" * 256, delivery_mode=PERSISTENT) * 10_000)
        wire.call(1, spec.Basic.Qos(0, 1), spec.Basic.QosOk)
        yield
        wire.call(1, spec.Tx.Commit(), spec.Tx.CommitOk)


def channels(target: Target) -> Iterator[None]:
    """A connection with 2,000 channels and 10,000 consumers is cut."""
    wire = target.wire()
    _queues(wire, 1000)
    wire.write(b"".join(methods_bytes(n, [spec.Channel.Open()]) for n in range(2, 2001)))
    wire.wait(spec.Channel.OpenOk, 1999)
    for n in range(1, 2001):
        wire.send(n, *[spec.Basic.Consume(queue=f"q{(n * 5 + k) % 1000:06}") for k in range(5)])
    wire.wait(spec.Basic.ConsumeOk, 10_000)
    yield
    wire.close()
    time.sleep(2)


def exclusive(target: Target) -> Iterator[None]:
    """A connection with 5,000 exclusive queues is cut."""
    wire = target.wire()
    _queues(wire, 5000, durable=False, exclusive=True)
    yield
    wire.close()
    time.sleep(3)


def expiry(target: Target) -> Iterator[None]:
    """200,000 messages expire at once."""
    with target.wire() as wire:
        _declare(wire, "q", {"x-message-ttl": 3_600_000})
        _fill(wire, "q", BACKLOG)
        api = target.api()
        yield
        api.put("/api/policies/%2F/ttl", {"pattern": "q", "definition": {"message-ttl": 1}, "apply-to": "queues"})
        time.sleep(5)


def expiry_dead(target: Target) -> Iterator[None]:
    """100,000 messages expire at once into a dead-letter exchange."""
    with target.wire() as wire:
        _declare(wire, "dead")
        _declare(wire, "q", {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
        began = time.monotonic()
        _fill(wire, "q", 100_000, expiration="20000")
        time.sleep(max(0.0, 19.0 - (time.monotonic() - began)))
        yield
        while target.api().get("/api/queues/%2F/dead")["messages_ready"] < 100_000:
            time.sleep(0.3)


def length_limit(target: Target) -> Iterator[None]:
    """A policy limits a queue of 200,000 messages to 10."""
    with target.wire() as wire:
        _declare(wire, "q")
        _fill(wire, "q", BACKLOG)
        yield
        definition = {"max-length": 10}
        target.api().put("/api/policies/%2F/short", {"pattern": "q", "definition": definition, "apply-to": "queues"})
        time.sleep(3)


def _with_queues(target: Target) -> HttpClient:
    with target.wire() as wire:
        _queues(wire, QUEUES)
        wire.send(1, *[spec.Queue.Bind(queue=f"q{n:06}", exchange="amq.topic", routing_key=f"k.{n}", nowait=True)
                       for n in range(QUEUES)])  # fmt: skip
        _declare(wire, "q000000")
    return target.api()


def list_queues(target: Target) -> Iterator[None]:
    api = _with_queues(target)
    yield
    for _ in range(3):
        api.get("/api/queues")


def list_sorted(target: Target) -> Iterator[None]:
    api = _with_queues(target)
    yield
    api.get("/api/queues", sort="messages", page=1, page_size=100)


def list_others(target: Target) -> Iterator[None]:
    """Bindings, overview, metrics, definitions."""
    api = _with_queues(target)
    yield
    for where in ("/api/bindings", "/api/overview", "/api/definitions", "/api/exchanges/%2F/amq.topic/bindings/source"):
        api.get(where)


def import_definitions(target: Target) -> Iterator[None]:
    queues = [{"name": f"i{n}", "vhost": "/", "durable": True, "auto_delete": False, "arguments": {}}
              for n in range(QUEUES)]  # fmt: skip
    yield
    target.api().post("/api/definitions", {"queues": queues}, long=True)


def policy(target: Target) -> Iterator[None]:
    """A policy takes effect on 10,000 queues."""
    api = _with_queues(target)
    yield
    api.put("/api/policies/%2F/all", {"pattern": "", "definition": {"max-length": 1000}, "apply-to": "queues"})
    time.sleep(1)


def delete_vhost(target: Target) -> Iterator[None]:
    api = target.api()
    api.put("/api/vhosts/doomed")
    with target.wire("doomed") as wire:
        _queues(wire, QUEUES)
    yield
    api.delete("/api/vhosts/doomed")
    time.sleep(1)


SCENARIOS: Final[dict[str, Callable[[Target], Iterator[None]]]] = {
    each.__name__: each
    for each in (
        binds, declares, unbound_deletes, delete_bound, headers, topics, fanout, small_flood, bodies_100k, bodies_10m,
        consume_10m, drain, gets, purge, purge_transient, purge_large, delete_full, close_unacked,
        nack_multiple, reject_dead, ack_multiple, recover, tx_commit, channels, exclusive, expiry, expiry_dead,
        length_limit, list_queues, list_sorted, list_others, import_definitions, policy, delete_vhost,
    )
} | STORM_SCENARIOS | STREAM_SCENARIOS | CROWD_SCENARIOS | LINK_SCENARIOS | DOOR_SCENARIOS  # fmt: skip
