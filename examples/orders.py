"""Generated data for the examples: a shop's orders in a topic, and jobs in a queue with their lifecycle events."""

from __future__ import annotations

import json
import random
from pathlib import Path

import basaltmq
from basaltmq.embedded.database import Settings
from basaltmq.log.batches.record import Record
from basaltmq.queues.events.topic import EventSettings

HOUR_MS = 3_600_000
BEGIN_MS = 1_790_000_000_000


def publish(path: Path, count: int = 20_000, *, seed: int = 7) -> None:
    """Append orders of a day and a half, by customer, in four partitions."""
    rng = random.Random(seed)
    with basaltmq.open(path) as db:
        orders = db.topic("orders", partitions=4)
        batch: list[Record | bytes | str] = []
        for number in range(count):
            at_ms = BEGIN_MS + 36 * HOUR_MS * number // count
            order = {"id": number, "customer": rng.randrange(500), "total": round(rng.lognormvariate(3, 1), 2)}
            batch.append(Record(json.dumps(order).encode(), b"%d" % order["customer"], timestamp_ms=at_ms))
            if len(batch) == 2_000 or number == count - 1:
                orders.append(batch)
                batch = []


def consume(path: Path, group: str = "billing", count: int = 12_000) -> int:
    """Read some of them as a group. Return their number."""
    done = 0
    with basaltmq.open(path) as db, db.topic("orders").consume(group, wait=0) as consumer:
        for _ in consumer:
            done += 1
            if done == count:
                break
    return done


def work(path: Path, count: int = 2_000) -> None:
    """Process jobs of three tenants in a queue. Some fail, some remain. Events go to `__events`."""
    with basaltmq.open(path, settings=Settings(events=EventSettings())) as db:
        jobs = db.queue("jobs", attempts_max=3)
        for number in range(count):
            jobs.enqueue(b"job %d" % number, fairness_key=f"tenant-{number % 3}")
        for turn in range(count // 50 - 2):
            leased = jobs.lease(50)
            if turn % 5 == 0:
                jobs.nack(leased[:5], "example")
                leased = leased[5:]
            jobs.ack(leased)
