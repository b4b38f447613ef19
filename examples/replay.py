"""Replay part of a topic into another one. With the same checkpoint, a second start continues the first.

python examples/replay.py
"""

# %% A store with orders, and a topic for those of one customer
from __future__ import annotations

import tempfile
from pathlib import Path

import orders

import basaltmq
from basaltmq.pipeline.archive.replay import ReplayJob, replay
from basaltmq.pipeline.session import spark_session

folder = Path(tempfile.mkdtemp(prefix="basalt-example-"))
data = folder / "data"
orders.publish(data, 5_000)
with basaltmq.open(data) as db:
    db.topic("customer-42")

# %% From the log of the topic itself, by a condition in SQL
spark = spark_session("example", conf={"spark.sql.shuffle.partitions": "2"})
job = ReplayJob(
    topics=["orders"],
    source={"path": str(data)},
    target={"path": str(data)},
    target_topic="customer-42",
    checkpoint=str(folder / "replay"),
    where="CAST(key AS STRING) = '42'",
)
print(replay(spark, job))
print(replay(spark, job), "(the second time there is nothing left)")
spark.stop()

# %% The result
with basaltmq.open(data) as db:
    for record in db.topic("customer-42").read(limit=5):
        print(record.offset, record.value.decode())
