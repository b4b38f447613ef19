"""Profile a topic, remove duplicate records, and keep the newest record of each key.

python examples/dedup_latest_profile.py
"""

# %% Orders, a tenth of them sent twice
from __future__ import annotations

import tempfile
from pathlib import Path

import orders

import basaltmq
from basaltmq.pipeline.dedup import DedupJob, dedup
from basaltmq.pipeline.latest import LatestJob, latest
from basaltmq.pipeline.profile import ProfileJob, profile
from basaltmq.pipeline.reports.pages import profile_page
from basaltmq.pipeline.session import spark_session
from basaltmq.pipeline.sink import Outlet

folder = Path(tempfile.mkdtemp(prefix="basalt-example-"))
data = folder / "data"
orders.publish(data, 5_000)
orders.publish(data, 500)
with basaltmq.open(data) as db:
    db.topic("orders-once", partitions=2)
spark = spark_session("example", conf={"spark.sql.shuffle.partitions": "2"})
source = {"path": str(data), "subscribe": "orders"}

# %% The profile
result = profile(spark, ProfileJob(source=source))
for field in result.fields:
    print(f"{field.field}: {field.type}, {field.null_rate:.0%} null, {field.least} to {field.largest}")
(folder / "profile.html").write_text(profile_page(result))

# %% Each order once, to a topic
by_id = "get_json_object(CAST(value AS STRING), '$.id')"
once = dedup(spark, DedupJob(source=source, by=by_id, to=Outlet(topic="orders-once", place={"path": str(data)})))
print(f"{once.kept:,} of {once.read:,} records are no copies")

# %% The last order of each customer, to Parquet
newest = latest(spark, LatestJob(source=source, to=Outlet(parquet=str(folder / "latest"))))
print(f"{newest.keys} customers, in {folder / 'latest'}")
print("open", folder / "profile.html")
spark.stop()
