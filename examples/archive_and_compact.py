"""Archive a topic to Parquet in small batches, read it, and merge the small files.

python examples/archive_and_compact.py
"""

# %% A store with orders in it
from __future__ import annotations

import tempfile
from pathlib import Path

import orders

from basaltmq.pipeline.archive.archive import ArchiveJob, archive
from basaltmq.pipeline.archive.compact import CompactJob, compact
from basaltmq.pipeline.session import spark_session

folder = Path(tempfile.mkdtemp(prefix="basalt-example-"))
data, target = folder / "data", folder / "archive"
orders.publish(data, 5_000)

# %% Archive it. A second run does nothing, because everything is archived
spark = spark_session("example", conf={"spark.sql.shuffle.partitions": "2"})
job = ArchiveJob(source={"path": str(data), "subscribe": "orders"}, target=str(target), offsets_max=1_000)
print(archive(spark, job))
print(archive(spark, job))

# %% It is plain Parquet
frame = spark.read.parquet(str(target))
frame.groupBy("topic", "day").count().orderBy("day").show()

# %% Merge the small files. The records stay the same
print(compact(spark, CompactJob(archive=str(target))))
print(spark.read.parquet(str(target)).count(), "records, in", target)
spark.stop()
