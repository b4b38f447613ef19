"""Fuzz AMQP 1.0 over sockets: performatives in any order with any fields, some damaged, against a real `basalt serve`.

    python -m tests.fuzz.amqp10_served --seconds 600 [--seed N]

Each session logs in, sends steps made from one seed, and ends at any point. After each:

- the process lives, serves a valid client, and logs no internal error;
- every frame that the broker has sent can be decoded.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.fuzz.amqp10_wire import damaged, message_of, value_of
from tests.interop.amqp10.raw import RawClient, raw_client
from tests.interop.server import Broker, running

from basaltmq.protocols.amqp10.wire import frames as f
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire import types as t

WAIT_S = 0.02
QUEUES = ("fuzz-0", "fuzz-1")
ADDRESSES = (
    *[f"/queues/{name}" for name in QUEUES],
    *(
        "/exchanges/amq.topic/a.b",
        "/exchanges/amq.fanout",
        "amq.direct/k",
        "/queues/%zz",
        "/management",
        "missing",
        "",
        None,
    ),
)
SELECTORS = ("a = 1", "NOT a", "a LIKE '%x_' ESCAPE '!'", "(a + 1) / b BETWEEN 1 AND 2", "a IN ('x')", "a =", "'", 5)
FILTERS = (
    *("apache.org:selector-filter:string", "amqp:sql-filter", "apache.org:no-local-filter:list"),
    *("amqp:properties-filter", "amqp:application-properties-filter", "rabbitmq:stream-offset-spec", "unknown"),
    *("rabbitmq:stream-filter", "rabbitmq:stream-match-unfiltered"),
)
NUMBERS = (0, 1, 2, 10, 255, 4096, 0x7FFF_FFFF, 0xFFFF_FFFF)


class Steps:
    """Makes the performatives of one session."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._id = 0

    def _number(self) -> int:
        return self._rng.choice(NUMBERS) if self._rng.random() < 0.3 else self._rng.randrange(4)

    def _flag(self) -> bool | None:
        return self._rng.choice((None, True, False))

    def _state(self) -> p.Composite | None:
        rng = self._rng
        annotations = {t.Symbol("x-opt-a"): value_of(rng), t.Symbol("b"): value_of(rng)}
        transaction = rng.randrange(4).to_bytes(8, "big")
        return rng.choice(
            (
                None,
                p.Accepted(),
                p.Released(),
                p.Rejected(error=p.error_of("amqp:internal-error", "x")),
                p.Modified(
                    delivery_failed=self._flag(), undeliverable_here=self._flag(), message_annotations=annotations
                ),
                p.Received(section_number=self._number(), section_offset=self._number()),
                p.TransactionalState(txn_id=transaction, outcome=rng.choice((None, p.Accepted(), p.Released()))),
            )
        )

    def _lifetime(self) -> dict[Any, Any] | None:
        policy = t.Described(t.Ulong(self._rng.randrange(0x2A, 0x30)), [])
        return self._rng.choice((None, {t.Symbol("lifetime-policy"): policy}, {t.Symbol("x"): 1}))

    def _source(self) -> p.Composite | None:
        rng = self._rng
        if rng.random() < 0.05:
            return None
        content = rng.choice((*SELECTORS, [], {"subject": "&p:x", t.Symbol("to"): None}, value_of(rng)))
        chosen = {t.Symbol("f"): t.Described(t.Symbol(rng.choice(FILTERS)), content)} if rng.random() < 0.5 else None
        return p.Source(
            address=rng.choice(ADDRESSES),
            durable=rng.choice((None, 0, 1, 2)),
            expiry_policy=rng.choice((None, "never", "link-detach")),
            dynamic=rng.choice((None, None, None, True)),
            dynamic_node_properties=self._lifetime(),
            distribution_mode=rng.choice((None, "copy", "move")),
            filter=chosen,
            default_outcome=self._state(),
            capabilities=rng.choice((None, ["topic"], ["shared"], ["shared", "global"], ["queue"])),
        )

    def _target(self) -> p.Composite | None:
        rng = self._rng
        if rng.random() < 0.15:
            return p.Coordinator()
        return p.Target(
            address=rng.choice(ADDRESSES),
            durable=rng.choice((None, 0, 2)),
            expiry_policy=rng.choice((None, "never")),
            dynamic=rng.choice((None, None, None, True)),
            dynamic_node_properties=self._lifetime(),
            capabilities=rng.choice((None, ["temporary-topic"], ["topic"])),
        )

    def next(self) -> tuple[p.Composite, bytes]:
        rng = self._rng
        kind = rng.randrange(12)
        if kind < 3:
            role = rng.random() < 0.5
            unsettled = {b"%d" % rng.randrange(9): self._state() for _ in range(rng.randrange(3))} or None
            attach = p.Attach(
                name=f"link-{rng.randrange(6)}",
                handle=self._number(),
                role=role,
                snd_settle_mode=rng.choice((None, 0, 1, 2)),
                rcv_settle_mode=rng.choice((None, 0, 1)),
                source=self._source(),
                target=self._target(),
                unsettled=unsettled,
                incomplete_unsettled=self._flag(),
                initial_delivery_count=0 if role == p.SENDER else None,
            )
            return attach, b""
        if kind < 7:
            self._id += rng.random() < 0.9
            body = message_of(rng) if rng.random() < 0.8 else rng.choice((b"", b"\0S1\xc0", rng.randbytes(20)))
            if rng.random() < 0.2:
                command = rng.choice(
                    (p.Declare(), p.Discharge(txn_id=rng.randrange(4).to_bytes(8, "big"), fail=self._flag()))
                )
                body = b"\0\x53\x77" + p.encode(command)
            transfer = p.Transfer(
                handle=self._number(),
                delivery_id=self._id,
                delivery_tag=b"%d" % rng.randrange(9),
                settled=self._flag(),
                more=rng.choice((None, None, None, True)),
                state=self._state(),
                resume=rng.choice((None, None, True)),
                aborted=rng.choice((None, None, None, True)),
            )
            return transfer, body
        if kind < 9:
            flow = p.Flow(
                next_incoming_id=rng.choice((None, self._number())),
                incoming_window=self._number(),
                next_outgoing_id=self._number(),
                outgoing_window=self._number(),
                handle=rng.choice((None, self._number())),
                delivery_count=rng.choice((None, self._number())),
                link_credit=rng.choice((None, self._number())),
                drain=self._flag(),
                echo=self._flag(),
                properties=rng.choice((None, None, None, {t.Symbol("txn-id"): b"1"})),
            )
            return flow, b""
        if kind < 11:
            last = rng.choice((None, self._number()))
            state = self._state()
            return p.Disposition(
                role=bool(self._flag()), first=self._number(), last=last, settled=self._flag(), state=state
            ), b""
        return rng.choice(
            (p.Detach(handle=self._number(), closed=self._flag()), p.Begin(incoming_window=5), p.End())
        ), b""


def one_session(port: int, seed: int) -> None:
    """Run one connection from one seed. The broker may refuse anything, but must not end."""
    rng = random.Random(seed)
    harm = rng.choice((0.0, 0.0, 0.02, 0.2))
    with raw_client(port) as client:
        client.login()
        client.send(p.Open(container_id=f"fuzz-{rng.randrange(3)}", max_frame_size=rng.choice((None, 512, 4096))))
        client.take(p.Open)
        client.begin(0, incoming_window=rng.choice((0, 1, 1000)))
        steps = Steps(rng)
        client.sock.settimeout(WAIT_S)
        for _ in range(rng.randrange(5, 80)):
            performative, payload = steps.next()
            raw = f.frame(rng.choice((0, 0, 0, 0, 0, 0, 0, 1)), p.encode(performative) + payload)
            try:
                client.sock.sendall(damaged(rng, raw) if rng.random() < harm else raw)
                if rng.random() < 0.2:
                    _drain(client)
            except OSError:
                return
        with contextlib.suppress(OSError):
            _drain(client)


def _drain(client: RawClient) -> None:
    with contextlib.suppress(TimeoutError):
        while True:
            data = client.sock.recv(1 << 16)
            if not data:
                raise ConnectionResetError
            for kind, _, raw, at, end in client.reader.feed(data):
                if kind != f.HEADER and at < end:
                    p.decode(raw, at, end)


def check(broker: Broker) -> None:
    """The broker serves a valid client, and has logged no bug."""
    assert broker.process is not None
    assert broker.process.poll() is None, broker.log()[-4000:]
    with raw_client(broker.port()) as client:
        client.open()
        client.is_alive()
    for wrong in ("internal error", "Traceback", "could not be notified", "failed the"):
        assert wrong not in broker.log(), broker.log()[-6000:]


def prepare(broker: Broker) -> None:
    for name in QUEUES:
        broker.call("PUT", f"/api/queues/%2F/{name}", {"durable": True, "arguments": {"x-max-length": 1000}})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 40))
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "data") as broker:
        prepare(broker)
        for seed in itertools.count(given.seed):
            if time.monotonic() > until:
                break
            try:
                with contextlib.suppress(socket.timeout, AssertionError):
                    one_session(broker.port(), seed)
                check(broker)
            except BaseException:
                print(f"seed {seed}")
                raise


if __name__ == "__main__":
    main()
