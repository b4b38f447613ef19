"""A client that sends exactly the requests of a test."""

from __future__ import annotations

import socket
import struct
from typing import Any

from basaltmq.log.batches.kafka import read_header
from basaltmq.log.batches.record import Record
from basaltmq.protocols.kafka.wire import api as k

TIMEOUT_S = 30.0


class RawClient:
    """One connection with one request at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self._correlation = 0

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, raw: bytes) -> None:
        self._socket.sendall(raw)

    def ask(self, key: int, version: int, body: dict[str, Any]) -> dict[str, Any]:
        self.post(key, version, body)
        return self.response(key, version)

    def post(self, key: int, version: int, body: dict[str, Any]) -> None:
        self._correlation += 1
        self.send(k.encode_request(key, version, self._correlation, "raw", body))

    def response(self, key: int, version: int) -> dict[str, Any]:
        return k.decode_response(key, version, self.frame())[1]

    def frame(self) -> bytes:
        return self._exactly(struct.unpack(">i", self._exactly(4))[0])

    def is_closed(self) -> bool:
        """Wait until the broker closes the connection. Return False if it sends something instead."""
        try:
            return self._socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(size - len(parts))
            assert part, "the broker closed the connection"
            parts += part
        return bytes(parts)

    def create(self, topic: str, partitions: int = 1, **configs: str) -> None:
        asked = {
            "name": topic,
            "num_partitions": partitions,
            "replication_factor": 1,
            "configs": [{"name": name.replace("_", "."), "value": value} for name, value in configs.items()],
        }
        found = self.ask(k.CREATE_TOPICS, 5, {"topics": [asked], "timeout_ms": 10_000})
        assert found["topics"][0]["error_code"] == 0, found

    def produce(self, topic: str, batch: bytes, *, acks: int = -1, version: int = 9) -> dict[str, Any]:
        self.post(k.PRODUCE, version, produced(topic, batch, acks))
        found: dict[str, Any] = self.response(k.PRODUCE, version)["topics"][0]["partitions"][0]
        return found

    def fetch(self, topic: str, offset: int, **asked: int) -> dict[str, Any]:
        self.post(k.FETCH, 12, fetched(topic, offset, **asked))
        found: dict[str, Any] = self.response(k.FETCH, 12)["topics"][0]["partitions"][0]
        return found


def produced(topic: str, batch: bytes, acks: int = -1) -> dict[str, Any]:
    partitions = [{"index": 0, "records": batch}]
    return {
        "transactional_id": None,
        "acks": acks,
        "timeout_ms": 10_000,
        "topics": [{"name": topic, "partitions": partitions}],
    }


def fetched(
    topic: str,
    offset: int,
    *,
    max_wait_ms: int = 0,
    min_bytes: int = 1,
    max_bytes: int = 1 << 20,
    isolation_level: int = 0,
) -> dict[str, Any]:
    partition = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": max_bytes}
    return {
        "replica_id": -1,
        "max_wait_ms": max_wait_ms,
        "min_bytes": min_bytes,
        "max_bytes": max_bytes,
        "isolation_level": isolation_level,
        "topics": [{"topic": topic, "partitions": [partition]}],
    }


def batch_of(*values: bytes, producer: tuple[int, int, int] | None = None) -> bytes:
    """Return a record batch. `producer` is an id, an epoch and the first sequence."""
    import google_crc32c
    from tests.log_frames import encode_plain

    raw = encode_plain([Record(value, timestamp_ms=1_700_000_000_000) for value in values])
    if producer is None:
        return raw
    assert read_header(raw).producer_id == -1
    covered = raw[21:43] + struct.pack(">qhi", *producer) + raw[57:]
    return raw[:17] + struct.pack(">I", google_crc32c.value(covered)) + covered
