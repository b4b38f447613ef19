"""Acknowledgements follow the sync of the acknowledged message, so a power loss loses no acknowledged message."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from tests.unit.broker.rig import START_NS, BrokenStore, run, until

from basaltmq.broker.auth.users import User
from basaltmq.broker.scheduling.loop_shares import LoopShares
from basaltmq.broker.vhost import VHost
from basaltmq.protocols.mqtt.host import MqttHost
from basaltmq.protocols.mqtt.sessions.inbound import Inbound
from basaltmq.protocols.mqtt.sessions.outbound import Outbound
from basaltmq.protocols.mqtt.sessions.rows import Subscription
from basaltmq.protocols.mqtt.sessions.session import Session
from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire.encoder import encode
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import mqtt as keys

CLIENT = "c"
TOPIC = "t/x"


class SyncedStore(BrokenStore):
    """Records which batches would survive a power loss."""

    def __init__(self) -> None:
        super().__init__()
        self.synced = 0
        self.changed: dict[bytes, int] = {}
        """Number of the last batch that changed a row of MQTT."""

    def write(self, batch: Batch, *, wal: bool = True, wait_ms: int | None = None) -> None:
        super().write(batch, wal=wal, wait_ms=wait_ms)
        for _, family, key, _ in batch.ops:
            if family in (Family.MQTT_SESSIONS, Family.MQTT_RETAINED):
                self.changed[key] = len(self.batches)

    def sync(self) -> None:
        written = len(self.batches)
        super().sync()
        self.synced = max(self.synced, written)

    def is_durable(self, key: bytes) -> bool:
        """Whether the last change of a row is synced."""
        return 0 < self.changed.get(key, 0) <= self.synced


class FakeClient:
    """Records sent packets, and the number of batches that were synced at that time."""

    version = p.V5
    packet_bytes_max = p.PACKET_BYTES_MAX
    topic_aliases_max = 0
    is_full = False

    def __init__(self, store: SyncedStore) -> None:
        self.store = store
        self.sent: list[tuple[int, bytes]] = []
        self.checks: dict[int, Callable[[], bool]] = {}
        """Conditions that must hold when a packet of this type is sent."""

    def send(self, *parts: bytes) -> None:
        kind = parts[0][0] >> 4
        assert self.checks.get(kind, lambda: True)(), f"packet type {kind} is sent before the sync"
        self.sent.append((kind, b"".join(parts)))

    def send_packet(self, packet: p.Packet, text: str = "") -> None:
        self.send(encode(packet, self.version))

    def end(self, reason_code: int, text: str) -> None:
        raise AssertionError(f"the connection ended: {reason_code:#x} {text}")

    def has(self, kind: int) -> bool:
        return any(each == kind for each, _ in self.sent)


class Anybody:
    def check_publish(self, topic: str, routing_key: str) -> None: ...


async def opened(vhost: VHost, client: FakeClient) -> tuple[Inbound, Outbound]:
    """A durable session that subscribes to its own topic with QoS 2."""
    host = MqttHost(vhost, "amq.topic", clock_ns=lambda: START_NS)
    session = Session(CLIENT, "u", 600, 0)
    host.require_queue(session)
    vhost.bind_queue(session.queue, "amq.topic", "t.*")
    session.subscribe("t/+", Subscription(2))
    outbound = Outbound(vhost, session, client, host.decoded, 10, host.clock_ns)
    outbound.consume(session.queue)
    inbound = Inbound(
        vhost,
        session,
        client,
        User("u"),
        Anybody(),
        host.retained,
        LoopShares(),
        exchange="amq.topic",
        receive_maximum=10,
        topic_aliases_max=0,
    )
    return inbound, outbound


def check(test: Callable[[VHost, SyncedStore, FakeClient], Awaitable[None]]) -> None:
    store = SyncedStore()
    client = FakeClient(store)

    async def with_vhost(vhost: VHost) -> None:
        await test(vhost, store, client)

    run(with_vhost, store)


def message_is_durable(store: SyncedStore, before: int) -> bool:
    """Whether the first batch after `before`, which has the message, is synced."""
    return store.synced > before


@pytest.mark.spec("G1")
@pytest.mark.promise("P1")
@pytest.mark.parametrize("retain", [False, True])
def test_puback_follows_the_sync_of_the_message_and_its_retained_row(retain: bool) -> None:
    async def test(vhost: VHost, store: SyncedStore, client: FakeClient) -> None:
        inbound, _ = await opened(vhost, client)
        before = len(store.batches)
        row = keys.retained_key(TOPIC)
        client.checks[p.PUBACK] = lambda: message_is_durable(store, before) and (not retain or store.is_durable(row))
        assert inbound.publish(p.Publish(TOPIC, b"x", 1, retain=retain, packet_id=1)) is None
        await until(lambda: client.has(p.PUBACK))

    check(test)


@pytest.mark.spec("G1")
@pytest.mark.promise("P1")
def test_every_qos_2_acknowledgement_follows_the_sync_of_its_row() -> None:
    async def test(vhost: VHost, store: SyncedStore, client: FakeClient) -> None:
        inbound, outbound = await opened(vhost, client)
        before = len(store.batches)
        incoming = keys.packet_key(keys.INBOUND, CLIENT, 7)
        outgoing = keys.packet_key(keys.OUTBOUND, CLIENT, 1)
        client.checks[p.PUBREC] = lambda: message_is_durable(store, before) and store.is_durable(incoming)
        client.checks[p.PUBLISH] = lambda: store.is_durable(outgoing)
        assert inbound.publish(p.Publish(TOPIC, b"x", 2, packet_id=7)) is None
        await until(lambda: client.has(p.PUBREC) and client.has(p.PUBLISH))
        assert store.get(Family.MQTT_SESSIONS, incoming) is not None
        client.checks[p.PUBCOMP] = lambda: (
            store.get(Family.MQTT_SESSIONS, incoming) is None and store.is_durable(incoming)
        )
        inbound.released(7)
        await until(lambda: client.has(p.PUBCOMP))
        sent = store.changed[outgoing]
        client.checks[p.PUBREL] = lambda: store.changed[outgoing] > sent and store.is_durable(outgoing)
        outbound.received(1, 0)
        outbound.flush()
        await until(lambda: client.has(p.PUBREL))
        outbound.completed(1)
        outbound.flush()
        await until(lambda: store.get(Family.MQTT_SESSIONS, outgoing) is None)

    check(test)
