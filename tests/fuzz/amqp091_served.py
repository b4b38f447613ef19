"""Fuzz AMQP 0-9-1 over sockets: the sessions of `tests.fuzz.amqp091` against a real `basalt serve` on disk.

    python -m tests.fuzz.amqp091_served --seconds 600 [--seed N]

Several damaged sessions run at once. Each ends with a close, a half close, or a reset at any point. Meanwhile:

- the process lives, serves a valid client, and logs no internal error;
- memory, open files and threads do not grow after the first minute;
- at the end nothing is connected or leased, and the process stops cleanly.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pika
from tests.fuzz.amqp091 import QUEUES, Client, damage, pieces
from tests.interop.server import Broker, running
from tests.unit.protocols.amqp091.wire import handshake

from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.method_codec import encode_method

SESSIONS = 8
"""Connections at once."""

STEP_WAIT_S = 0.02
"""Wait for a response. Later responses are read by the next step."""

SESSION_S_MAX = 60.0
CALM_S_MAX = 30.0
GROWTH_BYTES_MAX = 96 << 20
"""Maximum growth since the first measurements: the block cache may fill its 64 MiB. Write buffers do not count."""

FILES_GROWTH_MAX = 64
THREADS_GROWTH_MAX = 8


class Received:
    """Data that a session received."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.ended = False

    async def listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                self.written.append(data)
        self.ended = True


class Size(NamedTuple):
    """Resources of a process, without the store's write buffers."""

    memory_bytes: int
    files: int
    threads: int


def size_of(broker: Broker) -> Size:
    assert broker.process is not None
    assert broker.process.poll() is None, f"the broker has ended:\n{broker.log()[-4000:]}"
    folder = f"/proc/{broker.process.pid}"
    with open(f"{folder}/statm") as statm:
        pages = int(statm.read().split()[1])
    return Size(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"{folder}/fd")), len(os.listdir(f"{folder}/task")))


def whole(news: list[bytes]) -> list[bytes]:
    """Return whole frames. The rest stays in the buffer."""
    raw = b"".join(news)
    at = 0
    while len(raw) >= at + 8:
        stop = at + 8 + int.from_bytes(raw[at + 3 : at + 7], "big")
        if stop > len(raw):
            break
        at = stop
    return [raw[:at], raw[at:]]


async def one_session(port: int, seed: int) -> None:
    """Run one connection from one seed. The server may respond in any way, but must not end."""
    rng = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    heard = Received()
    ear = asyncio.create_task(heard.listen(reader))
    shown = Received()
    client = Client(rng, shown)  # type: ignore[arg-type]
    harm = rng.choice([0.0, 0.01, 0.05, 0.2])
    opening = handshake(rng.choice([4096, 131072]), rng.choice([3, 2047]))
    opening += [encode_method(channel, m.ChannelOpen()) for channel in (1, 2)]
    try:
        for _ in range(rng.randint(4, 120)):
            steps = [opening.pop(0)] if opening else client.steps()
            for piece in pieces(rng, b"".join(damage(rng, step) if rng.random() < harm else step for step in steps)):
                if heard.ended or writer.transport.is_closing():
                    break
                writer.write(piece)
            await asyncio.wait_for(writer.drain(), SESSION_S_MAX)
            if opening or rng.random() < 0.2:
                await asyncio.sleep(STEP_WAIT_S)
            if heard.ended:
                break
            if not heard.written or not heard.written[0].startswith(b"AMQP"):
                frames, rest = whole(heard.written)
                heard.written[:] = [rest] if rest else []
                shown.written.append(frames)
                client.look()
        if rng.random() < 0.3:
            writer.write(encode_method(0, m.ConnectionClose(200, "bye", 0, 0)))
    except (ConnectionError, AssertionError):
        # The server closed the session, or the client cannot parse its data.
        pass
    match rng.randrange(3):
        case 0:
            # With this option, a close sends a reset.
            connected = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        case 1 if writer.can_write_eof():
            with contextlib.suppress(OSError):
                writer.write_eof()
            await asyncio.sleep(STEP_WAIT_S)
    writer.close()
    ear.cancel()
    await asyncio.gather(ear, return_exceptions=True)


def good_client(broker: Broker) -> None:
    """Check that a valid client gets the message it published."""
    parameters = pika.URLParameters(broker.url() + "?socket_timeout=30&blocked_connection_timeout=30")
    with pika.BlockingConnection(parameters) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        name = channel.queue_declare("", exclusive=True).method.queue
        channel.basic_publish("", name, b"well", pika.BasicProperties(delivery_mode=2), mandatory=True)
        assert channel.basic_get(name, auto_ack=True)[2] == b"well"
        for queue in QUEUES:
            channel.queue_declare(queue, durable=True)
            channel.queue_purge(queue)


def calm(broker: Broker) -> None:
    """Check that nothing is connected or leased, and that there was no internal error."""
    until = time.monotonic() + CALM_S_MAX
    while left := broker.call("GET", "/api/connections"):
        assert time.monotonic() < until, f"connections that are gone are still listed: {left}"
        time.sleep(0.1)
    for queue in broker.call("GET", "/api/queues"):
        assert not queue["messages_unacknowledged"], f"messages are out with nobody: {queue}"
    for line in broker.log().splitlines():
        assert '"level":"error"' not in line.replace(" ", "").lower(), line
        assert "Traceback" not in line, line


async def _rounds(port: int, seeds: Iterator[int], until: float) -> int:
    count = 0

    async def player() -> None:
        nonlocal count
        while time.monotonic() < until:
            seed = next(seeds)
            try:
                await asyncio.wait_for(one_session(port, seed), SESSION_S_MAX)
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
            count += 1

    await asyncio.gather(*[player() for _ in range(SESSIONS)])
    return count


def fuzz(folder: Path, seconds: float, seed: int, check_every_s: float = 20.0) -> tuple[int, list[Size]]:
    """Run sessions. Return their number, and the size of the process at every check."""
    sizes: list[Size] = []
    count = 0
    seeds = itertools.count(seed)
    with running(folder / "data") as broker:
        good_client(broker)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            until = min(end, time.monotonic() + check_every_s)
            count += asyncio.run(_rounds(broker.port(), seeds, until))
            good_client(broker)
            calm(broker)
            sizes.append(size_of(broker))
            first = sizes[min(2, len(sizes) - 1)]
            assert sizes[-1].memory_bytes - first.memory_bytes < GROWTH_BYTES_MAX, f"memory grows: {sizes}"
            assert sizes[-1].files - first.files < FILES_GROWTH_MAX, f"files stay open: {sizes}"
            assert sizes[-1].threads - first.threads < THREADS_GROWTH_MAX, f"threads stay: {sizes}"
        assert broker.stop() == 0, broker.log()[-4000:]
    return count, sizes


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz AMQP 0-9-1 over sockets.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 40))
    given = parser.parse_args()
    print(f"seeds from {given.seed} on", flush=True)
    with tempfile.TemporaryDirectory(prefix="basalt-fuzz-") as folder:
        count, sizes = fuzz(Path(folder), given.seconds, given.seed)
    memory = " ".join(f"{size.memory_bytes >> 20}" for size in sizes)
    print(f"{count} sessions, nothing found; MiB of memory beside write buffers at each check: {memory}")


if __name__ == "__main__":
    main()
