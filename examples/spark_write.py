"""Write a topic from Spark, batch and streaming, each batch exactly once.

python examples/spark_write.py
"""

# %% Two topics
from __future__ import annotations

import tempfile
from pathlib import Path

import orders

import basaltmq
from basaltmq.pipeline.session import spark_session

folder = Path(tempfile.mkdtemp(prefix="basalt-example-"))
data, target = folder / "data", folder / "target"
orders.publish(data, 5_000)
with basaltmq.open(target) as db:
    db.topic("totals", partitions=2)
    db.topic("copies", partitions=2)

# %% A batch: totals by customer. With runId and batchId, a repetition writes nothing
spark = spark_session("example", conf={"spark.sql.shuffle.partitions": "2"})
read = spark.read.format("basalt").options(path=str(data), subscribe="orders").load()
totals = (
    read.selectExpr("from_json(CAST(value AS STRING), 'id INT, customer INT, total DOUBLE') AS o")
    .groupBy("o.customer")
    .agg({"o.total": "sum"})
    .toDF("customer", "total")
    .selectExpr("CAST(customer AS STRING) AS key", "to_json(struct(customer, total)) AS value")
)
for _ in range(2):
    totals.write.format("basalt").mode("append").options(
        path=str(target), topic="totals", runId="totals-of-the-day", batchId="0"
    ).save()

# %% A stream: records of one topic are copied to the other
query = (
    spark.readStream.format("basalt")
    .options(path=str(data), subscribe="orders", startingOffsets="earliest")
    .load()
    .select("key", "value", "timestamp")
    .writeStream.format("basalt")
    .options(path=str(target), topic="copies", checkpointLocation=str(folder / "checkpoint"))
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
spark.stop()

# %% The result
with basaltmq.open(target) as db:
    for topic in db.topics():
        print(topic.name, [topic.info(partition).records for partition in range(topic.partitions)])
