"""Fuzz the AMQP 1.0 codec: values, performatives and messages, then damaged, in pieces of any size.

    python -m tests.fuzz.amqp10_wire --seconds 300 [--seed N]

Each round makes a stream of frames from one seed. After it:

- the reader, the performatives and the messages raised nothing but faults;
- without damage the frames are those that were sent, and every performative is encoded again unchanged;
- a message that was converted is encoded for receivers as a valid message.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tests.fuzz.amqp091 import pieces
from tests.fuzz.rounds import command, run_rounds
from tests.unit.protocols.amqp10.test_frames import PERFORMATIVES

from basaltmq.broker.message import properties
from basaltmq.protocols.amqp10.message import Incoming, Outgoing
from basaltmq.protocols.amqp10.wire import frames as f
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire import sections as s
from basaltmq.protocols.amqp10.wire import types as t
from basaltmq.protocols.amqp10.wire.errors import Fault

FRAME_BYTES_MAX = 4096


def value_of(rng: random.Random, depth: int = 0) -> object:
    kind = rng.randrange(12 if depth < 4 else 8)
    if kind < 8:
        text = "é" * rng.randrange(99)
        return rng.choice(
            (None, True, t.Uint(rng.getrandbits(32)), rng.getrandbits(62), text, t.Symbol("x"), b"z", 1.5)
        )
    if kind == 8:
        return [value_of(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 9:
        return {t.Symbol(f"k{number}"): value_of(rng, depth + 1) for number in range(rng.randrange(4))}
    if kind == 10:
        return t.symbols(["a"] * rng.randrange(4))
    return t.Described(t.Symbol("d"), value_of(rng, depth + 1))


def message_of(rng: random.Random) -> bytes:
    parts = [
        s.section(s.HEADER, t.encode([rng.random() < 0.5, t.Ubyte(5), t.Uint(1000)])),
        s.section(s.MESSAGE_ANNOTATIONS, t.encode({t.Symbol("x-a"): value_of(rng)})),
        s.section(s.PROPERTIES, t.encode(["id", b"user", "to", "subject"])),
        s.section(s.APPLICATION_PROPERTIES, t.encode({"name": value_of(rng)})),
    ]
    parts = [each for each in parts if rng.random() < 0.5]
    body = rng.choice((s.data_head(5) + b"hello", s.section(s.VALUE, t.encode(value_of(rng)))))
    return b"".join((*parts, body))


def damaged(rng: random.Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed))
        match rng.randrange(3):
            case 0:
                changed[at] = rng.randrange(256)
            case 1:
                del changed[at : at + rng.randint(1, 9)]
            case _:
                changed[at:at] = rng.randbytes(rng.randint(1, 9))
        if not changed:
            return b"\0"
    return bytes(changed)


async def one_round(seed: int) -> None:
    rng = random.Random(seed)
    is_damaged = rng.random() < 0.7
    sent = [p.encode(rng.choice(PERFORMATIVES)) for _ in range(rng.randint(1, 8))]
    stream = b"".join(f.frame(rng.randrange(4), each) for each in sent)
    if is_damaged:
        stream = damaged(rng, stream)
    reader = f.FrameReader(FRAME_BYTES_MAX)
    reader.wants_header = False
    found = []
    try:
        for piece in pieces(rng, stream):
            for frame in reader.feed(piece):
                body = frame.raw[frame.at : frame.end]
                if f.quick_descriptor(body, 0) in (0x13, 0x14, 0x15):
                    f.read_fields(body, 3, len(body))
                performative, _ = p.decode(body, 0, len(body))
                again = p.encode(performative)
                if not is_damaged:
                    found.append(again)
    except Fault:
        assert is_damaged, f"seed {seed}: a fault without damage"
    assert is_damaged or found == sent, f"seed {seed}: {found} != {sent}"
    raw = message_of(rng)
    if rng.random() < 0.7:
        raw = damaged(rng, raw)
    try:
        received = Incoming().convert(raw)
    except Fault:
        return
    properties.peek(received.properties)
    envelope = properties.encode_envelope("e", "k", received.properties)
    s.split(Outgoing().encode(envelope, received.body, False))
    properties.peek(properties.visible(envelope)[4:])


async def fuzz(seeds: Iterator[int], stop: Callable[[int], bool]) -> int:
    """Run rounds until `stop` returns True. Return their number."""

    async def check() -> None: ...

    return await run_rounds("tests.fuzz.amqp10_wire", one_round, check, seeds, stop, 1000)


if __name__ == "__main__":
    command("the AMQP 1.0 codec", fuzz)
