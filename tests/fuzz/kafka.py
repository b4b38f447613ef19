"""Fuzz Kafka's listener: sessions of requests made from the tables, then damaged, against a real virtual host.

    python -m tests.fuzz.kafka --seconds 300 [--seed N]

Each round is one connection from one seed. Its requests follow the tables of every API and version, mostly with valid
values. Some are flipped, truncated or followed by noise; some sizes are wrong. The bytes arrive in pieces of any size.
After a round:

- there was no internal error, and the protocol raised no exception;
- the broker sent whole responses, in the order of the requests, as the tables define;
- the connection is removed from every list, and no request of it waits;
- a valid client is served.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from tests.fuzz.amqp091 import Transport, pieces
from tests.fuzz.rounds import command, run_rounds
from tests.interop.kafka.raw import batch_of, fetched, produced

from basaltmq.broker.auth.scram import ScramCredential
from basaltmq.broker.auth.users import User
from basaltmq.broker.config.sizes import ByteCount
from basaltmq.broker.peer import Peer
from basaltmq.broker.scheduling.loop_shares import LoopShares
from basaltmq.broker.vhost import VHost
from basaltmq.errors import AuthenticationError
from basaltmq.log.batches.kafka import records
from basaltmq.protocols.kafka.connection import Connection
from basaltmq.protocols.kafka.context import Settings
from basaltmq.protocols.kafka.server import Server
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire.schema import Array, Field, Struct
from basaltmq.store.open import open_store

TOPICS = ("a", "b", "c.d")
WAIT_S = 30.0
REQUEST_BYTES_MAX = 1 << 20


class Socket(Transport):
    """A socket that records what is written to it."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self._host = host

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_extra_info(self, name: str) -> Any:
        return (self._host, 1) if name in ("peername", "sockname") else None


class Users:
    """Accepts the user guest only."""

    async def authenticate(self, name: str, password: str, peer: Peer) -> Any:
        if (name, password) != ("guest", "guest"):
            raise AuthenticationError("who is that?")
        return User(name, ("administrator",))

    def anonymous_name(self) -> str:
        return "guest"

    def anonymous(self, peer: Peer) -> User | None:
        return User("guest", is_anonymous=True) if peer.is_loopback else None

    def is_administrator(self, user: Any) -> bool:
        return not user.is_anonymous

    def scram_for(self, name: str, mechanism: str) -> tuple[ScramCredential, bool]:
        return ScramCredential(b"salt", 4096, b"", b""), False

    def scram_of(self, name: str, mechanism: str) -> None:
        return None

    async def set_scram(self, name: str, mechanism: str, credential: object) -> None: ...

    def list(self) -> list[Any]:
        return []


class Harness:
    """A server without sockets."""

    def __init__(self, folder: Path) -> None:
        self.store = open_store(folder / "store")
        self.vhost = VHost("/", self.store, path=folder)
        self.vhost.start()
        self.registered: set[int] = set()
        numbers = itertools.count(1)

        def add(_connection: object) -> int:
            number = next(numbers)
            self.registered.add(number)
            return number

        node: Any = SimpleNamespace(
            users=Users(),
            permissions=SimpleNamespace(
                check=lambda *_: None, check_vhost=lambda *_: None, may_use=lambda *_: True, decide=lambda *_: None
            ),
            connections=SimpleNamespace(add=add, remove=self.registered.discard),
            alarms=SimpleNamespace(reason=lambda _vhost: None),
            vhost=lambda _name: self.vhost,
        )
        settings = Settings(
            durability="written",
            request_bytes_max=ByteCount(REQUEST_BYTES_MAX),
            access="loopback",
            handshake_s=WAIT_S,
        )
        self.server = Server(node, settings, shares=LoopShares(clock_s=lambda: 0.0))

    def connect(self, host: str = "127.0.0.1") -> tuple[Connection, Socket]:
        connection, transport = Connection(self.server), Socket(host)
        connection.connection_made(transport)  # type: ignore[arg-type]
        return connection, transport

    async def close(self) -> None:
        await self.server.close("done")
        await self.vhost.close()
        self.store.close()


async def settle(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


def value_of(rng: random.Random, field: Field, version: int) -> Any:
    """Return a value for a field, mostly a valid one."""
    if version >= field.null_since and rng.random() < 0.3:
        return None
    if isinstance(field.type, Struct):
        return body_of(rng, field.type, version)
    if isinstance(field.type, Array):
        of = field.type.of
        count = rng.choice([0, 1, 1, 1, 2])
        if isinstance(of, Struct):
            return [body_of(rng, of, version) for _ in range(count)]
        return [plain_of(rng, field.name, of) for _ in range(count)]
    return plain_of(rng, field.name, field.type)


def plain_of(rng: random.Random, name: str, kind: str) -> Any:
    odd = rng.random() < 0.05
    match kind:
        case "string":
            if "mechanism" in name:
                return rng.choice(["PLAIN", "SCRAM-SHA-256", "NONE"])
            if "regex" in name:
                return rng.choice(["", "a.*", "[", "(a+)+b", "[[:alpha:]]", "a|b|c.*"])
            if "assignor" in name:
                return rng.choice(["uniform", "range", "none"])
            known = ["g1", "g2", "", "x" * 300, "retention.ms", "a b", "\N{SNOWMAN}"] if odd else [*TOPICS, "g1"]
            return rng.choice(known)
        case "bool":
            return rng.random() < 0.5
        case "uuid":
            return UUID(int=rng.choice([0, 1, rng.getrandbits(128)]))
        case "records":
            return rng.choice([batch_of(b"x"), batch_of(b"x", b"y", producer=(1, 0, 0)), rng.randbytes(80), b""])
        case "bytes":
            return rng.choice([b"", b"\0guest\0guest", b"n,,n=guest,r=abc", rng.randbytes(20)])
        case "float64":
            return rng.random()
    bits = {"int8": 8, "int16": 16, "uint16": 16, "int32": 32, "int64": 64}[kind]
    if name in {"num_partitions", "count", "replication_factor"}:
        return rng.choice([1, 1, 2, 3, -1, 0])
    if name.endswith("_ms") and name != "max_wait_ms" and not odd:
        return rng.choice([0, 1, 5, 6000, 10_000])
    if name == "max_wait_ms":
        return rng.choice([0, 0, 1, 3])
    if odd:
        least = 0 if kind == "uint16" else -(1 << bits - 1)
        return rng.choice([least, least + (1 << bits) - 1, rng.randrange(least, least + (1 << bits))])
    return rng.choice([0, 0, 0, 1, 2, 100] + [-1] * (kind != "uint16"))


def body_of(rng: random.Random, table: Struct, version: int) -> dict[str, Any]:
    return {field.name: value_of(rng, field, version) for field in table.fields if field.is_in(version)}


def damage(rng: random.Random, raw: bytes) -> bytes:
    """Damage a request: its content or its size."""
    broken = bytearray(raw)
    match rng.randrange(7):
        case 0:
            broken[rng.randrange(4, len(broken))] ^= 1 << rng.randrange(8)
        case 1:
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        case 2:
            del broken[rng.randrange(4, len(broken)) :]
            broken[:4] = struct.pack(">i", len(broken) - 4)
        case 3:
            noise = rng.randbytes(rng.randint(1, 100))
            broken = bytearray(struct.pack(">i", len(noise)) + noise)
        case 4:
            broken[:4] = struct.pack(">i", rng.choice([-1, 0, 1, 0x7FFFFFFF, -(1 << 31), len(broken)]))
        case 5:
            # A wrong length inside.
            at = rng.randrange(8, len(broken) - 3) if len(broken) > 12 else 0
            broken[at : at + 4] = struct.pack(">i", rng.choice([-2, 0x7FFFFFFF, 1 << 20]))
        case 6:
            broken += rng.randbytes(rng.randint(1, 60))
    return bytes(broken)


def responses(raw: bytes) -> list[bytes]:
    """Split into whole responses. Remaining bytes are an error."""
    found, at = [], 0
    while at < len(raw):
        size = struct.unpack_from(">i", raw, at)[0]
        assert 0 <= size <= len(raw) - at - 4, "the broker sent an incomplete response"
        found.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    return found


async def one_round(harness: Harness, seed: int) -> None:
    rng = random.Random(seed)
    connection, transport = harness.connect(rng.choice(["127.0.0.1", "127.0.0.1", "10.0.0.1"]))
    harm = rng.choice([0.0, 0.0, 0.03, 0.3])
    keys = list(k.APIS)
    asked: dict[int, tuple[int, int]] = {}
    for number in range(rng.randint(1, 25)):
        api = k.APIS[rng.choice(keys)]
        version = rng.randint(api.version_min, api.version_max)
        raw = k.encode_request(api.key, version, number, rng.choice([None, "fuzz"]), body_of(rng, api.request, version))
        asked[number] = (api.key, version)
        if rng.random() < harm:
            raw = damage(rng, raw)
        for piece in pieces(rng, raw):
            if transport.closed:
                break
            connection.data_received(piece)
        assert connection._inbox.size_bytes <= 2 * REQUEST_BYTES_MAX
        step = connection._step
        if isinstance(step, asyncio.Task):
            await asyncio.wait([step], timeout=0.02)
        elif step is not None:
            await asyncio.sleep(0.02)
        await settle(2)
    await settle(4)
    sent = b"".join(transport.written)
    if harm == 0 and transport.written and not connection._is_raw_sasl and k.SASL_HANDSHAKE not in dict(asked.values()):
        before = -1
        for response in responses(sent):
            number = struct.unpack_from(">i", response)[0]
            assert number > before, f"response {number} came after {before}"
            before = number
            key, version = asked[number]
            k.decode_response(key, version, response)
    connection.connection_lost(None)
    await settle(4)


async def ask(connection: Connection, transport: Socket, key: int, version: int, body: dict[str, Any]) -> Any:
    transport.written.clear()
    connection.data_received(k.encode_request(key, version, 1, "good", body))
    until = time.monotonic() + WAIT_S
    while not transport.written:
        assert time.monotonic() < until, f"a valid client is not served: {k.APIS[key].name}"
        assert not transport.closed, f"a valid client is disconnected at {k.APIS[key].name}"
        await asyncio.sleep(0.001)
    return k.decode_response(key, version, responses(b"".join(transport.written))[0])[1]


async def check_harness(harness: Harness) -> None:
    """Check that nothing of the sessions is left, and that other clients are served."""
    until = time.monotonic() + WAIT_S
    while len(harness.server.context().arrivals) or harness.server.connections or harness.registered:
        assert time.monotonic() < until, "state of a closed connection is left"
        await asyncio.sleep(0.01)
    connection, transport = harness.connect()
    metadata = await ask(connection, transport, k.METADATA, 12, {"topics": [{"name": "well"}]})
    if metadata["topics"][0]["error_code"]:
        await ask(connection, transport, k.METADATA, 12, {"topics": [{"name": "well"}]})
    reported = await ask(connection, transport, k.PRODUCE, 9, produced("well", batch_of(b"well")))
    partition = reported["topics"][0]["partitions"][0]
    assert partition["error_code"] == 0, partition
    found = await ask(connection, transport, k.FETCH, 12, fetched("well", partition["base_offset"]))
    raw = found["topics"][0]["partitions"][0]["records"]
    assert [each.value for each in records(raw)] == [b"well"]
    connection.connection_lost(None)
    await settle(2)


async def fuzz(seeds: Iterator[int], stop: Callable[[int], bool], check_every: int = 50) -> int:
    """Run rounds until `stop` returns True. Return their number."""
    with tempfile.TemporaryDirectory(prefix="basalt-fuzz-") as folder:
        harness = Harness(Path(folder))
        try:
            return await run_rounds(
                "tests.fuzz.kafka",
                lambda seed: one_round(harness, seed),
                lambda: check_harness(harness),
                seeds,
                stop,
                check_every,
            )
        finally:
            await harness.close()


if __name__ == "__main__":
    command("Kafka listener", fuzz)
