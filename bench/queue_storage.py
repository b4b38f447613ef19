"""Typed queue batches against raw `rocksdict`: what do keys, rows and operations cost? (SPEC C1, promise P2)

The same messages (256 bytes of payload, 16 fairness keys), batches of 100, the WAL on, no sync, one database: once as
`PutMessages`, the encoding of keys and rows included; once as the finished rows straight into a `WriteBatch`. The two
take turns batch by batch, so that a machine that changes its pace changes it for both. The median of rounds counts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

from bench.row import Row
from rocksdict import WriteBatch

from basaltmq.ids import Ids
from basaltmq.queues.message import Message, encode_row
from basaltmq.queues.operations import PutMessages
from basaltmq.queues.storage import StoreStorage
from basaltmq.store.families import Family
from basaltmq.store.open import open_store

BATCH: Final = 100
BATCHES: Final = 200
ROUNDS: Final = 7
PAYLOAD_BYTES: Final = 256
FAIRNESS_KEYS: Final = 16
HEADERS: Final = {"tenant": "a", "trace": "0123456789abcdef"}


def run(rounds: int = ROUNDS) -> list[Row]:
    rows: list[Row] = []
    for what, headers in (("plain", {}), ("with two headers", HEADERS)):
        rates = [_round(headers) for _ in range(rounds)]
        ratio = statistics.median(ours / raw for raw, ours in rates)
        rows += [
            Row(f"raw rocksdict, {what}", statistics.median(raw for raw, _ in rates), "messages/s"),
            Row(f"typed operations, {what}", statistics.median(ours for _, ours in rates), "messages/s"),
        ]
        rows.append(Row(f"typed to raw, {what}", ratio, "x"))
    return rows


def _round(headers: dict[str, str]) -> tuple[float, float]:
    """Messages per second, raw and ours."""
    raw_s = ours_s = 0.0
    batches = [_messages(headers) for _ in range(BATCHES)]
    finished = [[(message.key(), encode_row(message)) for message in messages] for messages in batches]
    with tempfile.TemporaryDirectory(prefix="basalt-bench-") as folder:
        store = open_store(Path(folder) / "store")
        storage = StoreStorage.open(store)
        handle = store._handles[Family.MESSAGES]
        for messages, rows in zip(batches, finished, strict=True):
            started = time.perf_counter()
            native = WriteBatch(raw_mode=True)
            for key, row in rows:
                native.put(key, row, handle)
            store._db.write(native)
            between = time.perf_counter()
            storage.write_batch((PutMessages(messages),))
            ours_s += time.perf_counter() - between
            raw_s += between - started
        # The database stays open while a handle is held.
        del handle
        store.close()
    return BATCH * BATCHES / raw_s, BATCH * BATCHES / ours_s


def _messages(headers: dict[str, str]) -> list[Message]:
    now_ns = time.time_ns()
    return [
        Message(
            id=message_id,
            queue="orders",
            payload=message_id * (PAYLOAD_BYTES // 16),
            enqueued_ns=now_ns + at,
            fairness_key=f"tenant-{at % FAIRNESS_KEYS}",
            headers=headers,
        )
        for at, message_id in enumerate(Ids().many(BATCH))
    ]
