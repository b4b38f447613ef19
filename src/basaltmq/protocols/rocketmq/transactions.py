"""Transactional messages: half messages, decisions, and checks of undecided transactions.

    send ──> half record, invisible ──> EndTransaction COMMIT ──> scheduled record, due now ──> the topic
                        │          └──> EndTransaction ROLLBACK ──> deleted
                        └── undecided ──> a connected producer of the topic is asked, every 30 s

A decision is one batch: it deletes the half record and, on a commit, schedules the record. So it is made once. A second
decision finds no half record and is refused. A repetition of the first one is accepted while it is in memory.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from basaltmq.log.batches.record import StoredRecord
from basaltmq.protocols.rocketmq.records import message_of
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import streams as stream_keys
from basaltmq.store.keys.parts import prefix_range
from basaltmq.streams.scheduled import Half, decode_half, delete_half, put_half, put_scheduled
from basaltmq.wire import rocketmq_wire_pb2 as wire

if TYPE_CHECKING:
    from basaltmq.protocols.rocketmq.host import Host

CHECK_EVERY_MS: Final = 30_000
NOBODY_ASKED_MS: Final = 5_000
"""Delay before the next check if no producer of the topic is connected."""

CHECKS_MAX: Final = 15
"""Checks after which a transaction is rolled back."""

UNDECIDED_MS_MAX: Final = 3 * 24 * 3_600_000
"""Age at which a transaction without a connected producer is rolled back."""

CHECKS_AT_ONCE: Final = 100
DECISIONS_KEPT: Final = 10_000

_log: Final = logging.getLogger(__name__)


class Transactions:
    """The undecided transactions of a virtual host. Their state is in the store."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._decided: OrderedDict[bytes, int] = OrderedDict()

    def find(self, record_id: bytes) -> Half | None:
        raw = self._host.vhost.store.get(Family.SCHEDULED_RECORDS, stream_keys.half_record_key(record_id))
        return None if raw is None else decode_half(raw)

    def decision(self, record_id: bytes) -> int | None:
        """Return the decision of a transaction. None if there is none since the broker started."""
        return self._decided.get(record_id)

    def decide(self, batch: Batch, record_id: bytes, half: Half, resolution: int) -> None:
        """Add a decision to `batch`."""
        delete_half(batch, record_id, half)
        if resolution == wire.COMMIT:
            put_scheduled(batch, half.created_ms, record_id, half.scheduled)
        self._decided[record_id] = resolution
        if len(self._decided) > DECISIONS_KEPT:
            self._decided.popitem(last=False)

    def check(self, now_ms: int) -> int | None:
        """Ask the producers of transactions that are due for a check. Return when the next one is due."""
        store = self._host.vhost.store
        end = stream_keys.scheduled_end(stream_keys.CHECK, now_ms)
        due = [key for key, _ in islice(store.scan(Family.SCHEDULED_RECORDS, stream_keys.CHECK, end), CHECKS_AT_ONCE)]
        batch = Batch()
        for key in due:
            record_id = stream_keys.decode_scheduled_key(key)[2]
            half = self.find(record_id)
            if half is None:
                batch.delete(Family.SCHEDULED_RECORDS, key)
            else:
                self._check_one(batch, record_id, half, now_ms)
        if batch:
            store.write(batch)
        first = next(iter(store.scan(Family.SCHEDULED_RECORDS, *prefix_range(stream_keys.CHECK))), None)
        return None if first is None else stream_keys.decode_scheduled_key(first[0])[1]

    def _check_one(self, batch: Batch, record_id: bytes, half: Half, now_ms: int) -> None:
        topic = half.scheduled.topic
        if half.checks >= CHECKS_MAX or now_ms - half.created_ms > UNDECIDED_MS_MAX:
            _log.warning(
                "transaction %s for topic %r was not decided after %d checks, and is rolled back",
                record_id.hex(),
                topic,
                half.checks,
            )
            self.decide(batch, record_id, half, wire.ROLLBACK)
            return
        is_asked = self._ask(record_id, half)
        after_ms = CHECK_EVERY_MS if is_asked else NOBODY_ASKED_MS
        later = msgspec.structs.replace(half, check_ms=now_ms + after_ms, checks=half.checks + is_asked)
        put_half(batch, record_id, later, before=half)

    def _ask(self, record_id: bytes, half: Half) -> bool:
        """Ask one connected producer of the topic for its decision."""
        scheduled = half.scheduled
        for client in self._host.clients.producers(scheduled.topic):
            resource = client.publishes.get(scheduled.topic)
            if client.send is None or resource is None:
                continue
            fields = msgspec.structs.asdict(scheduled.record) | {"timestamp_ms": half.created_ms, "offset": 0}
            message = message_of(StoredRecord(**fields), 0, scheduled.partition, "")
            message.topic.CopyFrom(resource)
            command = wire.RecoverOrphanedTransactionCommand(message=message, transaction_id=record_id.hex())
            client.send(wire.TelemetryCommand(recover_orphaned_transaction_command=command))
            return True
        return False
