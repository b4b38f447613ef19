"""The probe of `client_latency`: a process whose clients send small requests and measure how long they wait.

One thread per client, each with a connection of its own:

    loop     basic.qos, which needs the event loop only
    answer   a transient publish and its confirm, then a basic.get: no fsync
    synced   a persistent publish and its confirm, which waits for an fsync
    kafka    a Produce with acks=1 and a Fetch of its record: no fsync
    grpc     an Enqueue, which waits for an fsync
    admin    GET of one queue
    disk     an fdatasync of a file on the same disk, without the broker

Kafka and gRPC serve one virtual host, `/`, which is also the aggressor's.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from bench.amqp_wire import Wire, publish_bytes
from bench.client_latency_target import Target
from pika import spec
from tests.log_frames import encode_plain

from basaltmq.client import AsyncClient
from basaltmq.log.batches.record import Record
from basaltmq.protocols.kafka.wire import api as k

PAUSE_S: Final = 0.002
SLOW_PAUSE_S: Final = 0.02
"""Pause between requests that cost an fsync or more than a millisecond of the broker."""

BODY: Final = b"x" * 256
CLIENT_S: Final = 120.0
PRODUCE_VERSION: Final = 3
FETCH_VERSION: Final = 4
ALL_VERSION: Final = 2
PARTITION_BYTES_MAX: Final = 1 << 16

Ask = Callable[[], Any]


class Waits(NamedTuple):
    """Waits in milliseconds, by client."""

    loop: list[float]
    answer: list[float]
    synced: list[float]
    kafka: list[float]
    grpc: list[float]
    admin: list[float]
    disk: list[float]
    elapsed: list[float]
    """Waits of all clients, with the time that other processes took."""


def probe(target: Target, vhost: str, pid: int, folder: str, pipe: Connection) -> None:
    """Send requests until the pipe receives something, then send the waits to it."""
    ending = threading.Event()
    waits = Waits([], [], [], [], [], [], [], [])
    clients = [
        (waits.loop, PAUSE_S, lambda: _loop(target, vhost)),
        (waits.answer, PAUSE_S, lambda: _answer(target, vhost)),
        (waits.synced, SLOW_PAUSE_S, lambda: _synced(target, vhost)),
        (waits.kafka, SLOW_PAUSE_S, lambda: _kafka(target)),
        (waits.grpc, SLOW_PAUSE_S, lambda: _grpc(target)),
        (waits.admin, SLOW_PAUSE_S, lambda: _admin(target, vhost)),
        (waits.disk, SLOW_PAUSE_S, lambda: _disk(folder)),
    ]
    ready = threading.Barrier(len(clients) + 1)
    threads = [
        threading.Thread(target=_run, args=(ready, ending, pid, waits.elapsed, *each), daemon=True) for each in clients
    ]
    for thread in threads:
        thread.start()
    ready.wait(CLIENT_S)
    pipe.send(None)
    pipe.recv()
    ending.set()
    for thread in threads:
        thread.join(CLIENT_S)
    pipe.send(tuple(waits))


def _run(
    ready: threading.Barrier,
    ending: threading.Event,
    pid: int,
    elapsed: list[float],
    waits: list[float],
    pause_s: float,
    connect: Callable[[], Ask],
) -> None:
    ask = connect()
    ask()
    ready.wait(CLIENT_S)
    here, there = Path("/proc/thread-self/schedstat"), Path(f"/proc/{pid}/task/{pid}/schedstat")
    while not ending.is_set():
        began_late_ms = _late_ms(here) + _late_ms(there)
        began = time.perf_counter()
        ask()
        took_ms = (time.perf_counter() - began) * 1000
        waits.append(max(0.0, took_ms - (_late_ms(here) + _late_ms(there) - began_late_ms)))
        elapsed.append(took_ms)
        time.sleep(pause_s)


def _late_ms(schedstat: Path) -> float:
    """Time that a thread was ready to run and did not."""
    return int(schedstat.read_text().split()[1]) / 1e6


def _loop(target: Target, vhost: str) -> Ask:
    wire = target.wire(vhost)
    return lambda: wire.call(1, spec.Basic.Qos(0, 1), spec.Basic.QosOk)


def _confirming(target: Target, vhost: str, queue: str, *, durable: bool) -> Wire:
    wire = target.wire(vhost)
    wire.call(1, spec.Queue.Declare(queue=queue, durable=durable), spec.Queue.DeclareOk)
    wire.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
    return wire


def _answer(target: Target, vhost: str) -> Ask:
    wire = _confirming(target, vhost, "transient", durable=False)
    publish = publish_bytes("", "transient", BODY)

    def ask() -> None:
        wire.write(publish)
        wire.wait(spec.Basic.Ack)
        wire.call(1, spec.Basic.Get(queue="transient", no_ack=True), spec.Basic.GetOk)

    return ask


def _synced(target: Target, vhost: str) -> Ask:
    wire = _confirming(target, vhost, "durable", durable=True)
    publish = publish_bytes("", "durable", BODY, delivery_mode=2)

    def ask() -> None:
        wire.write(publish)
        wire.wait(spec.Basic.Ack)

    return ask


def _kafka(target: Target) -> Ask:
    client = KafkaWire(target.kafka)
    created = {"name": "probe", "num_partitions": 1, "replication_factor": 1}
    client.call(k.CREATE_TOPICS, ALL_VERSION, {"topics": [created], "timeout_ms": 10_000})
    batch = encode_plain([Record(timestamp_ms=1, value=BODY)])
    produced = {"acks": 1, "timeout_ms": 10_000, "topics": [
        {"name": "probe", "partitions": [{"index": 0, "records": batch}]}]}  # fmt: skip
    at = 0

    def ask() -> None:
        nonlocal at
        answer = client.call(k.PRODUCE, PRODUCE_VERSION, produced)
        partition = answer["topics"][0]["partitions"][0]
        assert not partition["error_code"], partition
        at = partition["base_offset"]
        fetched = client.call(k.FETCH, FETCH_VERSION, {
            "replica_id": -1, "max_wait_ms": 0, "min_bytes": 0, "max_bytes": PARTITION_BYTES_MAX,
            "topics": [{"topic": "probe", "partitions": [
                {"partition": 0, "fetch_offset": at, "partition_max_bytes": PARTITION_BYTES_MAX}]}]})  # fmt: skip
        assert fetched["topics"], fetched

    return ask


class KafkaWire:
    """One Kafka connection with one request at a time."""

    def __init__(self, port: int, timeout_s: float = CLIENT_S) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call(self, key: int, version: int, body: dict[str, Any]) -> dict[str, Any]:
        return k.decode_response(key, version, self.exchange(k.encode_request(key, version, 1, "probe", body)))[1]

    def exchange(self, request: bytes) -> bytes:
        """Send a request and return the response, both encoded."""
        self.begin(request)
        return self.answer()

    def begin(self, request: bytes) -> None:
        self._socket.sendall(request)

    def answer(self) -> bytes:
        return self._take(int.from_bytes(self._take(4), "big"))

    def close(self) -> None:
        self._socket.close()

    def _take(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            got = self._socket.recv(min(size - len(data), 1 << 20))
            assert got, "the broker closed the connection"
            data += got
        return bytes(data)


def _grpc(target: Target) -> Ask:
    loop = asyncio.new_event_loop()

    async def begin() -> AsyncClient:
        client = AsyncClient(f"127.0.0.1:{target.fila}")
        await client.create_queue("probe")
        return client

    client = loop.run_until_complete(begin())
    return lambda: loop.run_until_complete(client.enqueue("probe", BODY))


def _admin(target: Target, vhost: str) -> Ask:
    api = target.api()
    where = f"/api/queues/{quote(vhost, safe='')}/admin"
    api.put(where, {"durable": True})
    return lambda: api.get(where)


def _disk(folder: str) -> Ask:
    file = open(Path(folder) / "disk", "wb", buffering=0)  # noqa: SIM115  (lives as long as the process)

    def ask() -> None:
        file.write(b"x" * 4096)
        os.fdatasync(file.fileno())

    return ask
