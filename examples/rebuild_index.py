"""Rebuild the index of a store's log on all cores, and compare it with the one that the store wrote.

python examples/rebuild_index.py
"""

# %% A store whose log has appends, deletes and a trim
from __future__ import annotations

import tempfile
from pathlib import Path

import orders

import basaltmq
from basaltmq.pipeline.index.rebuild import RebuildJob, rebuild_index
from basaltmq.pipeline.session import spark_session
from basaltmq.pipeline.tasks import SparkTasks

data = Path(tempfile.mkdtemp(prefix="basalt-example-")) / "data"
orders.publish(data, 20_000)
with basaltmq.open(data) as db:
    db.topic("orders").delete_before(0, 100)

# %% Compare without a change
spark = spark_session("example")
compared = rebuild_index(SparkTasks(spark), RebuildJob(path=str(data), compare=True))
print(f"{compared.rows:,} rows of the index looked at; {len(compared.findings)} differ")

# %% Replace the old index
rebuilt = rebuild_index(SparkTasks(spark), RebuildJob(path=str(data)))
print(f"{rebuilt.rows:,} rows in {rebuilt.tables} tables from {rebuilt.log_bytes:,} bytes in {rebuilt.seconds:.1f} s")
spark.stop()
