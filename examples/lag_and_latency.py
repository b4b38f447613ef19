"""Report the lag of groups, the backlog of queues, and the latency of messages.

python examples/lag_and_latency.py
"""

# %% A store with orders, a group that has read some of them, and a queue with processed jobs
from __future__ import annotations

import tempfile
from pathlib import Path

import orders

from basaltmq.pipeline.lag import lag
from basaltmq.pipeline.latency import latency
from basaltmq.pipeline.reports.pages import latency_page
from basaltmq.pipeline.session import spark_session

folder = Path(tempfile.mkdtemp(prefix="basalt-example-"))
data = folder / "data"
orders.publish(data, 5_000)
orders.consume(data, count=3_000)
orders.work(data, 500)

# %% The lag report does not need Spark
found = lag(str(data))
for group in found.groups:
    print(group)
for queue in found.queues:
    print(queue)

# %% The latency report reads the events
spark = spark_session("example", conf={"spark.sql.shuffle.partitions": "2"})
result = latency(spark, str(data))
for each in (*result.queues, *result.keys):
    print(each.queue, each.fairness_key or "(all)", each.acked, "acked, wait", each.wait, "work", each.work)
(folder / "latency.html").write_text(latency_page(result))
print("open", folder / "latency.html")

# %% Events are ordinary rows
events = spark.read.format("basalt").options(path=str(data), subscribe="__events", explodeEvents="true").load()
events.groupBy("queue", "kind").count().show()
spark.stop()
